"""What a build shows: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINE_SECONDS = 10.0


class Advance(Protocol):
    """Tells a stage's progress."""

    def __call__(self, completed: int, total: int) -> None:
        """`completed` of `total` tasks are done."""


class BuildProgress:
    """Lines and bars of a build, on standard output."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        """One plain line."""
        self._console.print(text, markup=False)

    @contextmanager
    def stage(self, title: str) -> Iterator[Advance]:
        """A stage that runs in the block; yields what to call when tasks complete."""
        started = time.monotonic()
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            with Progress(*columns, console=self._console, transient=True) as bar:
                task = bar.add_task(title, total=None)
                yield lambda completed, total: bar.update(task, completed=completed, total=total)
        else:
            self.line(f"{title}: started")
            last = [started]

            def advance(completed: int, total: int) -> None:
                now = time.monotonic()
                if now - last[0] >= _LINE_SECONDS and completed < total:
                    last[0] = now
                    self.line(f"{title}: {completed} of {total} tasks, {now - started:.0f} s")

            yield advance
        self.line(f"{title}: done in {time.monotonic() - started:.1f} s")
