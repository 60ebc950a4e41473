"""A rank that hangs ends itself, after it has shown where it hangs.

Hanging ranks wait for each other: one is stuck, the others sit in a collective that it never joins. Each rank's watchdog
prints its name, what it was doing and the stacks of all its threads, and ends the process; the launcher ends the rest. The
rank that is not inside a collective is the one to look at.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time
from types import TracebackType
from typing import Self

from pretrain.stops import EXIT_HANG

_GRACE_SECONDS = 20.0


class Watchdog:
    """A context manager that ends the process with `EXIT_HANG` where `beat` is not called for too long.

    A thread looks at the time. Where a library holds the interpreter's lock, and no thread can run, faulthandler's timer,
    which needs none, prints the stacks a little later and ends the process with 1.

    Args:
        limit: seconds between two calls of `beat`; 0 watches nothing.
        rank: this rank, for the message.
    """

    def __init__(self, limit: float, *, rank: int) -> None:
        self._limit, self._rank = limit, rank
        self._activity, self._since = "starting", time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, activity: str) -> None:
        """Something was finished; `activity` comes next."""
        self._activity, self._since = activity, time.monotonic()

    def __enter__(self) -> Self:
        if self._limit:
            self.beat(self._activity)
            self._arm()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._limit:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._done.wait(min(self._limit / 4, 5.0)):
            self._arm()
            waited = time.monotonic() - self._since
            if waited > self._limit:
                self._end(waited)

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self._limit + _GRACE_SECONDS, exit=True, file=2)

    def _end(self, waited: float) -> None:
        text = (
            f"rank {self._rank} on {socket.gethostname()} made no progress for {waited:.0f} s while {self._activity} "
            "(faults.hang_seconds); the stacks of its threads:\n"
        )
        os.write(2, text.encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
        os._exit(EXIT_HANG)
