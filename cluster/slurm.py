"""The Slurm commands: the only place that calls sbatch, squeue, scontrol and scancel.

Output is asked for in text formats of our own (`squeue -h -o`), not JSON, whose layout differs between Slurm versions.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FINAL_STATES = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)


class SlurmError(RuntimeError):
    """A Slurm command is missing or refused; the message carries what it printed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What `scontrol show job` says of one job."""

    job_id: int
    state: str
    reason: str
    nodes: str
    """Compressed node list; empty while the job waits."""
    restarts: int
    exit_code: int
    """Exit code of the batch script, or 128 + the signal that ended it; 0 until it ends."""

    @property
    def ended(self) -> bool:
        """True when the job will not run again by itself."""
        return self.state in FINAL_STATES


def submit_script(script: Path, *, options: Sequence[str] = ()) -> int:
    """Queue a job script with `sbatch` and return the job id.

    Raises:
        SlurmError: no `sbatch` here, or Slurm refused the job.
    """
    answer = _run(["sbatch", "--parsable", *options, str(script)])
    # --parsable prints "id" or "id;cluster"
    job_id = answer.strip().partition(";")[0]
    if not job_id.isdecimal():
        raise SlurmError(f"sbatch printed {answer!r}, expected a job id")
    return int(job_id)


def job(job_id: int) -> Job:
    """The job's state. Slurm forgets a job some minutes after its end (`MinJobAge`).

    Raises:
        SlurmError: an unknown or forgotten job.
    """
    fields = dict(item.partition("=")[::2] for item in _run(["scontrol", "show", "job", "-o", str(job_id)]).split())
    code, _, signal = fields.get("ExitCode", "0:0").partition(":")
    nodes = fields.get("NodeList", "")
    return Job(
        job_id=job_id,
        state=fields["JobState"],
        reason=fields.get("Reason", ""),
        nodes="" if nodes == "(null)" else nodes,
        restarts=int(fields.get("Restarts", 0)),
        exit_code=int(code) or (128 + int(signal) if int(signal or 0) else 0),
    )


def queued(user: str) -> dict[int, str]:
    """The user's waiting and running jobs: id -> state."""
    lines = _run(["squeue", "-h", "-u", user, "-o", "%A|%T"]).splitlines()
    return {int(job_id): state for job_id, _, state in (line.partition("|") for line in lines)}


def requeue(job_id: int) -> None:
    """Put a running job back into the queue; its script starts again from the top."""
    _run(["scontrol", "requeue", str(job_id)])


def cancel(job_id: int) -> None:
    """End a job: its processes get SIGTERM, and SIGKILL after the site's `KillWait`."""
    _run(["scancel", str(job_id)])


def send_signal(job_id: int, name: str, *, batch_only: bool = True) -> None:
    """Send a signal to the batch script, or to every step of the job."""
    _run(["scancel", f"--signal={name}", *(["--batch"] if batch_only else []), str(job_id)])


def _run(arguments: Sequence[str]) -> str:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SlurmError(
            f"cannot run {arguments[0]} ({error.strerror}): run this on a node of a Slurm cluster, usually its login node"
        ) from error
    if done.returncode != 0:
        raise SlurmError(f"{' '.join(arguments)} failed with exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout
