"""The job script as text: a pure function of what is asked for, so that a test holds it to a golden file."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from cluster.world import FIRST_PORT, PORTS

STOPPED_CODE = 75
"""A program that was told to stop and saved leaves with this code (EX_TEMPFAIL); the job is then queued again."""


class JobError(ValueError):
    """A job that cannot be asked for; the message names the option."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What the job asks Slurm for. Empty and 0: not asked for."""

    nodes: int
    gpus_per_node: int = 0
    """Devices and ranks a node. 0: all that are allotted to each node."""
    ranks_per_node: int = 0
    """Ranks a node without devices (CPU)."""
    cpus_per_node: int = 0
    """Cores a node of a job that shares its nodes; 0 takes whole nodes (`--exclusive`)."""
    partition: str = ""
    account: str = ""
    time_limit: str = ""
    """In Slurm's form: `minutes`, `hours:minutes:seconds`, `days-hours`, ..."""
    warn_seconds: int = 180
    """Seconds before the time limit at which the ranks are told to save; Slurm looks about every 30 s."""
    extra: tuple[str, ...] = ()
    """Further sbatch options, each in one word: `--constraint=a100`."""

    def __post_init__(self) -> None:
        """Refuse what Slurm would misread.

        Raises:
            JobError: a number out of range, GPUs and CPU ranks at once, an option with a line break or without `--`.
        """
        if self.nodes < 1:
            raise JobError(f"--nodes is {self.nodes}, expected at least 1")
        for option in ("gpus_per_node", "ranks_per_node", "cpus_per_node", "warn_seconds"):
            if getattr(self, option) < 0:
                raise JobError(f"--{option.replace('_', '-')} is {getattr(self, option)}, expected 0 or more")
        if self.gpus_per_node and self.ranks_per_node:
            raise JobError(
                "--gpus-per-node and --ranks-per-node exclude each other: on GPUs there is one rank a device"
            )
        for word in (self.partition, self.account, self.time_limit, *self.extra):
            if re.search(r"[\x00-\x1f]", word):
                raise JobError(f"the option {word!r} holds a line break or control character")
        for word in self.extra:
            if not word.startswith("-"):
                raise JobError(
                    f"--extra-sbatch {word!r}: expected an sbatch option in one word, such as --constraint=a100"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A program to run on every rank of an allocation."""

    name: str
    command: tuple[str, ...]
    """What each rank runs, as argv."""
    resources: Resources
    work_folder: Path
    """Where the program runs; the packages are imported from here."""
    cluster_folder: Path
    """Log, host file and kept job script; on a file system that all nodes share."""
    python: Path
    """The interpreter, whose folder also holds the `deepspeed` command."""
    launcher: tuple[str, ...] = ("deepspeed",)
    """What starts the ranks of one node; takes the options of `deepspeed --no_ssh`."""


def render(job: Job) -> str:
    """The job script."""
    replacements = {
        "directives": "\n".join(f"#SBATCH {option}" for option in directives(job)),
        "work_folder": shlex.quote(str(job.work_folder)),
        "bin_folder": shlex.quote(str(job.python.parent)),
        "cluster_folder": shlex.quote(str(job.cluster_folder)),
        "python": _quote_inside_quotes(str(job.python)),
        "first_port": str(FIRST_PORT),
        "ports": str(PORTS),
        "slots": _slots(job.resources),
        "stopped_code": str(STOPPED_CODE),
        "launcher": " ".join(_quote_inside_quotes(word) for word in job.launcher),
        "command": shlex.join(job.command),
    }
    template = resources.files("cluster").joinpath("templates/job.sh").read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda match: replacements[match.group(1)], template)


def directives(job: Job) -> list[str]:
    """The sbatch options, in the order of the script's head."""
    wanted = job.resources
    if not re.fullmatch(r"[\w.+-]+", job.name):
        raise JobError(f"--job-name {job.name!r}: expected letters, digits and . _ + -")
    # a % in an output name is a pattern of Slurm's
    log = str(job.cluster_folder / f"{job.name}-").replace("%", "%%") + "%j.log"
    options = [
        f"--job-name={job.name}",
        f"--nodes={wanted.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={wanted.cpus_per_node}" if wanted.cpus_per_node else "--exclusive",
    ]
    if wanted.gpus_per_node:
        options.append(f"--gpus-per-node={wanted.gpus_per_node}")
    for option, value in (
        ("partition", wanted.partition),
        ("account", wanted.account),
        ("time", wanted.time_limit),
    ):
        if value:
            options.append(f"--{option}={value}")
    options += [f"--output={log}", "--open-mode=append", "--requeue", f"--signal=B:USR1@{wanted.warn_seconds}"]
    return [_directive(option) for option in (*options, *wanted.extra)]


def _directive(option: str) -> str:
    """sbatch reads the rest of the line like a shell would: quote only where that changes something."""
    if '"' in option or "\\" in option or "\n" in option:
        raise JobError(f"sbatch cannot take {option!r}: it holds a quote, a backslash or a line break")
    if not re.search(r"[\s#']", option):
        return option
    name, equals, value = option.partition("=")
    return f'{name}{equals}"{value}"'


def _slots(wanted: Resources) -> str:
    if wanted.ranks_per_node:
        return f"--ranks-per-node {wanted.ranks_per_node}"
    return f"--gpus-per-node {wanted.gpus_per_node}"


def _quote_inside_quotes(path: str) -> str:
    """The interpreter's path stands both outside and inside single quotes in the script."""
    if not re.fullmatch(r"[\w./+@%:,~=-]+", path):
        raise JobError(
            f"the interpreter's path {path!r} holds characters that a job script cannot: move the environment"
        )
    return path
