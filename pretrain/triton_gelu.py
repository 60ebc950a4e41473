"""Bias and GELU of the feed-forward in one pass over memory: a Triton kernel, with or without a gate.

    y = gelu(x + bias)                                   the plain feed-forward
    y = gelu(x[:, :I] + bias[:I]) * (x[:, I:] + bias[I:])    with a gate (GeGLU, https://arxiv.org/abs/2002.05202)

The backward pass starts from x, which the product before has written anyway, and sums the bias's gradient on the way, so
that nothing is read a second time. GELU is exact (erf) or by tanh (https://arxiv.org/abs/1606.08415, section 2).

Runs on CUDA, and on the CPU through Triton's interpreter (TRITON_INTERPRET=1 before triton is imported).

Legend: `T` rows, `I` width of the result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_PROGRAMS = 256
"""Programs along the rows of the backward pass; each sums the bias's gradient over its rows."""


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    """gelu(x) and its derivative, both fp32."""
    if TANH:
        # (1 + tanh(u)) / 2 = sigmoid(2u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = share + x * share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return x * share, slope


@triton.jit
def _forward(x, bias, y, width, TANH: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    start = row * width * (2 if GATED else 1)
    value = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    result, _ = _gelu(value, TANH)
    if GATED:
        gate = tl.load(x + start + width + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            gate += tl.load(bias + width + columns, mask=inside, other=0.0).to(tl.float32)
        result *= gate
    tl.store(y + row * width + columns, result, mask=inside)


@triton.jit
def _backward(
    dy, x, bias, dx, dbias, rows, width,
    TANH: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    step = width * (2 if GATED else 1)
    value_sum = tl.zeros([BLOCK], dtype=tl.float32)
    gate_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for number in range(program, rows, programs):
        start = tl.cast(number, tl.int64) * step
        gradient = tl.load(dy + tl.cast(number, tl.int64) * width + columns, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        result, slope = _gelu(value, TANH)
        if GATED:
            gate = tl.load(x + start + width + columns, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                gate += tl.load(bias + width + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx + start + width + columns, gradient * result, mask=inside)
            gate_sum += gradient * result
            slope *= gate
        tl.store(dx + start + columns, gradient * slope, mask=inside)
        value_sum += gradient * slope
    if HAS_BIAS:
        tl.store(dbias + program * step + columns, value_sum, mask=inside)
        if GATED:
            tl.store(dbias + program * step + width + columns, gate_sum, mask=inside)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, tanh: bool, gated: bool) -> torch.Tensor:
        x = x.contiguous()
        rows, width = len(x), x.shape[1] // (2 if gated else 1)
        y = x.new_empty(rows, width)
        options = {"TANH": tanh, "GATED": gated, "HAS_BIAS": bias is not None, "BLOCK": _block(width)}
        if rows:
            _forward[(rows, triton.cdiv(width, options["BLOCK"]))](x, x if bias is None else bias, y, width, **options)
        ctx.save_for_backward(x, bias)
        ctx.options = options
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dy, dx, options = gradients[0].contiguous(), torch.empty_like(x), ctx.options
        rows, width = dy.shape
        programs = max(1, min(rows, _PROGRAMS))
        partial = torch.zeros(programs, 0 if bias is None else x.shape[1], dtype=torch.float32, device=x.device)
        if rows:
            grid = programs, triton.cdiv(width, options["BLOCK"])
            _backward[grid](dy, x, x if bias is None else bias, dx, partial, rows, width, **options)
        return dx, None if bias is None else partial.sum(0).to(bias.dtype), None, None


def _block(width: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(width))


def bias_gelu(x: torch.Tensor, bias: torch.Tensor | None, tanh: bool, gated: bool) -> torch.Tensor:
    """GELU of `x + bias`, computed in fp32 and returned in the type of `x`.

    Args:
        x: (T, I), or (T, 2*I) with `gated`: what goes through GELU, then the gate.
        bias: of x's width, or None.
        tanh: the approximation instead of exact GELU.
        gated: multiply by the second half.

    Returns:
        (T, I).
    """
    return _BiasGelu.apply(x, bias, tanh, gated)
