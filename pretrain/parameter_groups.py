"""Which tensors decay: matrices do, biases and norms never do, whatever their modules are called."""

from __future__ import annotations

from typing import Any

from torch import nn

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups with every trainable tensor in exactly one; a tied tensor counts once.

    A tensor is left out of the decay when it has fewer than two dimensions or belongs to a norm: the rule looks at what
    a tensor is, not at its name.

    Returns:
        two groups, `{"params", "weight_decay", "names"}`, decaying first; an empty group is left out.
    """
    of_norms = {
        id(tensor) for module in model.modules() if isinstance(module, _NORMS) for tensor in module.parameters()
    }
    decaying: dict[str, Any] = {"params": [], "weight_decay": weight_decay, "names": []}
    fixed: dict[str, Any] = {"params": [], "weight_decay": 0.0, "names": []}
    for name, tensor in model.named_parameters():
        if tensor.requires_grad:
            group = fixed if tensor.ndim < 2 or id(tensor) in of_norms else decaying
            group["params"].append(tensor)
            group["names"].append(name)
    return [group for group in (decaying, fixed) if group["params"]]
