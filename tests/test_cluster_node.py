"""One node's supervisor, with real processes and signals and no Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAUNCHER = Path(__file__).parent / "assets" / "plain_launcher.py"

# a rank: notes its process and devices; saves when told to, by either signal
WORKER = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
def save(number, frame):
    (folder / f"saved-{rank}").touch()
    time.sleep(float(rank) / 3)
    sys.exit(75)
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, save)
(folder / f"started-{rank}").write_text(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')}")
while not (folder / "end").exists():
    time.sleep(0.05)
"""
SLOW_WORKER = (
    """
import os, sys, time
open(f"{sys.argv[1]}/importing-{os.environ['RANK']}", "w").write("now")
time.sleep(1)
"""
    + WORKER
)
FAIL_BESIDE_A_HANGING_RANK = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    sys.exit(9)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(1000)
"""


class Node:
    """A supervised launcher of two ranks and the folder that its ranks write to."""

    def __init__(self, folder: Path, script: str, *, environ: dict[str, str], patch: str = "") -> None:
        self.folder, self.verdict = folder, folder / "verdict"
        (folder / "hosts").write_text("here slots=2\n")
        launcher = [sys.executable, str(LAUNCHER), "--no_ssh", "--hostfile", str(folder / "hosts")]
        launcher += ["--node_rank", "0", "--master_addr", "here", "--master_port", "1"]
        arguments = ["--verdict", str(self.verdict), "--launcher", *launcher, "--"]
        arguments += [sys.executable, "-c", script, str(folder)]
        code = f"import cluster.node as n, sys; {patch}; sys.exit(n.main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environ, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def wait_for(self, *names: str) -> None:
        until = time.monotonic() + 30
        while not all((self.folder / name).exists() and (self.folder / name).stat().st_size for name in names):
            assert time.monotonic() < until and self.process.poll() is None, f"no {names}"
            time.sleep(0.05)

    def launcher(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def ended(self) -> tuple[int, str]:
        """Exit code and messages; every process that named the folder must be gone."""
        _, messages = self.process.communicate(timeout=30)
        return self.process.returncode, messages

    def processes(self) -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode(errors="replace")
                state = path.with_name("stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if str(self.folder) in words and state not in "ZX":
                found.append(words.replace("\0", " "))
        return found


@pytest.fixture
def node(tmp_path: Path) -> Iterator[type[Node]]:
    started: list[Node] = []

    class Started(Node):
        def __init__(self, script: str, *, patch: str = "pass", **environ: str) -> None:
            super().__init__(tmp_path, script, environ=environ, patch=patch)
            started.append(self)

    yield Started  # type: ignore[misc]
    for one in started:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)


def pid_of(node: Node, rank: int) -> int:
    return int((node.folder / f"started-{rank}").read_text().split()[0])


def test_r39_ranks_see_the_allotted_devices(node) -> None:  # type: ignore[no-untyped-def]
    one = node(WORKER, CUDA_VISIBLE_DEVICES="4,5")
    one.wait_for("started-0", "started-1")
    (one.folder / "end").touch()
    assert one.ended()[0] == 0 and not one.verdict.exists()
    assert [(one.folder / f"started-{rank}").read_text().split()[1] for rank in (0, 1)] == ["4,5", "4,5"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("target", ["supervisor", "launcher"])
def test_r40_a_stop_reaches_every_rank(node, number: signal.Signals, target: str) -> None:  # type: ignore[no-untyped-def]
    one = node(WORKER)
    one.wait_for("started-0", "started-1")
    os.kill(one.process.pid if target == "supervisor" else one.launcher(), number)
    code, messages = one.ended()
    assert (one.folder / "saved-0").exists() and (one.folder / "saved-1").exists()
    # srun must not see a failure, the job script must see the stop
    assert code == 0 and one.verdict.read_text() == "75\n", messages
    assert "told to stop by " + (number.name if target == "supervisor" else "a signal to the launcher") in messages


def test_a_stop_during_the_imports_is_not_lost(node) -> None:  # type: ignore[no-untyped-def]
    one = node(SLOW_WORKER, patch="n.RESEND_SECONDS = 0.3")
    one.wait_for("importing-0", "importing-1")
    os.kill(one.process.pid, signal.SIGUSR1)
    assert one.ended()[0] == 0 and one.verdict.read_text() == "75\n"


def test_a_stop_is_not_sent_to_a_rank_that_is_leaving(node) -> None:  # type: ignore[no-untyped-def]
    """Python restores the default action of signals before it ends; that may take long, and a signal then is deadly."""
    end = "[signal.signal(n, signal.SIG_DFL) for n in (10, 15)]; time.sleep(1.5); os._exit(75)"
    # rank 1 is still leaving when rank 0 is gone: the launcher must not see that as a failure and end it
    leaving = WORKER.replace("sys.exit(75)", end)
    one = node(leaving, patch="n.RESEND_SECONDS = 0.6")
    one.wait_for("started-0", "started-1")
    os.kill(one.process.pid, signal.SIGUSR1)
    code, messages = one.ended()
    assert code == 0 and one.verdict.read_text() == "75\n", messages


def test_r41_a_failed_rank_ends_the_node(node) -> None:  # type: ignore[no-untyped-def]
    one = node(FAIL_BESIDE_A_HANGING_RANK, patch="n.GRACE_SECONDS = 0.5")
    code, messages = one.ended()
    assert code == 9 and one.verdict.read_text() == "9\n"
    assert "rank 1 failed with exit code 9: ending the others" in messages
    assert one.processes() == []


def test_a_killed_launcher_is_a_failure_and_leaves_no_rank(node) -> None:  # type: ignore[no-untyped-def]
    one = node(WORKER)
    one.wait_for("started-0", "started-1")
    os.kill(one.launcher(), signal.SIGKILL)
    code, messages = one.ended()
    assert code == 137 and one.verdict.read_text() == "137\n", messages
    assert one.processes() == []


def test_a_killed_rank_is_a_failure(node) -> None:  # type: ignore[no-untyped-def]
    one = node(WORKER, patch="n.GRACE_SECONDS = 0.5")
    one.wait_for("started-0", "started-1")
    os.kill(pid_of(one, 0), signal.SIGKILL)
    assert one.ended()[0] == 137
    assert one.processes() == []


def test_a_launcher_that_starts_nothing_is_a_failure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cluster.node", "--launcher", "true", "--", "true"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no exit code of ranks at all" in done.stderr


def test_usage(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "cluster.node"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "expected: [--verdict FILE]" in done.stderr
