"""Loss spikes: seen in the lines of metrics, answered by going back to the newest checkpoint and leaving out what came since.

PaLM's remedy (https://arxiv.org/abs/2204.02311, section 5.1): restart from before the spike and skip the data around it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

_BEFORE = 5
"""Lines that make a level; with fewer nothing is a spike."""


class LossSpike(Exception):
    """The loss left its level; `loader` is where the stream of examples goes on."""

    def __init__(self, message: str, loader: dict[str, int]) -> None:
        super().__init__(message)
        self.loader = loader


class SpikeWatch:
    """Compares each line's loss with the median of the lines before.

    Args:
        ratio: how many times the median is too much; 0 watches nothing.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._losses: deque[float] = deque(maxlen=_BEFORE)

    def look(self, step: int, loss: float, loader: dict[str, int]) -> None:
        """Take the loss of a line; every rank has the same number and so decides the same.

        Raises:
            LossSpike: it is over the ratio.
        """
        if not self._ratio or not math.isfinite(loss):
            return
        if len(self._losses) == _BEFORE and loss > self._ratio * statistics.median(self._losses):
            level = statistics.median(self._losses)
            raise LossSpike(f"step {step}: the MLM loss jumped from {level:.4f} to {loss:.4f}", loader)
        self._losses.append(loss)
