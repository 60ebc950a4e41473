"""`python -m cluster.submit pretrain --config F --nodes N`: render the job script, keep it in the run folder, queue it."""

from __future__ import annotations

import argparse
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
    run_folder = Path(_run_dir(config, overrides)).absolute()
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


def _run_dir(config: Path, overrides: Sequence[str]) -> str:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster.submit", description=__doc__)
    commands = parser.add_subparsers(dest="kind", required=True)
    pretrain = commands.add_parser("pretrain", help="pretraining, one DeepSpeed launcher a node")
    pretrain.add_argument("--config", required=True, type=Path, help="TOML file, see configs/")
    pretrain.add_argument("--set", dest="overrides", action="append", default=[], metavar="TABLE.KEY=VALUE")
    pretrain.add_argument("--nodes", required=True, type=int)
    pretrain.add_argument(
        "--gpus-per-node", type=int, default=0, help="devices and ranks a node; without: all that Slurm allots"
    )
    pretrain.add_argument("--ranks-per-node", type=int, default=0, help="ranks a node without devices (CPU)")
    pretrain.add_argument(
        "--cpus-per-node", type=int, default=0, help="cores a node on shared nodes; without: whole nodes (--exclusive)"
    )
    pretrain.add_argument("--partition", default="")
    pretrain.add_argument("--account", default="")
    pretrain.add_argument("--time", default="", help="time limit; the ranks save before it and the job is queued again")
    pretrain.add_argument("--warn-seconds", type=int, default=180, help="seconds before the limit (default: 180)")
    pretrain.add_argument("--job-name", default="")
    pretrain.add_argument(
        "--extra-sbatch", action="append", default=[], metavar="=--OPTION=VALUE", help="any sbatch option; repeatable"
    )
    pretrain.add_argument("--dry-run", action="store_true", help="print the job script and submit nothing")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0, or 2 with one message."""
    options = _parser().parse_args(arguments)
    try:
        job = pretrain_job(
            options.config,
            Resources(
                nodes=options.nodes,
                gpus_per_node=options.gpus_per_node,
                ranks_per_node=options.ranks_per_node,
                cpus_per_node=options.cpus_per_node,
                partition=options.partition,
                account=options.account,
                time_limit=options.time,
                warn_seconds=options.warn_seconds,
                extra=tuple(options.extra_sbatch),
            ),
            overrides=options.overrides,
            name=options.job_name,
        )
        if options.dry_run:
            print(render(job), end="")
            return 0
        job_id = submit(job)
    except (JobError, slurm.SlurmError) as error:
        print(f"submit: {error}", file=sys.stderr)
        return 2
    print(job_id)
    print(f"log: {job.cluster_folder / f'{job.name}-{job_id}.log'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
