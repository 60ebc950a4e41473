"""One node's part of a job: keeps DeepSpeed's launcher and its ranks together, whatever happens to either.

`srun` starts `python -m cluster.node` once a node; it starts the launcher, and the launcher starts, for each rank, this module
again as `--rank`, which runs the training program. What that buys, seen with DeepSpeed 0.19.8:

* The launcher numbers devices from 0 and overwrites CUDA_VISIBLE_DEVICES: on a shared node, ranks allotted devices 4 and 5
  would run on 0 and 1. `--rank` puts the node's allotment back.
* The launcher dies of SIGUSR1, leaves its ranks behind and reports success; SIGTERM makes it kill ranks that are still saving
  after 30 s and exit with 1. Both signals are blocked in it, seen here as pending, and passed to the ranks instead.
* It ends the other ranks as soon as one leaves with any code but 0, also after an orderly stop. `--rank` reports that as 0.
* When a rank fails, peers that hang in a collective get 30 s from it and another `KillWait` from Slurm. Here: `GRACE_SECONDS`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

GRACE_SECONDS = 10.0
"""After the first failed rank, the others of the node have this long to end with their own message."""
RESEND_SECONDS = 5.0
"""A stop is asked for again this often, of the ranks that listen: one that is still importing does not yet, and one that
is leaving no longer (Python puts the default action back before it ends, and a signal then would kill it)."""
POLL_SECONDS = 0.25
STOP_SIGNALS = frozenset((signal.SIGUSR1, signal.SIGTERM))
_PR_SET_CHILD_SUBREAPER = 36


class Ranks:
    """The node's ranks as their `--rank` processes report them: files in a folder, one a fact, written by rename."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pids(self) -> dict[int, int]:
        """Rank -> process id of its program."""
        return self._read("pid")

    def wrappers(self) -> set[int]:
        """Process ids of the `--rank` processes."""
        return set(self._read("wrapper").values())

    def codes(self) -> dict[int, int]:
        """Rank -> exit code, of the ranks that have ended; 128 + the signal where one ended it."""
        return self._read("code")

    def write(self, rank: int, fact: str, value: int) -> None:
        """Report one number of one rank."""
        temporary = self.folder / f".{rank}.{fact}"
        temporary.write_text(str(value))
        temporary.rename(self.folder / f"{rank}.{fact}")

    def _read(self, fact: str) -> dict[int, int]:
        return {int(path.stem): int(path.read_text()) for path in self.folder.glob(f"[0-9]*.{fact}")}


def supervise(launcher: Sequence[str], program: Sequence[str], *, stopped_code: int) -> int:
    """Run `launcher` so that it starts `program` once a rank; return when every process of both is gone.

    Args:
        launcher: a DeepSpeed launcher command without the program.
        program: what each rank runs.
        stopped_code: exit code of a program that was asked to stop, saved, and wants to go on later.

    Returns:
        0, `stopped_code`, or what went wrong: the exit code of the first rank that failed, else the launcher's.
    """
    # orphans of a killed launcher become our children and can be found
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    with tempfile.TemporaryDirectory(prefix="clozeworks-node-") as folder:
        ranks = Ranks(Path(folder))
        wrapper = [sys.executable, "-m", "cluster.node", "--rank", folder, "--stopped-code", str(stopped_code)]
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        if devices:
            wrapper += ["--devices", devices]
        command = [*launcher, "--no_python", "--no_local_rank", *wrapper, "--", *program]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
            _watch(process, ranks, stopped_code)
            code = process.returncode
        return _outcome(code, ranks, orphans=_kill_descendants(), stopped_code=stopped_code)


def _watch(process: subprocess.Popen[bytes], ranks: Ranks, stopped_code: int) -> None:
    """Pass stops on to the ranks and end all of them after a failure, until the launcher has ended."""
    stopping, resend_at, kill_at = False, 0.0, float("inf")
    while process.poll() is None:
        received = signal.sigtimedwait(STOP_SIGNALS, POLL_SECONDS)
        if not stopping and (received is not None or _launcher_has_signal(process.pid, ranks)):
            stopping = True
            source = signal.Signals(received.si_signo).name if received else "a signal to the launcher"
            _say(f"told to stop by {source}: the ranks finish their step and save")
        now = time.monotonic()
        if stopping and now >= resend_at:
            resend_at = now + RESEND_SECONDS
            ended = ranks.codes()
            for rank, pid in ranks.pids().items():
                if rank not in ended and _catches(pid, signal.SIGUSR1):
                    _kill(pid, signal.SIGUSR1)
        failed = [rank for rank, code in sorted(ranks.codes().items()) if code not in (0, stopped_code)]
        if failed and kill_at == float("inf"):
            kill_at = now + GRACE_SECONDS
            _say(f"rank {failed[0]} failed with exit code {ranks.codes()[failed[0]]}: ending the others")
        if now >= kill_at:
            _kill_descendants()


