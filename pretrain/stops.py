"""Asking a run to stop: a signal, a used-up time budget or a dead launcher; all ranks agree at the next step boundary.

SIGTERM, SIGUSR1 and Ctrl-C ask for a stop: the step is finished, a checkpoint saved, the exit code is 75. A second SIGTERM
or Ctrl-C, at least `SECOND_SIGNAL_SECONDS` later, ends the rank at once; SIGUSR1 may come as often as it likes.

DeepSpeed's launcher (0.19.8): a rank's exit code becomes the launcher's. `deepspeed` itself dies of SIGTERM and SIGUSR1
(143 and 138) and leaves its ranks behind: they notice, save and leave. Its child `deepspeed.launcher.launch` passes SIGTERM to
one rank after the other, kills what is not gone within 30 s, and leaves with 1.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_FAULT = 70
"""Training ended itself: too many steps with non-finite gradients, or weights that are not finite (EX_SOFTWARE)."""
EXIT_HANG = 71
"""The watchdog ended a rank that made no progress (EX_OSERR)."""
EXIT_NOT_SAVED = 74
"""A checkpoint could not be written, for example on a full disk; the earlier ones are whole (EX_IOERR)."""
EXIT_STOPPED = 75
"""A checkpoint was saved after a request to stop; the same command goes on from it (EX_TEMPFAIL)."""
SECOND_SIGNAL_SECONDS = 5.0
"""Slurm and launchers send one request twice within a moment; a person waits longer."""
_LOOK_SECONDS = 1.0
_LAUNCHER = b"deepspeed.launcher.launch"


class TrainingFault(RuntimeError):
    """Training cannot go on: its numbers are no longer finite."""


class StopRequest:
    """Whether this rank was told to stop. Signals arrive on the main thread between two instructions: only a flag.

    Args:
        budget_seconds: ask for a stop by itself this long after now; 0: never.

    Attributes:
        reason: what asked for the stop; empty while nothing did.
    """

    def __init__(self, budget_seconds: float = 0.0) -> None:
        self.reason = ""
        self._asked_at = self._looked_at = 0.0
        self._ends_at = time.monotonic() + budget_seconds if budget_seconds else float("inf")
        self._leaving = False
        self._launchers = launcher_processes()

    @property
    def wanted(self) -> bool:
        """Whether to stop after this step."""
        now = time.monotonic()
        if not self.reason and now >= self._ends_at:
            self.reason = "the time budget is used up (run.max_hours)"
        if not self.reason and self._launchers and now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            if launcher_processes() != self._launchers:
                self.reason = "DeepSpeed's launcher is gone"
        return bool(self.reason)

    def listen(self) -> None:
        """Take over SIGTERM, SIGUSR1 and SIGINT for the rest of the process's life.

        Also after the loop: DeepSpeed's launcher sends SIGTERM to the other ranks as soon as one has left with a
        non-zero code, and they should leave with the same code.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._handle)

    def leave(self) -> None:
        """The checkpoint is saved: further signals have nothing to add."""
        self._leaving = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if not self._asked_at:
            self._asked_at, self.reason = now, self.reason or name
        elif number != signal.SIGUSR1 and not self._leaving and now - self._asked_at >= SECOND_SIGNAL_SECONDS:
            os.write(2, f"second signal ({name}): stopping at once, without saving\n".encode())
            os._exit(128 + number)


def launcher_processes() -> tuple[int, ...]:
    """Process ids of DeepSpeed's launcher and of the `deepspeed` command above it; empty where neither started us."""
    launch = os.getppid()
    if _LAUNCHER not in _command(launch):
        return ()
    try:
        status = Path(f"/proc/{launch}/stat").read_text()
    except OSError:
        return ()
    runner = int(status.rpartition(")")[2].split()[1])
    return (launch, runner) if b"deepspeed" in _command(runner) else (launch,)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
