"""Dropout, residual sum and layer norm in one pass over memory: a Triton kernel for the end of every sublayer.

    total = residual + dropout(x);  y = norm(total)

With post-norm y goes on alone, with pre-norm both do: total is the residual of the next sublayer. Three kernels of torch
read and write the row five times; this one reads x and residual and writes y and the sum, which the backward pass starts
from. The dropout mask is never stored: both passes draw it from the same counter-based numbers
(Philox, https://doi.org/10.1145/2063384.2063405), so recomputing a layer gives the same mask.

Runs on CUDA, and on the CPU through Triton's interpreter (TRITON_INTERPRET=1 before triton is imported).

Legend: `T` rows, `D` width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _forward(
    x, residual, weight, bias, y, total, mean, rstd, seed, width, eps, rate, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = row * width + columns
    value = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if rate > 0.0:
        value = tl.where(tl.rand(seed, places) >= rate, value / (1.0 - rate), 0.0)
    value += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    middle = tl.sum(value, axis=0) / width
    centred = tl.where(inside, value - middle, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / width + eps)
    result = centred * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + places, result, mask=inside)
    tl.store(total + places, value, mask=inside)
    tl.store(mean + row, middle)
    tl.store(rstd + row, scale)


@triton.jit
def _backward(
    dy, dtotal, total, mean, rstd, weight, dx, dresidual, dweight, dbias, seed, rows, width, rate,
    BOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([BLOCK], dtype=tl.float32)
    bias_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program, rows, programs):
        places = row * width + columns
        gradient = tl.load(dy + places, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(total + places, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        normed = tl.where(inside, (value - tl.load(mean + row)) * scale, 0.0)
        weight_sum += gradient * normed
        bias_sum += gradient
        inner = gradient * gain
        along = tl.sum(inner * normed, axis=0) / width
        inner = (inner - tl.sum(inner, axis=0) / width - normed * along) * scale
        if BOTH:
            inner += tl.load(dtotal + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(dresidual + places, inner, mask=inside)
        if rate > 0.0:
            inner = tl.where(tl.rand(seed, places) >= rate, inner / (1.0 - rate), 0.0)
        tl.store(dx + places, inner, mask=inside)
    tl.store(dweight + program * width + columns, weight_sum, mask=inside)
    tl.store(dbias + program * width + columns, bias_sum, mask=inside)


class _DropoutAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        weight_D: torch.Tensor,
        bias_D: torch.Tensor | None,
        eps: float,
        rate: float,
        seed: int,
        both: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x_TD, residual_TD = x_TD.contiguous(), residual_TD.contiguous()
        rows, width = x_TD.shape
        y, total = torch.empty_like(x_TD), torch.empty_like(x_TD)
        mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x_TD.device) for _ in range(2))
        block = triton.next_power_of_2(width)
        bias = weight_D if bias_D is None else bias_D
        _forward[(rows,)](
            x_TD, residual_TD, weight_D, bias, y, total, mean, rstd, seed, width, eps, rate,
            HAS_BIAS=bias_D is not None, BLOCK=block,
        )  # fmt: skip
        ctx.save_for_backward(total, mean, rstd, weight_D)
        ctx.settings = rate, seed, block, None if bias_D is None else bias_D.dtype, both
        return (y, total) if both else y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, mean, rstd, weight = ctx.saved_tensors
        rate, seed, block, bias_dtype, both = ctx.settings
        dy, dtotal = gradients[0].contiguous(), gradients[-1].contiguous()
        rows, width = total.shape
        # Each program sums its rows' gradients of weight and bias; the few partial sums are added by torch.
        programs = max(1, min(rows, 256))
        dx, dresidual = torch.empty_like(dy), torch.empty_like(dy)
        partial = torch.empty(2, programs, width, dtype=torch.float32, device=dy.device)
        _backward[(programs,)](
            dy, dtotal, total, mean, rstd, weight, dx, dresidual, partial[0], partial[1], seed, rows, width, rate,
            BOTH=both, BLOCK=block,
        )  # fmt: skip
        dweight, dbias = partial.sum(1)
        grad_bias = None if bias_dtype is None else dbias.to(bias_dtype)
        return dx, dresidual, dweight.to(weight.dtype), grad_bias, None, None, None, None


def dropout_add_norm(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    rate: float,
) -> torch.Tensor:
    """norm(residual + dropout(x)), computed in fp32 and returned in the type of `x`.

    Args:
        x_TD, residual_TD: of one type.
        weight_D, bias_D: of the layer norm.
        eps: added to the variance.
        rate: share of x that is dropped; 0 drops nothing. The mask follows torch's CPU generator.
    """
    return _DropoutAddNorm.apply(x_TD, residual_TD, weight_D, bias_D, eps, rate, _seed(rate), False)


def dropout_add_and_norm(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    rate: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum residual + dropout(x), and its norm; arguments as `dropout_add_norm`."""
    y, total = _DropoutAddNorm.apply(x_TD, residual_TD, weight_D, bias_D, eps, rate, _seed(rate), True)
    return total, y


def _seed(rate: float) -> int:
    return int(torch.randint(2**31 - 1, ())) if rate else 0
