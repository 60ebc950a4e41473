"""Which fused kernels run: the one place of the choice, `model.kernels`, and its words at the start of a run.

| model.kernels | dropout + residual + norm; bias + GELU | masked-token head |
|---|---|---|
| plain | torch's own kernels; one pass for dropout + residual on the CPU | our slices (linear_cross_entropy.py) |
| compile | `torch.compile` | our slices |
| triton | our Triton kernels (triton_norm.py, triton_gelu.py) | liger-kernel where installed, else our slices |
| auto | CPU: plain. CUDA: compile where triton is installed, else plain | CUDA: liger-kernel where installed |

Attention chooses for itself (attention.py). With pre-norm the norm between a layer's two sublayers is fused with the sum
before it; the one at a layer's start runs alone, for the sum before it ends another layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from data_pipeline.config import ConfigError
from pretrain.attention import describe_attention
from pretrain.dropout import dropout_add

if TYPE_CHECKING:
    from pretrain.model_config import EncoderConfig

_WORDS = {
    "torch": "torch's own kernels",
    "compile": "torch.compile",
    "triton": "Triton kernels of this project",
    "chunked": "linear + cross entropy in slices",
    "liger": "fused linear + cross entropy of liger-kernel",
}


@dataclass(frozen=True, slots=True)
class Kernels:
    """What runs where.

    Attributes:
        layers: what stands between a layer's products: dropout + residual + norm, bias + GELU.
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
        ConfigError: Triton asked for where it is not installed, or on a CPU outside its interpreter.
    """
    triton, liger = (find_spec(name) is not None for name in ("triton", "liger_kernel"))
    fused_head: Literal["chunked", "liger"] = "liger" if liger and triton else "chunked"
    if wanted == "triton":
        if not triton:
            raise ConfigError("model.kernels=triton: triton is not installed; install it or choose auto")
        if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError("model.kernels=triton runs on CUDA; choose auto or plain on a CPU")
        return Kernels("triton", fused_head)
    if wanted == "compile":
        return Kernels("compile", "chunked")
    if wanted == "auto" and device == "cuda":
        return Kernels("compile" if triton else "torch", fused_head)
    return Kernels("torch", "chunked")


def describe_kernels(config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Lines for the start of a run: attention, layers, head.

    Raises:
        ConfigError: as `choose_kernels`.
    """
    chosen = choose_kernels(config.kernels, device.type)
    return [
        describe_attention(device, dtype, config.attention_dropout),
        f"dropout + residual + norm, bias + GELU: {_WORDS[chosen.layers]}; masked-token head: {_WORDS[chosen.head]}",
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
            return _compiled(_plain_norm)(x_TD, residual_TD, self.weight, self.bias, self.eps, rate)
        return super().forward(dropout_add(x_TD, residual_TD, rate, True))


class BetweenNorm(nn.LayerNorm):
    """The sum `residual + dropout(x)` and its norm: the end of one sublayer and the start of the next with pre-norm.

    A layer norm by type and names, as `SublayerNorm`.
    """

    def forward(  # type: ignore[override]
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, rate: float, kernels: Kernels
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum, which is the next residual, and the norm; `rate` as in `SublayerNorm`."""
        if kernels.layers == "triton":
            from pretrain.triton_norm import dropout_add_and_norm

            return dropout_add_and_norm(x_TD, residual_TD, self.weight, self.bias, self.eps, rate)
        if kernels.layers == "compile":
            return _compiled(_plain_sum_and_norm)(x_TD, residual_TD, self.weight, self.bias, self.eps, rate)
        total_TD = dropout_add(x_TD, residual_TD, rate, True)
        return total_TD, super().forward(total_TD)


class GeluLinear(nn.Linear):
    """A linear layer and GELU after it, gated or not, by the kernel that was chosen; a linear layer by type and names.

    Args:
        inputs: width of x.
        outputs: width of the result; with `gated` the layer has twice as many rows, GELU's half first.
        bias: whether there is one.
        tanh: the approximation instead of exact GELU.
        gated: GeGLU (https://arxiv.org/abs/2002.05202).
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, tanh: bool, gated: bool = False) -> None:
        super().__init__(inputs, outputs * (2 if gated else 1), bias=bias)
        self.tanh, self.gated = tanh, gated

    def forward(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:  # type: ignore[override]
        """(T, inputs) to (T, outputs)."""
        if kernels.layers == "torch":
            inner = super().forward(x)
            if self.gated or torch.is_grad_enabled():
                return _gelu(inner, self.tanh, self.gated)
            # Nobody else holds the product: it is overwritten.
            return torch.ops.aten.gelu_(inner, approximate="tanh" if self.tanh else "none")
        inner = F.linear(x, self.weight)
        if kernels.layers == "triton":
            from pretrain.triton_gelu import bias_gelu

            return bias_gelu(inner, self.bias, self.tanh, self.gated)
        return _compiled(_plain_bias_gelu)(inner, self.bias, self.tanh, self.gated)


def _gelu(inner: torch.Tensor, tanh: bool, gated: bool) -> torch.Tensor:
    approximate = "tanh" if tanh else "none"
    if not gated:
        return F.gelu(inner, approximate=approximate)
    value, gate = inner.chunk(2, dim=-1)
    return F.gelu(value, approximate=approximate) * gate


def _plain_bias_gelu(inner: torch.Tensor, bias: torch.Tensor | None, tanh: bool, gated: bool) -> torch.Tensor:
    return _gelu(inner if bias is None else inner + bias, tanh, gated)


def _plain_sum_and_norm(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    rate: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    total_TD = residual_TD + (F.dropout(x_TD, rate, True) if rate else x_TD)
    return total_TD, F.layer_norm(total_TD, weight.shape, weight, bias, eps)


def _plain_norm(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    rate: float,
) -> torch.Tensor:
    return _plain_sum_and_norm(x_TD, residual_TD, weight, bias, eps, rate)[1]


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One compiled function for all layers and any number of tokens."""
    return torch.compile(function, dynamic=True)
