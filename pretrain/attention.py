"""Attention over packed examples: one function, several backends.

Legend: `T` tokens of the batch, `E` examples, `N` heads, `H` head size, `B` examples of a row group, `L` its row length,
`R` the sum of B*L over all groups.

Nothing but this file and first_token.py sees where an example begins. `plan_attention` is called once a batch and settles
the backend and the row groups; `attention` runs once a layer.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F

from pretrain.dropout import keep_mask, kept_share

Backend = Literal["padded", "flash_attn", "varlen", "reference"]

BACKENDS: dict[str, str] = {
    "flash_attn": "CUDA from capability 8.0 on, half precision, the flash_attn package: its varlen kernel, with dropout",
    "varlen": "CUDA from capability 8.0 on, half precision, no attention dropout: torch.nn.attention.varlen",
    "padded": "everything else: rows of similar length re-padded, scaled dot product per group",
    "reference": "asked for by tests: one example at a time, written out",
}


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Examples re-padded to one length: rows `start : start + count * length` of the R re-padded rows.

    Attributes:
        key_mask_BL: bool, True at real tokens; None where nothing is padded.
    """

    start: int
    count: int
    length: int
    key_mask_BL: torch.Tensor | None


@dataclass(slots=True)
class AttentionPlan:
    """What all layers of one forward pass share.

    Attributes:
        backend: which implementation runs.
        cu_seqlens: (E+1,) int32.
        max_seqlen: tokens of the longest example.
        groups: row groups; of the padded backend only.
        pad_R: index into T for each re-padded row, padding points at its example's first token; None: rows are tokens.
        unpad_T: index into R of each token; None as above.
        padding: the rows of R that are padding, as indices (CPU) or as a mask of R (CUDA, where counting would wait).
    """

    backend: Backend
    cu_seqlens: torch.Tensor
    max_seqlen: int
    groups: list[RowGroup] = field(default_factory=list)
    pad_R: torch.Tensor | None = None
    unpad_T: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    masks: dict[Any, torch.Tensor | None] = field(default_factory=dict)


def choose_backend(device: torch.device, dtype: torch.dtype, dropout: float) -> Backend:
    """The table above as code. Attention dropout is never left out: a backend without it is not chosen."""
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and _has_flash_attention(device):
        if find_spec("flash_attn") is not None:
            return "flash_attn"
        if dropout == 0.0 and _has_varlen():
            return "varlen"
    return "padded"


