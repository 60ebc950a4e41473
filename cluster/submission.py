"""Jobs of this project: what each one runs, and handing it to Slurm with its script kept in the run folder."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from cluster import slurm
from cluster.job import Job, JobError, Resources, render


def pretrain_job(
    config: Path,
    resources: Resources,
    *,
    overrides: Sequence[str] = (),
    name: str = "",
    python: Path | None = None,
) -> Job:
    """The pretraining job of a configuration file, run from the current folder.

    Raises:
        JobError: the configuration is missing, is no TOML, or names no `run.dir`.
    """
    run_folder = Path(run_dir(config, overrides)).absolute()
    command = ["python", "-u", "pretrain/run.py", "--config", str(config.absolute())]
    for override in overrides:
        command += ["--set", override]
    work_folder = Path.cwd()
    if not (work_folder / "pretrain" / "run.py").is_file():
        raise JobError(f"{work_folder} holds no pretrain/run.py: submit from the project's folder")
    return Job(
        name=name or f"pretrain-{run_folder.parent.name}",
        command=tuple(command),
        resources=resources,
        work_folder=work_folder,
        cluster_folder=run_folder / "cluster",
        # not resolved: a virtual environment's interpreter is a link, and its folder is what counts
        python=python or Path(sys.executable).absolute(),
    )


def submit(job: Job) -> int:
    """Keep the job's script in its folder, queue it, and return the job id.

    Raises:
        JobError: the job cannot be put into a script, or its folder cannot be written.
        SlurmError: Slurm is not here or refused the job.
    """
    text = render(job)
    script = job.cluster_folder / f"{job.name}.sh"
    temporary = script.with_suffix(".tmp")
    try:
        job.cluster_folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o755)
        temporary.rename(script)
    except OSError as error:
        raise JobError(f"cannot keep the job script in {job.cluster_folder}: {error.strerror}") from error
    return slurm.submit_script(script)


def run_dir(config: Path, overrides: Sequence[str]) -> str:
    """`run.dir` of the TOML file, after the overrides; the rest of the file is the program's to check."""
    try:
        tree = tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"{config}: cannot read the configuration ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(f"{config}: not a TOML file: {error}") from error
    table = tree.get("run", {})
    found = table.get("dir", "") if isinstance(table, dict) else ""
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise JobError(f"--set {override}: expected TABLE.KEY=VALUE")
        if key.strip() == "run.dir":
            found = value.strip().strip("\"'")
    if not found or not isinstance(found, str):
        raise JobError(f"{config}: no run.dir; the job keeps its script, host file and log there")
    return found