def _outcome(launcher_code: int, ranks: Ranks, *, orphans: int, stopped_code: int) -> int:
    codes = ranks.codes()
    for rank, code in sorted(codes.items()):
        if code not in (0, stopped_code):
            _say(f"rank {rank} ended with exit code {code}")
            return code
    if launcher_code:
        _say(f"the launcher ended with exit code {launcher_code}")
        return launcher_code if launcher_code > 0 else 128 - launcher_code
    unaccounted = sorted(set(ranks.pids()) - set(codes))
    if orphans or unaccounted or not codes:
        _say(
            f"the launcher ended, but left {orphans} processes behind; no exit code of ranks {unaccounted or 'at all'}"
        )
        return 1
    return stopped_code if stopped_code in codes.values() else 0


def run_rank(folder: Path, program: Sequence[str], *, devices: str, stopped_code: int) -> int:
    """Run one rank's program and report how it ends; a stop is success to the launcher."""
    ranks, rank = Ranks(folder), int(os.environ["RANK"])
    ranks.write(rank, "wrapper", os.getpid())
    environ = dict(os.environ)
    if devices:
        environ["CUDA_VISIBLE_DEVICES"] = devices
    # this process keeps both signals blocked and outlives its program
    process = subprocess.Popen(program, env=environ, preexec_fn=_signals_of_a_program)  # noqa: PLW1509 one thread
    ranks.write(rank, "pid", process.pid)
    code = process.wait()
    code = code if code >= 0 else 128 - code
    ranks.write(rank, "code", code)
    return 0 if code == stopped_code else code


def _signals_of_a_program() -> None:
    # until the program installs its handler, a stop request must not end it; it will be repeated. (A shell cannot trap what
    # was ignored when it started: the program must be one that can, such as Python.)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for this signal."""
    try:
        caught = int(Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0], 16)
    except (OSError, IndexError):
        return False
    return bool(caught >> (number - 1) & 1)


def _launcher_has_signal(pid: int, ranks: Ranks) -> bool:
    """Whether a stop signal is pending in a process between here and the ranks."""
    wrappers = ranks.wrappers()
    waiting = [pid]
    while waiting:
        current = waiting.pop()
        if current in wrappers:
            continue
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{current}/status").read_text()
            pending = int(status.partition("ShdPnd:")[2].split()[0], 16)
            if any(pending >> (number - 1) & 1 for number in STOP_SIGNALS):
                return True
        waiting += _children(current)
    return False


def _kill_descendants() -> int:
    """SIGKILL every process below this one and reap what became ours; return how many there were."""
    killed: set[int] = set()
    # a process may fork while its siblings are killed: repeat until none is left
    for _ in range(100):
        waiting, found = _children(os.getpid()), []
        while waiting:
            found.append(waiting.pop())
            waiting += _children(found[-1])
        alive = [pid for pid in found if not _is_zombie(pid)]
        for pid in alive:
            _kill(pid, signal.SIGKILL)
        killed.update(alive)
        if not alive:
            break
        time.sleep(0.05)
    return len(killed)


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # gone meanwhile
        return []


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _say(text: str) -> None:
    print(f"[node {os.environ.get('SLURMD_NODENAME', os.uname().nodename)}] {text}", file=sys.stderr, flush=True)


def _give_verdict(file: Path, code: int) -> None:
    """Write the code of this node's ranks where the job script finds it; the first node that has something to say wins."""
    with contextlib.suppress(FileExistsError), file.open("x") as verdict:
        verdict.write(f"{code}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m cluster.node [--verdict F] --launcher CMD... -- PROGRAM...`, or with `--rank DIR` the inner form.

    An orderly stop is exit code 0 and a verdict, not `stopped_code`: `srun --kill-on-bad-exit` would kill the nodes that are
    not done yet. A failure gives a verdict too: srun reports the largest code, which is that of the nodes it killed.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="python -m cluster.node", description=__doc__.splitlines()[0])
    parser.add_argument("--stopped-code", type=int, default=75)
    parser.add_argument("--verdict", type=Path)
    parser.add_argument("--rank", type=Path, metavar="FOLDER", help="run one rank; started by the launcher")
    parser.add_argument("--devices", default="")
    parser.add_argument("--launcher", nargs=argparse.REMAINDER, default=[])
    options = parser.parse_args(words[:split])
    program = words[split + 1 :]
    if not program or (options.rank is None and not options.launcher):
        parser.error("expected: [--verdict FILE] --launcher COMMAND... -- PROGRAM ...")
    if options.rank is not None:
        return run_rank(options.rank, program, devices=options.devices, stopped_code=options.stopped_code)
    code = supervise(options.launcher, program, stopped_code=options.stopped_code)
    if code and options.verdict is not None:
        _give_verdict(options.verdict, code)
    return 0 if code == options.stopped_code and options.verdict is not None else code


if __name__ == "__main__":
    sys.exit(main())
