"""From the device to the host: a number, without waiting for what was queued after it; a whole state, to be written later."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

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


class HostCopies:
    """Copies of a training state in host memory, which is kept from one time to the next.

    Touching new memory takes several times as long as copying into memory that is there already. On CUDA the memory is
    pinned and the copies run in the stream: later kernels cannot overtake them, and only `arrive` waits.
    """

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._used = 0
        self._of: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._queued = False
        self._arrived: torch.cuda.Event | None = None

    def start(self) -> None:
        """Begin a new set; the last one's copies are overwritten."""
        self._used = 0
        self._of.clear()

    def seal(self) -> None:
        """The set is complete."""
        self._of.clear()
        if self._queued:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def arrive(self) -> None:
        """Wait until the copies are there; any thread may call this."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def of(self, tensor: torch.Tensor, *, lasting: bool = True) -> torch.Tensor:
        """The copy of a tensor; one that was copied before in this set is not copied again.

        Args:
            tensor: on any device.
            lasting: it outlives the set. Where it does not, another may come to lie at its address.
        """
        tensor = tensor.detach()
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if lasting and tensor.numel() and key in self._of:
            return self._of[key][1]
        host = self._memory(tensor)
        host.copy_(tensor, non_blocking=True)
        self._queued = self._queued or tensor.is_cuda
        if lasting:
            self._of[key] = (tensor, host)
        return host

    def tree(self, item: Any) -> Any:
        """Dictionaries, lists and tuples with copies of the tensors and of everything else in them."""
        if torch.is_tensor(item):
            return self.of(item)
        if type(item) in (dict, OrderedDict):
            copied = copy.copy(item)  # with the attributes of an ordered one
            for key, value in item.items():
                copied[key] = self.tree(value)
            return copied
        if type(item) in (list, tuple):
            return type(item)(self.tree(value) for value in item)
        return copy.deepcopy(item)

    def _memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """The next piece of host memory; a new one where the kept one does not fit."""
        place, self._used = self._used, self._used + 1
        if place < len(self._kept):
            kept = self._kept[place]
            if kept.shape == tensor.shape and kept.dtype == tensor.dtype:
                return kept
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._kept[place : place + 1] = [host]
        return host
