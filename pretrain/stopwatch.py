"""Clocks of a run: a part of a step as its device sees it, and the training time that a budget is counted in."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import torch


class Stopwatch:
    """Adds up the seconds that a device spends inside its `with` blocks, without waiting for the device.

    On CUDA a pair of events a block on the current stream: kernels and the waits between them, not the host's time to
    queue them. Elsewhere the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._host = self._began = 0.0

    def __enter__(self) -> Self:
        if self._cuda:
            self._pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self._pairs[-1][0].record()
        else:
            self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cuda:
            self._pairs[-1][1].record()
        else:
            self._host += time.perf_counter() - self._began

    def seconds(self) -> float:
        """So far. Waits for the last block's end, which a finished optimizer step has waited for already."""
        if self._pairs:
            self._pairs[-1][1].synchronize()
        return self._host + sum(begin.elapsed_time(end) for begin, end in self._pairs) / 1000


class TrainingClock:
    """Seconds of training behind the weights: those that the checkpoint states, and those since then.

    Training, validating and saving count; starting does not, nor what a kill or a roll-back has undone.
    """

    now = staticmethod(time.monotonic)

    def __init__(self, before: float = 0.0) -> None:
        self._zero = self.now() - before

    def read(self) -> float:
        """Seconds so far."""
        return self.now() - self._zero
