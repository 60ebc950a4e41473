"""Rotary position embedding on flat tokens (https://arxiv.org/abs/2104.09864), halves rotated as in Hugging Face models."""

from __future__ import annotations

import torch


def rotary_angles(
    position_ids_T: torch.Tensor, head_size: int, base: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each (T, 1, 1, H), computed in fp32 and cast to `dtype`."""
    exponents = torch.arange(0, head_size, 2, device=position_ids_T.device, dtype=torch.float32) / head_size
    angles_TH = (position_ids_T[:, None].float() / base**exponents).repeat(1, 2)
    return angles_TH.cos().to(dtype)[:, None, None], angles_TH.sin().to(dtype)[:, None, None]


def rotate(qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], heads: int) -> torch.Tensor:
    """Turn the queries and keys of `qkv` (T, 3*N*H) by their positions; values stay."""
    cos, sin = angles
    qkv_T3NH = qkv.view(len(qkv), 3, heads, -1)
    qk, v = qkv_T3NH[:, :2], qkv_T3NH[:, 2:]
    first, second = qk.chunk(2, dim=-1)
    turned = qk * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, v), dim=1).view_as(qkv)
