"""Signals, the time budget, the watchdog, and what ranks compare: small real processes, no training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain import stops
from pretrain.stops import EXIT_HANG, StopRequest

ROOT = Path(__file__).resolve().parent.parent
WAIT = """
import signal, time
from pretrain import stops
stops.SECOND_SIGNAL_SECONDS = 0.2
stop = stops.StopRequest()
stop.listen()
{more}
print("ready", flush=True)
while not stop.wanted:
    time.sleep(0.02)
print("asked by", stop.reason, flush=True)
time.sleep(30)
"""
HANG = """
import re, time
from pretrain.watchdog import Watchdog
def waits_for_a_peer():
    {wait}
with Watchdog({limit}, rank=3) as watchdog:
    watchdog.beat("in step 5")
    waits_for_a_peer()
"""


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def expect(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert words in line, line


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_r40_a_first_signal_asks_a_second_one_ends_at_once(second: signal.Signals) -> None:
    process = start(WAIT.format(more=""))
    try:
        expect(process, "ready")
        process.send_signal(signal.SIGUSR1)
        expect(process, "asked by SIGUSR1")
        time.sleep(0.3)
        process.send_signal(signal.SIGUSR1)  # asked for again by the job step: no second request
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(second)
        assert process.wait(timeout=20) == 128 + second
        expect(process, f"second signal ({second.name}): stopping at once")
    finally:
        process.kill()


def test_r40_one_request_sent_twice_within_a_moment_is_one_and_a_leaving_rank_is_left_alone() -> None:
    process = start(WAIT.format(more="stops.SECOND_SIGNAL_SECONDS = 60"))
    leaving = start(WAIT.format(more="stop.leave()"))
    try:
        for each in (process, leaving):
            expect(each, "ready")
            each.send_signal(signal.SIGTERM)
            expect(each, "asked by SIGTERM")
        time.sleep(0.3)
        for each in (process, leaving):
            each.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert process.poll() is None and leaving.poll() is None
    finally:
        process.kill()
        leaving.kill()


def test_the_time_budget_asks_for_a_stop() -> None:
    assert not StopRequest(3600.0).wanted
    assert not StopRequest(0.0).wanted
    spent = StopRequest(1e-9)
    assert spent.wanted and "run.max_hours" in spent.reason


def test_r40_ranks_that_a_dead_launcher_left_behind_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = (os.getpid(), os.getppid())
    monkeypatch.setattr(stops, "launcher_processes", lambda: alive)
    stop = StopRequest()
    assert not stop.wanted
    monkeypatch.setattr(stops, "launcher_processes", lambda: ())
    monkeypatch.setattr(stops, "_LOOK_SECONDS", 0.0)
    assert stop.wanted and "launcher is gone" in stop.reason


def test_r41_a_hanging_rank_shows_its_stacks_and_ends() -> None:
    process = start(HANG.format(limit=0.4, wait="time.sleep(60)"))
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == EXIT_HANG
    assert "rank 3 on " in printed and "while in step 5" in printed
    assert "in waits_for_a_peer" in printed


def test_r41_a_rank_that_hangs_inside_the_interpreters_lock_ends_too() -> None:
    code = "from pretrain import watchdog\nwatchdog._GRACE_SECONDS = 0.5\n"
    process = start(code + HANG.format(limit=2.0, wait="re.match('(a+)+$', 'a' * 60 + 'b')"))
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert "in waits_for_a_peer" in printed


def test_a_watched_rank_that_goes_on_is_left_alone() -> None:
    """Its clock is ours, so that no load of the machine makes it late: each beat comes 0.9 s after the one before."""
    code = """
from types import SimpleNamespace
from pretrain import watchdog as module
clock = SimpleNamespace(now=0.0)
module.time = SimpleNamespace(monotonic=lambda: clock.now)
"""
    goes_on = "[(setattr(clock, 'now', clock.now + 0.9), time.sleep(0.3), watchdog.beat('going on')) for _ in range(5)]"
    process = start(code + HANG.format(limit=1.0, wait=goes_on) + "print('done')\n")
    assert process.communicate(timeout=60)[0] == "done\n" and process.returncode == 0


@pytest.fixture
def facts() -> Callable[..., object]:
    from pretrain.agreement import Facts

    def make(**changed: object) -> Facts:
        same = {"host": "a", "config": {"optimizer": {"lr": 1.0}}, "code": "c" * 64, "vocabulary": "v" * 64}
        return Facts(**{**same, "data": "d" * 64, "versions": {"torch": "1"}, "environment": {}, **changed})  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"config": {"optimizer": {"lr": 2.0}}}, "optimizer.lr: 1.0 -> 2.0"),
        ({"code": "x" * 64}, "code: cccc"),
        ({"vocabulary": "x" * 64}, "vocabulary: vvvv"),
        ({"data": "x" * 64}, "data: dddd"),
        ({"versions": {"torch": "2"}}, "versions.torch: '1' -> '2'"),
        ({"environment": {"NVIDIA_TF32_OVERRIDE": "0"}}, "environment.NVIDIA_TF32_OVERRIDE: "),
    ],
)
def test_r41_the_first_differing_rank_is_named(
    facts: Callable[..., object], changed: dict[str, object], words: str
) -> None:
    from pretrain.agreement import first_difference

    assert first_difference([facts(), facts(host="b")]) == ""  # type: ignore[list-item]
    problem = first_difference([facts(), facts(), facts(host="node7", **changed)])  # type: ignore[list-item]
    assert problem.startswith("rank 2 on node7 ") and words in problem


def test_r41_the_codes_fingerprint_sees_uncommitted_changes(tmp_path: Path) -> None:
    from pretrain.agreement import code_fingerprint

    (tmp_path / "pretrain").mkdir()
    file = tmp_path / "pretrain" / "a.py"
    file.write_text("x = 1\n")
    before = code_fingerprint(tmp_path)
    file.write_text("x = 2\n")
    assert code_fingerprint(tmp_path) != before
    file.write_text("x = 1\n")
    assert code_fingerprint(tmp_path) == before
