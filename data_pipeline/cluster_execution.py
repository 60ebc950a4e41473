"""Running a stage on a Slurm cluster or on Ray, through datatrove's executors.

The build itself stays where it was started: it submits the tasks of a stage that are not complete, waits, and goes on. Tasks
write to the build's folder, which all nodes must see under the same path.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.stats import PipelineStats
from loguru import logger

from data_pipeline.artefacts import write_text
from data_pipeline.build_state import BuildError
from data_pipeline.config import SlurmConfig

Progress = Callable[[int, int], None]

_POLL_SECONDS = 1.0
_GENERATION = "generation"


class SlurmExecutor(SlurmPipelineExecutor):
    """datatrove's job arrays, waited for.

    Args:
        steps: the pipeline.
        tasks: how many.
        at_once: tasks that run at the same time, 0 for no limit.
        state_dir: logs and completion markers.
        slurm: `[data.slurm]`.
    """

    def __init__(
        self, steps: Sequence[PipelineStep], *, tasks: int, at_once: int, state_dir: Path, slurm: SlurmConfig
    ) -> None:
        state_dir = state_dir.resolve()
        package_root = Path(__file__).resolve().parent.parent
        exports = {
            "PATH": f"{shlex.quote(str(Path(sys.executable).parent))}:$PATH",
            "PYTHONPATH": f"{shlex.quote(str(package_root))}${{PYTHONPATH:+:$PYTHONPATH}}",
            "RAYON_NUM_THREADS": str(slurm.cpus_per_task),
        }
        super().__init__(
            list(steps),
            tasks=tasks,
            time=slurm.time,
            partition=slurm.partition,
            cpus_per_task=slurm.cpus_per_task,
            mem_per_cpu_gb=slurm.mem_per_cpu_gb,
            workers=at_once or -1,
            job_name=slurm.job_name,
            qos=slurm.qos,
            env_command="export " + " ".join(f"{name}={value}" for name, value in exports.items()),
            # `wait`: the submitting command ends when the last task of the array has ended, with the highest exit code.
            sbatch_args={"wait": "", **slurm.extra},
            max_array_size=slurm.max_array_size,
            logging_dir=str(state_dir),
        )
        self.state_dir = state_dir
        self.generation = ""

    def get_sbatch_args(self, max_array: int = 1) -> dict[str, Any]:
        """datatrove's directives, without those that the configuration leaves to the cluster."""
        arguments = super().get_sbatch_args(max_array)
        left_open = {"partition": not self.partition, "mem-per-cpu": not self.mem_per_cpu_gb}
        return {name: value for name, value in arguments.items() if not left_open.get(name, False)}

    def launch_merge_stats(self) -> None:
        """No further job: counts are in the files that the tasks write."""

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> PipelineStats:
        """In a job: run one task, unless a later build has submitted the stage again since."""
        if (self.state_dir / _GENERATION).read_text() != self.generation:
            logger.warning(f"task {rank}: the build was started again since this job was submitted; nothing to do")
            return PipelineStats()
        return super()._run_for_rank(rank, local_rank, node_rank)

    def run_tasks(self, on_progress: Progress) -> None:
        """Submit the tasks that are not complete and wait for them.

        Raises:
            BuildError: the jobs could not be submitted, or tasks failed; the message names the logs.
        """
        self.generation = uuid.uuid4().hex
        write_text(self.state_dir / _GENERATION, self.generation)
        logger.remove()
        with ThreadPoolExecutor(1) as pool:
            submission = pool.submit(self.launch_job)
            while not wait([submission], _POLL_SECONDS).done:
                on_progress(self.tasks - len(self.get_incomplete_ranks()), self.tasks)
        missing = self.get_incomplete_ranks()
        on_progress(self.tasks - len(missing), self.tasks)
        error = submission.exception()
        if missing:
            why = f" ({_explain(error)})" if error else ""
            raise BuildError(
                f"{len(missing)} of {self.tasks} tasks did not complete on the cluster, the first is {missing[0]}{why}; see "
                f"{self.state_dir / 'logs'} and {self.slurm_logs_folder}, then start the build again: it goes on from here"
            )
        if error and not isinstance(error, subprocess.CalledProcessError):
            raise error


def _explain(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{error.filename}: no such command on this machine; is it a login node of the cluster?"
    return str(error)


def run_on_ray(
    steps: Sequence[PipelineStep], *, tasks: int, at_once: int, state_dir: Path, on_progress: Progress
) -> None:
    """Run the tasks that are not complete on the Ray cluster that this process can reach.

    Raises:
        BuildError: Ray is not installed, or tasks failed.
    """
    if importlib.util.find_spec("ray") is None:
        raise BuildError("data.executor = 'ray' needs the ray package in this environment: pip install 'ray>=2.60'")
    import ray
    from datatrove.executor.ray import RayPipelineExecutor

    logger.remove()  # what fails is in the logs of its task
    if not ray.is_initialized():
        ray.init(runtime_env={"env_vars": _worker_environment()}, log_to_driver=False, logging_level="ERROR")
    executor = RayPipelineExecutor(
        list(steps), tasks=tasks, workers=at_once or -1, logging_dir=str(state_dir.resolve())
    )
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_SECONDS):
            on_progress(tasks - len(executor.get_incomplete_ranks()), tasks)

    on_progress(tasks - len(executor.get_incomplete_ranks()), tasks)
    watcher = threading.Thread(target=watch, name="ray-progress", daemon=True)
    watcher.start()
    try:
        executor.run()
    finally:
        ended.set()
        watcher.join()
    missing = executor.get_incomplete_ranks()
    on_progress(tasks - len(missing), tasks)
    if missing:
        raise BuildError(
            f"{len(missing)} of {tasks} tasks did not complete on Ray, the first is {missing[0]}; see "
            f"{state_dir / 'logs'}, then start the build again: it goes on from here"
        )


def _worker_environment() -> dict[str, str]:
    """What a task needs to find this package and to keep to one core."""
    package_root = str(Path(__file__).resolve().parent.parent)
    known = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{package_root}{os.pathsep + known if known else ''}", "RAYON_NUM_THREADS": "1"}
