"""Which fused kernels run: the one place of the choice, `model.kernels`, and its words at the start of a run.

| model.kernels | end of a sublayer (dropout, residual, norm) | masked-token head |
|---|---|---|
| plain | torch's own kernels; one pass for dropout + residual on the CPU | our slices (linear_cross_entropy.py) |
| compile | `torch.compile` | our slices |
| triton | our Triton kernel (triton_norm.py) | liger-kernel where installed, else our slices |
| auto | CPU: plain. CUDA: compile where triton is installed, else plain | CUDA: liger-kernel where installed |

Attention chooses for itself (attention.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import nn

from pretrain.attention import describe_attention
from pretrain.dropout import dropout_add

if TYPE_CHECKING:
    from pretrain.model_config import EncoderConfig

_WORDS = {
    "torch": "torch's own kernels",
    "compile": "torch.compile",
    "triton": "Triton kernel of this project",
    "chunked": "linear + cross entropy in slices",
    "liger": "fused linear + cross entropy of liger-kernel",
}


@dataclass(frozen=True, slots=True)
class Kernels:
    """What runs where.

    Attributes:
        layers: the end of each sublayer, with post-norm.
        head: vocabulary product and cross entropy.
    """

    layers: Literal["torch", "compile", "triton"]
    head: Literal["chunked", "liger"]


@cache
def choose_kernels(wanted: str, device: str) -> Kernels:
    """The table above as code.

    Args:
        wanted: `model.kernels`.
        device: "cpu" or "cuda".

    Raises:
        ValueError: Triton asked for where it is not installed, or on a CPU outside its interpreter.
    """
    triton, liger = (find_spec(name) is not None for name in ("triton", "liger_kernel"))
    fused_head: Literal["chunked", "liger"] = "liger" if liger and triton else "chunked"
    if wanted == "triton":
        if not triton:
            raise ValueError("model.kernels=triton: triton is not installed; install it or choose auto")
        if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("model.kernels=triton runs on CUDA; choose auto or plain on a CPU")
        return Kernels("triton", fused_head)
    if wanted == "compile":
        return Kernels("compile", "chunked")
    if wanted == "auto" and device == "cuda":
        return Kernels("compile" if triton else "torch", fused_head)
    return Kernels("torch", "chunked")


def describe_kernels(config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Lines for the start of a run: attention, sublayers, head.

    Raises:
        ValueError: as `choose_kernels`.
    """
    chosen = choose_kernels(config.kernels, device.type)
    layers = chosen.layers if config.norm == "post" else "torch"
    return [
        describe_attention(device, dtype, config.attention_dropout),
        f"dropout + residual + norm: {_WORDS[layers]}; masked-token head: {_WORDS[chosen.head]}",
    ]


class SublayerNorm(nn.LayerNorm):
    """`norm(residual + dropout(x))`, the end of a sublayer with post-norm, by the kernel that was chosen.

    A layer norm by type and names: its tensors do not decay and export as one.
    """

    def forward(  # type: ignore[override]
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, rate: float, kernels: Kernels
    ) -> torch.Tensor:
        """x_TD; `rate` is the dropout in force, 0 in evaluation."""
        if kernels.layers == "triton":
            from pretrain.triton_norm import dropout_add_norm

            return dropout_add_norm(x_TD, residual_TD, self.weight, self.bias, self.eps, rate)
        if kernels.layers == "compile":
            return _compiled()(x_TD, residual_TD, self.weight, self.bias, self.eps, rate)
        return super().forward(dropout_add(x_TD, residual_TD, rate, True))


def _plain(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    rate: float,
) -> torch.Tensor:
    total_TD = residual_TD + (F.dropout(x_TD, rate, True) if rate else x_TD)
    return F.layer_norm(total_TD, weight.shape, weight, bias, eps)


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    """One compiled function for all layers and any number of tokens."""
    return torch.compile(_plain, dynamic=True)
