"""What a person sees of a run: a bar on a terminal, one plain line an interval elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class ProgressDisplay:
    """A context manager that shows steps and rates; silent on every rank but 0.

    Args:
        total: steps of the run.
        start: steps already done.
        visible: False shows nothing.
        stream: where to; a bar if it is a terminal.
    """

    def __init__(self, total: int, start: int = 0, *, visible: bool = True, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout
        self._visible, self._total = visible, total
        self._bar: Progress | None = None
        if visible and self._stream.isatty():
            columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(
                *columns,
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(file=self._stream),
                refresh_per_second=4,
            )
            self._task = self._bar.add_task("training", total=total, completed=start, note="")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, done: int) -> None:
        """`done` steps are behind us."""
        if self._bar:
            self._bar.update(self._task, completed=done)

    def train(self, record: Mapping[str, Any]) -> None:
        """Show one line of training metrics."""
        seconds = (self._total - record["step"]) * record["step_seconds"]
        if "budget_seconds_left" in record:
            seconds = min(seconds, max(record["budget_seconds_left"], 0.0))
        note = (
            f"loss {_number(record['loss'])}  mlm {_number(record['mlm_accuracy'], 3)}  lr {record['lr']:.2e}  "
            f"{record['tokens_per_second']:,.0f} tokens/s"
        )
        if record.get("straggler_rank") is not None:
            note += f"  slowest rank {record['straggler_rank']} x{record['straggler_ratio']:.2f}"
        if record["skipped_steps"]:
            note += f"  skipped {record['skipped_steps']}"
        if self._bar:
            self._bar.update(self._task, note=note)
        else:
            self.say(
                f"step {record['step']}/{self._total}  {note}  grad {_number(record['grad_norm'], 2)}  "
                f"{record['step_seconds'] * 1000:.0f} ms/step  {_duration(seconds)} left"
            )

    def validation(self, record: Mapping[str, Any]) -> None:
        """Show one line of validation metrics; a model without a sentence head has no sentence accuracy."""
        pairs = record["nsp_accuracy"]
        self.say(
            f"step {record['step']}/{self._total}  held-out: MLM loss {_number(record['mlm_loss'])}  "
            f"accuracy {_number(record['mlm_accuracy'], 3)}  perplexity {_number(record['perplexity'], 1)}"
            + ("" if pairs is None else f"  NSP accuracy {_number(pairs, 3)}")
        )

    def say(self, text: str) -> None:
        """Show one line of text, above the bar where there is one."""
        if not self._visible:
            return
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self._stream, flush=True)


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
