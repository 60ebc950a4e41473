"""The optimizer of a configuration, as DeepSpeed takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pretrain.config import OptimizerConfig
from pretrain.lamb import Lamb


def build_optimizer(groups: Sequence[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW or LAMB over parameter groups that carry their own `weight_decay`.

    AdamW is torch's fused kernel, on CPU and CUDA: one pass over a flat ZeRO partition, and nothing to compile at start.

    The rate is 0 until the first `step` sets it: without ZeRO, DeepSpeed's half-precision wrapper takes a step with zero
    gradients while it is built (0.19.8 runtime/fp16/unfused_optimizer.py), in which weight decay would move the weights.
    """
    plain = [{key: group[key] for key in ("params", "weight_decay")} for group in groups]
    if config.name == "lamb":
        return Lamb(
            plain,
            lr=0.0,
            betas=config.betas,
            eps=config.eps,
            bias_correction=config.bias_correction,
            adapt_undecayed=config.adapt_undecayed,
            min_ratio=config.min_trust_ratio,
            max_ratio=config.max_trust_ratio,
        )
    return torch.optim.AdamW(plain, lr=0.0, betas=config.betas, eps=config.eps, fused=True)
