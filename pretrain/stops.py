"""Asking a run to stop: SIGTERM and SIGUSR1 set a flag that all ranks agree on at the next step boundary."""

from __future__ import annotations

import signal
from types import FrameType

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_FAULT = 70
"""Training ended itself: too many steps with non-finite gradients, or weights that are not finite (EX_SOFTWARE)."""
EXIT_STOPPED = 75
"""A checkpoint was saved after a signal; the same command goes on from it (EX_TEMPFAIL)."""


class TrainingFault(RuntimeError):
    """Training cannot go on: its numbers are no longer finite."""


class StopRequest:
    """Whether this rank was told to stop. Signals arrive on the main thread between two instructions: only a flag."""

    def __init__(self) -> None:
        self.wanted = False
        self.signal = ""

    def listen(self) -> None:
        """Take over SIGTERM and SIGUSR1 for the rest of the process's life.

        Also after the loop: DeepSpeed's launcher sends SIGTERM to the other ranks as soon as one has left with a
        non-zero code, and they should leave with the same code.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
        self.signal = signal.Signals(number).name
