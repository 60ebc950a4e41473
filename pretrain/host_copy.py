"""Reading a number from the device without waiting for everything that was queued after it."""

from __future__ import annotations

import torch


class HostCopy:
    """A small tensor on its way to the host; reading it waits for this copy, not for what was queued after it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[float]:
        """Its values."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor.tolist()
