"""What a build shows while it runs."""

from __future__ import annotations

import pytest

from data_pipeline import progress
from data_pipeline.progress import BuildProgress


def test_lines_tell_rate_and_time_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Four of ten tasks were complete at the start: they count as done, but not for the rate."""
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with BuildProgress().stage("stage 1", 50, "MB") as advance:
        advance(4, 10)
        clock[0] += 11
        advance(4, 10)
        clock[0] += 9
        advance(6, 10)
        clock[0] += 10
        advance(9, 10)
        clock[0] += 10
        advance(10, 10)
    assert capsys.readouterr().out.splitlines() == [
        "stage 1: started",
        "stage 1: 4 of 10 tasks, 11 s",
        "stage 1: 9 of 10 tasks, 30 s, 0.8 MB/s, about 6 s left",
        "stage 1: done in 40.0 s",
    ]
