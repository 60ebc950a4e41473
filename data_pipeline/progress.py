"""What a build shows: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 10.0
"""Least time between two lines about the same stage, where there is no terminal."""


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
    def stage(self, title: str, amount: float = 0, unit: str = "") -> Iterator[Advance]:
        """A stage that runs in the block; yields what to call when tasks complete.

        Args:
            title: what is done.
            amount: what all tasks together go through, for the rate; 0: no rate is shown.
            unit: of `amount`.
        """
        started = time.monotonic()
        before: list[int] = []  # tasks that were complete at the start: they say nothing about the rate

        def rate(completed: int, total: int) -> tuple[str, float]:
            """In words, and seconds left (0 while unknown)."""
            before.append(completed)
            share, seconds = (completed - before[0]) / max(1, total), time.monotonic() - started
            if not share:
                return "", 0.0
            words = f"{amount * share / seconds:.1f} {unit}/s" if amount else ""
            return words, seconds * (total - completed) / (completed - before[0])

        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            with Progress(*columns, console=self._console, transient=True) as bar:
                task = bar.add_task(title, total=None, rate="")
                yield lambda completed, total: bar.update(
                    task, completed=completed, total=total, rate=rate(completed, total)[0]
                )
        else:
            self.line(f"{title}: started")
            last = [started]

            def advance(completed: int, total: int) -> None:
                now = time.monotonic()
                words, left = rate(completed, total)
                if now - last[0] >= LINE_SECONDS and completed < total:
                    last[0] = now
                    parts = [f"{completed} of {total} tasks, {now - started:.0f} s", words]
                    parts.append(f"about {left:.0f} s left" if left else "")
                    self.line(f"{title}: {', '.join(part for part in parts if part)}")

            yield advance
        self.line(f"{title}: done in {time.monotonic() - started:.1f} s")
