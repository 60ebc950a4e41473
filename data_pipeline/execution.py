"""Running a stage on this machine: datatrove's local executor, its log lines in files instead of on the terminal."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import multiprocess
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

_watching = threading.Event()
_PARENT_POLL_SECONDS = 0.5


def end_with_parent() -> None:
    """In a worker process: end when the build that started it was killed, so that no orphan goes on writing.

    Workers come from a fork server that ends with the build; an orphan then has another parent.
    """
    if multiprocess.parent_process() is None or _watching.is_set():
        return
    _watching.set()
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


class LocalExecutor(LocalPipelineExecutor):
    """`LocalPipelineExecutor` whose log lines go to `logging_dir/logs` only; an error still ends `run`."""

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> Any:
        with open(os.devnull, "w") as silent, contextlib.redirect_stderr(silent):
            try:
                return super()._run_for_rank(rank, local_rank, node_rank)
            finally:
                logger.remove()

    def run(self) -> Any:
        """Run the tasks that are not complete."""
        logger.remove()
        return super().run()


def run_tasks(
    steps: Sequence[PipelineStep],
    *,
    tasks: int,
    workers: int,
    state_dir: Path,
    on_progress: Callable[[int, int], None],
) -> None:
    """Run a pipeline once per task, skipping tasks that an earlier run completed.

    Args:
        steps: the pipeline; each step is called with (data, task, tasks).
        tasks: how many.
        workers: local processes; with 1 the tasks run in this process.
        state_dir: logs and completion markers.
        on_progress: called with (completed, tasks) now and whenever the number grows.

    Raises:
        Whatever a step raised, from the first task that failed.
    """
    completed_dir = state_dir / "completions"
    done = threading.Event()

    def count() -> int:
        return sum(1 for _ in os.scandir(completed_dir)) if completed_dir.is_dir() else 0

    def poll() -> None:
        last = -1
        while not done.wait(0.2):
            if (now := count()) != last:
                on_progress(now, tasks)
                last = now

    watcher = threading.Thread(target=poll, name="progress", daemon=True)
    watcher.start()
    try:
        LocalExecutor(pipeline=list(steps), tasks=tasks, workers=min(workers, tasks), logging_dir=str(state_dir)).run()
    finally:
        done.set()
        watcher.join()
    on_progress(count(), tasks)
