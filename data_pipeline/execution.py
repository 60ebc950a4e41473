"""Running a stage through datatrove's executor interface: on this machine here, on a cluster in cluster_execution.py."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from data_pipeline.config import DataConfig

Progress = Callable[[int, int], None]
"""Called with (completed, tasks)."""

_PRELOADED = ("data_pipeline.assemble_stage", "data_pipeline.readers", "datatrove.executor.local")


def _one_thread() -> None:
    """A worker is one core's work: more threads of the encoder would only compete with the other workers."""
    os.environ.setdefault("RAYON_NUM_THREADS", "1")


def keep_imports() -> None:
    """What the imports made stays for good, so the garbage collector need not look at it again and again.

    For a process that does nothing but build: what lives now is never collected.
    """
    gc.freeze()


def begin_worker() -> None:
    """In a worker process: end when the build that started it was killed, so that no orphan goes on writing.

    A worker's parent is the fork server, which lives as long as its workers do; the build is what the pipe of
    `parent_process` tells of. The server may also be older than this build's settings, so those of the environment are
    made here.
    """
    _one_thread()
    keep_imports()
    build = multiprocessing.parent_process()
    assert build is not None  # this is a worker

    def watch() -> None:
        build.join()
        os._exit(1)

    threading.Thread(target=watch, name="end-with-build", daemon=True).start()


def _fork_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def start_early(data: DataConfig) -> None:
    """Let the process that workers are forked from import its modules while the build still prepares its first stage."""
    if data.executor == "local" and local_workers(data) > 1:
        _fork_context()
        forkserver.ensure_running()


class LocalExecutor(LocalPipelineExecutor):
    """datatrove's local executor with another pool of processes.

    Logs, statistics and completion markers are datatrove's. Its own `run` starts a manager process that outlives a
    killed build, and waits for ever when a worker is killed (out of memory, say); this one ends with an error.
    """

    def run_quietly(self, rank: int) -> None:
        """Run one task; log lines go to `logging_dir/logs` only."""
        logger.remove()
        with open(os.devnull, "w") as silent, contextlib.redirect_stderr(silent):
            self._run_for_rank(rank)
            logger.remove()

    def run_tasks(self, on_progress: Progress) -> None:
        """Run the tasks that are not complete.

        Raises:
            Whatever the first failing task raised; BrokenProcessPool (a RuntimeError) when a worker was killed.
        """
        _one_thread()
        ranks = self.get_incomplete_ranks()
        completed = self.tasks - len(ranks)
        on_progress(completed, self.tasks)
        if self.workers == 1 or len(ranks) < 2:
            for number, rank in enumerate(ranks, 1):
                self.run_quietly(rank)
                on_progress(completed + number, self.tasks)
            return
        with ProcessPoolExecutor(self.workers, mp_context=_fork_context(), initializer=begin_worker) as pool:
            futures = [pool.submit(self.run_quietly, rank) for rank in ranks]
            try:
                for number, future in enumerate(as_completed(futures), 1):
                    future.result()
                    on_progress(completed + number, self.tasks)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def run_tasks(
    steps: Sequence[PipelineStep], *, tasks: int, data: DataConfig, state_dir: Path, on_progress: Progress
) -> None:
    """Run a pipeline once per task, skipping tasks that an earlier run completed.

    Args:
        steps: the pipeline; each step is called with (data, task, tasks).
        tasks: how many.
        data: `[data]`: where tasks run, and how many at once.
        state_dir: logs and completion markers.
        on_progress: told about completed tasks.

    Raises:
        BuildError: tasks failed on a cluster, or there is none.
        otherwise as `LocalExecutor.run_tasks`.
    """
    if data.executor == "local":
        workers = min(local_workers(data), tasks)
        LocalExecutor(list(steps), tasks=tasks, workers=workers, logging_dir=str(state_dir)).run_tasks(on_progress)
        return
    from data_pipeline.cluster_execution import SlurmExecutor, run_on_ray

    if data.executor == "ray":
        run_on_ray(steps, tasks=tasks, at_once=data.workers, state_dir=state_dir, on_progress=on_progress)
        return
    SlurmExecutor(steps, tasks=tasks, at_once=data.workers, state_dir=state_dir, slurm=data.slurm).run_tasks(
        on_progress
    )


def local_workers(data: DataConfig) -> int:
    """Processes on this machine."""
    return data.workers or len(os.sched_getaffinity(0))
