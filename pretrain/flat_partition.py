"""Where each parameter lies inside the flat tensor that ZeRO hands to the optimizer.

ZeRO 1 and 2 put the parameters of an optimizer group end to end, cut the line into one equal partition per rank, and give
the optimizer that partition alone. A parameter may cross the border between two ranks, and the last partition ends in
padding:

    parameters  [  a  ][ b ][     c     ][ d ]..
    ranks       [      0      ][       1       ]     rank 0 holds a, b and the beginning of c; rank 1 the rest

DeepSpeed 0.19.8 (utils/tensor_fragment.py) leaves on every parameter `_hp_mapping`, the address of this rank's fragment of
it (None where this rank has nothing of it), and `_dp_group`, the ranks that share it. ZeRO-3 cuts each tensor by itself
and leaves `ds_id` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatPartition:
    """The pieces of one flat partition, in their order; together they cover it without a gap.

    Attributes:
        sizes: elements of each of the K pieces: fragments of parameters and the padding between and after them.
        owners: (K,) int64 on the partition's device: the parameter's place among all N parameters of the optimizer, N
            for padding.
    """

    sizes: list[int]
    owners: torch.Tensor

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """K views of a tensor of the partition's shape."""
        return list(flat.split(self.sizes))


def find_partition(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> FlatPartition:
    """The layout of `flat`, read from the addresses that DeepSpeed has left on `parameters`.

    Args:
        flat: a tensor of one dimension from the optimizer's groups.
        parameters: all parameters that the optimizer was built with, of every group.
    """
    storage = flat.untyped_storage().data_ptr()
    addresses = []
    for owner, parameter in enumerate(parameters):
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        if mapping is not None and mapping.hp_fragment.untyped_storage().data_ptr() == storage:
            address = mapping.get_hp_fragment_address()
            addresses.append((address.start, address.numel, owner))
    sizes, owners, end = [], [], 0
    for start, length, owner in [*sorted(addresses), (flat.numel(), 0, len(parameters))]:
        for size, whose in ((start - end, len(parameters)), (length, owner)):
            if size:
                sizes.append(size)
                owners.append(whose)
        end = start + length
    return FlatPartition(sizes=sizes, owners=torch.tensor(owners, device=flat.device))


def is_partitioned(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether ZeRO 1 or 2 has taken these parameters over.

    Raises:
        RuntimeError: ZeRO-3 has.
    """
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        raise RuntimeError(
            "LAMB does not run under ZeRO-3: set deepspeed.zero_optimization.stage to 0, 1 or 2, or use optimizer.name=adamw"
        )
    return any(hasattr(parameter, "_hp_mapping") for parameter in parameters)
