"""`python -m pretrain.status` on folders of running, dead, complete and absent runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrain.status import describe, main

LINE = {
    "kind": "train", "step": 20, "time": 1000.0, "loss": 2.5, "mlm_accuracy": 0.25, "grad_norm": "inf", "lr": 1e-4,
    "tokens_per_second": 5000.0, "step_seconds": 2.0, "mfu": 0.4, "data_wait_share": 0.01, "memory_mb": 100.0,
    "skipped_steps": 1, "step_seconds_p50": 1.9, "step_seconds_p95": 2.5, "step_seconds_max": 3.0,
    "straggler_rank": 3, "straggler_ratio": 1.25,
    "system": {"cpu_utilization_percentage": 55.2, "gpu_0_utilization_percentage": 97.0, "gpu_1_utilization_percentage": 9.0},
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "pretrain"
    (folder / "checkpoints" / "step-000000010").mkdir(parents=True)
    config = {"train": {"steps": 100, "log_every": 10}, "tracking": {"enabled": True}}
    record = {"name": "r", "config": config, "parameters": 1234, "starts": [{}, {}], "unigram_loss": 6.5}
    (folder / "run.json").write_text(json.dumps(record))
    validation = [{"kind": "validation", "step": step, "mlm_loss": loss} for step, loss in ((10, 3.0), (20, "nan"))]
    lines = [json.dumps(line) for line in (*validation, LINE)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "tr')
    return folder


def test_a_running_run_at_a_glance(run: Path) -> None:
    text = describe(run, now=1030.0)
    assert describe(run.parent, now=1030.0) == text
    for words in (
        "1,234 parameters, 2 starts",
        "running, last sign 0:00:30 ago",
        "20 of 100 (20.0%), 0:02:40 left",
        "gradient inf",
        "step 20: MLM loss nan, best 3.0000 at step 10",
        "saved     10",
        "1 steps with a gradient",
        "2000 ms a step (p50 1900, p95 2500, max 3000)",
        "slowest   rank 3, 1.25 times the median",
        "machine   CPU 55%, GPU 97%",
        "not sent yet",
    ):
        assert words in text, text


def test_a_dead_and_a_complete_run(run: Path) -> None:
    assert "silent for 1:00:00: stopped or dead" in describe(run, now=4600.0)
    (run / "checkpoints" / "step-000000100").mkdir()
    assert "complete" in describe(run, now=4600.0)


def test_starting_and_validating_are_signs_of_life(run: Path) -> None:
    """Before the first step of all, and in a start or a validation that takes longer than many steps."""
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "starts": [{"time": 100.0}, {"time": 4570.0}]}))
    assert "running, last sign 0:00:30 ago" in describe(run, now=4600.0)
    with open(run / "metrics.jsonl", "w") as file:
        file.write(
            json.dumps(LINE) + "\n" + json.dumps({"kind": "validation", "step": 20, "time": 5000.0, "mlm_loss": 2.0})
        )
    assert "running, last sign 0:00:10 ago" in describe(run, now=5010.0)
    (run / "metrics.jsonl").unlink()
    assert "no step yet, started 2:00:00 ago" in describe(run, now=4570.0 + 7200)


def test_a_run_with_a_time_budget(run: Path) -> None:
    def last_line(step: int, left: float) -> None:
        line = {**LINE, "step": step, "budget_seconds_left": left, "straggler_rank": None, "straggler_ratio": None}
        (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")

    last_line(20, 65.0)
    text = describe(run, now=1030.0)
    assert "20 of 100 (20.0%), 0:01:05 left" in text and "slowest" not in text
    last_line(30, -0.5)
    assert "running" in describe(run, now=1030.0)  # its last checkpoint is not there yet
    (run / "checkpoints" / "step-000000030").mkdir()
    assert "complete: the time budget is used up" in describe(run, now=9999.0)


def test_a_folder_without_a_run_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: no run here")