@cache
def _has_flash_attention(device: torch.device) -> bool:
    """Whether both varlen kernels run there: they need compute capability 8.0. Without a device nothing is ruled out."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _has_varlen() -> bool:
    """Whether this torch has varlen attention that takes a window; its first releases took `is_causal` instead."""
    if find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in inspect.signature(varlen_attn).parameters


def describe_attention(device: torch.device, dtype: torch.dtype, dropout: float) -> str:
    """One line for the start of a run: the backend and when it is used."""
    backend = choose_backend(device, dtype, dropout)
    return f"attention: {backend} ({BACKENDS[backend]}), dropout {dropout:g}"


def plan_attention(
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    tokens: int,
    dtype: torch.dtype,
    dropout: float,
    backend: Backend | None = None,
) -> AttentionPlan:
    """Settle backend and row groups for a batch.

    Args:
        cu_seqlens: (E+1,) int32, on the device that computes.
        max_seqlen: tokens of the longest example.
        tokens: T.
        dtype: of the queries, keys and values.
        dropout: attention dropout in force (0 in evaluation).
        backend: only for tests and comparisons.

    Raises:
        ValueError: `varlen` asked for together with dropout, which it cannot do.
    """
    device = cu_seqlens.device
    backend = backend or choose_backend(device, dtype, dropout)
    if backend == "varlen" and dropout > 0.0:
        raise ValueError(
            "torch's varlen attention has no dropout; set model.attention_dropout to 0 or use another backend"
        )
    plan = AttentionPlan(backend, cu_seqlens, max_seqlen)
    if backend == "padded":
        if device.type == "cpu":
            _group_rows(plan, tokens)
        else:
            _one_group(plan, tokens)
    return plan


_SMALL_GROUP = 64
"""Tokens that a row group should have: with fewer, its calls cost more than copying its rows."""


def _group_rows(plan: AttentionPlan, tokens: int) -> None:
    """Group examples of similar length: a row holds at most an eighth (or 8 tokens) of padding.

    Where examples come by falling length, as in evaluation, groups of equal lengths need no copy at all and are taken unless
    they get too small.
    """
    starts = plan.cu_seqlens[:-1].long()
    lengths = (plan.cu_seqlens[1:] - plan.cu_seqlens[:-1]).long()
    order = torch.argsort(lengths, descending=True, stable=True)
    ordered = lengths[order].tolist()
    in_place = bool((lengths[1:] <= lengths[:-1]).all()) and tokens >= _SMALL_GROUP * len(set(ordered))
    pieces, masks, first = [], [], 0
    while first < len(ordered):
        longest, end = ordered[first], first
        least = longest if in_place else longest - max(8, longest // 8)
        while end < len(ordered) and ordered[end] >= least:
            end += 1
        members = order[first:end]
        offsets = torch.arange(longest)
        real = offsets < lengths[members, None]
        pieces.append(torch.where(real, starts[members, None] + offsets, starts[members, None]).reshape(-1))
        mask = None if ordered[end - 1] == longest else real
        start = plan.groups[-1].start + plan.groups[-1].count * plan.groups[-1].length if plan.groups else 0
        plan.groups.append(RowGroup(start, end - first, longest, mask))
        masks.append(real.reshape(-1))
        first = end
    rows, real_R = torch.cat(pieces), torch.cat(masks)
    if len(rows) == tokens and bool((rows[1:] > rows[:-1]).all()):
        return
    unpad = torch.empty(tokens, dtype=torch.int64)
    unpad[rows[real_R]] = real_R.nonzero().view(-1)
    plan.pad_R, plan.unpad_T, plan.padding = rows, unpad, (~real_R).nonzero().view(-1)


def _one_group(plan: AttentionPlan, tokens: int) -> None:
    """All examples padded to the longest; nothing here waits for the device."""
    cu, device = plan.cu_seqlens.long(), plan.cu_seqlens.device
    lengths, examples = cu[1:] - cu[:-1], len(plan.cu_seqlens) - 1
    offsets = torch.arange(plan.max_seqlen, device=device)
    real = offsets < lengths[:, None]
    plan.groups.append(RowGroup(0, examples, plan.max_seqlen, real))
    plan.pad_R = torch.where(real, cu[:-1, None] + offsets, cu[:-1, None]).reshape(-1)
    example_T = torch.repeat_interleave(torch.arange(examples, device=device), lengths, output_size=tokens)
    plan.unpad_T = torch.arange(tokens, device=device) - cu[example_T] + example_T * plan.max_seqlen
    plan.padding = ~real.reshape(-1)


def attention(
    qkv: torch.Tensor, plan: AttentionPlan, heads: int, dropout: float = 0.0, causal: bool = False, window: int = 0
) -> torch.Tensor:
    """Scaled dot-product attention within each example (https://arxiv.org/abs/1706.03762, section 3.2.1).

    Args:
        qkv: (T, 3*N*H), queries, keys and values side by side, each head by head.
        plan: of this batch.
        heads: N.
        dropout: on the attention probabilities.
        causal: a token sees itself and earlier ones only.
        window: tokens on both sides together that are seen; 0: all.

    Returns:
        (T, N*H).
    """
    if plan.backend == "padded":
        return _padded(qkv, plan, heads, dropout, causal, window)
    qkv_T3NH = qkv.view(len(qkv), 3, heads, -1)
    if plan.backend == "reference":
        return _reference(qkv_T3NH, plan, dropout, causal, window).flatten(1)
    q_TNH, k_TNH, v_TNH = qkv_T3NH.unbind(1)
    # Both kernels count the window per side.
    side = window // 2 if window else -1
    sides = (side, 0 if causal else side)
    cu, longest = plan.cu_seqlens, plan.max_seqlen
    if plan.backend == "flash_attn":
        from flash_attn import flash_attn_varlen_func

        out = flash_attn_varlen_func(
            q_TNH, k_TNH, v_TNH, cu, cu, longest, longest, dropout_p=dropout, causal=causal, window_size=sides
        )
    else:
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(q_TNH, k_TNH, v_TNH, cu, cu, longest, longest, window_size=sides)
    return out.flatten(1)


def allowed_pairs(length: int, causal: bool, window: int, device: torch.device) -> torch.Tensor | None:
    """(L, L) bool, True where query (row) may see key (column); None where it may see all."""
    if not causal and not window:
        return None
    offsets = torch.arange(length, device=device)
    distance = offsets[:, None] - offsets
    allowed = distance.abs() <= window // 2 if window else torch.ones_like(distance, dtype=torch.bool)
    return allowed & (distance >= 0) if causal else allowed


def _group_mask(plan: AttentionPlan, group: RowGroup, causal: bool, window: int) -> torch.Tensor | None:
    """(B or 1, L or 1, L) bool of a group, built once a batch. A padding query sees every real key: no row is empty."""
    key = (group.start, causal, window)
    if key not in plan.masks:
        pairs = allowed_pairs(group.length, causal, window, plan.cu_seqlens.device)
        real = group.key_mask_BL
        if real is None:
            plan.masks[key] = None if pairs is None else pairs[None]
        elif pairs is None:
            plan.masks[key] = real[:, None, :]
        else:
            plan.masks[key] = (pairs[None] | ~real[:, :, None]) & real[:, None, :]
    return plan.masks[key]


class _Repad(torch.autograd.Function):
    """Tokens to re-padded rows. Padding rows get no gradient: their keys have weight 0, their outputs are dropped."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pad_R: torch.Tensor, unpad_T: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(unpad_T)
        return x.index_select(0, pad_R)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Unpad(torch.autograd.Function):
    """Re-padded rows to tokens; the inverse of `_Repad`, without the scatter that torch's own backward would do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pad_R: torch.Tensor, unpad_T: torch.Tensor, padding: Any) -> torch.Tensor:
        ctx.save_for_backward(pad_R, padding)
        return x.index_select(0, unpad_T)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        pad_R, padding = ctx.saved_tensors
        rows = gradients[0].index_select(0, pad_R)
        if padding.dtype == torch.bool:
            return rows.masked_fill_(padding[:, None], 0.0), None, None, None
        return rows.index_fill_(0, padding, 0.0), None, None, None


def _padded(
    qkv: torch.Tensor, plan: AttentionPlan, heads: int, dropout: float, causal: bool, window: int
) -> torch.Tensor:
    rows = qkv if plan.pad_R is None else _Repad.apply(qkv, plan.pad_R, plan.unpad_T)
    outputs = []
    # Split at once: its gradient is one concatenation, that of slices a sum of padded ones.
    parts = rows.split([group.count * group.length for group in plan.groups])
    for group, part in zip(plan.groups, parts, strict=True):
        qkv_BL3NH = part.view(group.count, group.length, 3, heads, -1)
        mask = _group_mask(plan, group, causal, window)
        if dropout > 0.0 and qkv.device.type == "cpu":
            outputs.append(_DroppedAttention.apply(qkv_BL3NH, mask, dropout))
        else:
            q, k, v = qkv_BL3NH.permute(2, 0, 3, 1, 4).unbind(0)
            out = F.scaled_dot_product_attention(q, k, v, None if mask is None else mask[:, None], dropout_p=dropout)
            outputs.append(out.transpose(1, 2).reshape(group.count * group.length, -1))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if plan.pad_R is None else _Unpad.apply(out, plan.pad_R, plan.unpad_T, plan.padding)


class _DroppedAttention(torch.autograd.Function):
    """Attention with dropout on the CPU, where scaled_dot_product_attention would fall back to slow generic code.

    Under autocast it computes in the type that it is given, all of it. Kept for the backward pass: queries, keys and
    values head by head, and the probabilities, with a minus where they were dropped.
    """

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, qkv_BL3NH: torch.Tensor, mask: torch.Tensor | None, probability: float) -> torch.Tensor:
        B, L, _, N, H = qkv_BL3NH.shape
        scale, share = 1.0 / math.sqrt(H), kept_share(probability)
        q, k, v = qkv_BL3NH.permute(2, 0, 3, 1, 4).reshape(3, B * N, L, H).unbind(0)
        weights = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0.0, alpha=scale)
        if mask is not None:
            weights.view(B, N, L, L).masked_fill_(~mask[:, None], torch.finfo(weights.dtype).min)
        torch.softmax(weights, -1, out=weights)
        signed = torch.where(keep_mask(weights.shape, probability), weights, weights.neg())
        out = torch.bmm(torch.clamp(signed, min=0.0, out=weights), v).mul_(1.0 / share)
        ctx.save_for_backward(q, k, v, signed)
        ctx.sizes, ctx.scale, ctx.share = (B, L, N, H), scale, share
        return out.view(B, N, L, H).transpose(1, 2).reshape(B * L, N * H)

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        q, k, v, signed = ctx.saved_tensors
        B, L, N, H = ctx.sizes
        gradient = gradients[0].view(B, L, N, H).transpose(1, 2).reshape(B * N, L, H).mul(1.0 / ctx.share)
        grad_qkv = gradient.new_empty(3, B * N, L, H)
        kept = signed.clamp(min=0.0)
        torch.bmm(kept.transpose(1, 2), gradient, out=grad_qkv[2])
        grad_scores = torch.bmm(gradient, v.transpose(1, 2)).mul_(kept)
        # Softmax: w * (g - sum(w * g)), where w * g is what stands in grad_scores.
        sums = grad_scores.sum(-1, keepdim=True)
        grad_scores.addcmul_(torch.abs(signed, out=kept), sums, value=-1.0).mul_(ctx.scale)
        torch.bmm(grad_scores, k, out=grad_qkv[0])
        torch.bmm(grad_scores.transpose(1, 2), q, out=grad_qkv[1])
        return grad_qkv.view(3, B, N, L, H).permute(1, 3, 0, 2, 4).contiguous(), None, None


def _reference(qkv_T3NH: torch.Tensor, plan: AttentionPlan, dropout: float, causal: bool, window: int) -> torch.Tensor:
    """Example by example, as the paper writes it."""
    outputs = []
    for example in qkv_T3NH.tensor_split(plan.cu_seqlens[1:-1].long().cpu()):
        q, k, v = (part.transpose(0, 1) for part in example.unbind(1))
        scores_NLL = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        allowed = allowed_pairs(len(example), causal, window, q.device)
        if allowed is not None:
            scores_NLL = scores_NLL.masked_fill(~allowed, float("-inf"))
        weights_NLL = F.dropout(scores_NLL.softmax(-1), dropout, dropout > 0.0)
        outputs.append((weights_NLL @ v).transpose(0, 1))
    return torch.cat(outputs)
