"""metrics.jsonl and MLflow: names, values, one history, four starts at once, a store that is away."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.tracking import MetricsFile, MlflowForwarder, default_uri, stored_name, stored_value

START = """
import sys
from pathlib import Path
from pretrain.tracking import MetricsFile, MlflowForwarder
store, run = sys.argv[1], Path(sys.argv[2])
run.mkdir(parents=True)
metrics = MetricsFile(run / "metrics.jsonl")
forwarder = MlflowForwarder(run, uri=store, experiment="e", run_name=run.name, config={"seed": 1})
forwarder.start()
for step in range(1, 21):
    metrics.write({"kind": "train", "step": step, "time": 1.0, "loss": float(step)})
    forwarder.notify()
metrics.close()
sys.exit(0 if forwarder.close(timeout=400) else 1)
"""


def client_of(run: Path) -> mlflow.MlflowClient:
    return mlflow.MlflowClient(tracking_uri=default_uri(run))


def forward(run: Path, **more: object) -> MlflowForwarder:
    forwarder = MlflowForwarder(run, uri=default_uri(run), experiment="e", run_name="r", config={"seed": 1, **more})
    forwarder.start()
    return forwarder


@pytest.mark.parametrize("name", ["f1@0.5", "x%", "/abs", "a/../b", "..", ".", "", "a//b", "ü ü", "x" * 300, "a:b"])
def test_r28_no_name_is_refused_by_mlflow(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    assert stored_name(name) != name or name == "ü ü"
    _validate_metric_name(stored_name(name))
    assert len(stored_name(name)) <= 250


@given(st.sets(st.text(alphabet="ab/.@% _x0", max_size=6) | st.text(), min_size=2, max_size=30))
def test_r28_different_names_stay_different(names: set[str]) -> None:
    stored = [stored_name(name) for name in names]
    assert len(set(stored)) == len(names)
    assert {stored_name(name) for name in stored if name in names} <= set(stored)


def test_r28_names_used_here_are_stored_as_they_are() -> None:
    for name in ("train/loss", "validation/mlm_loss", "optimizer.lr", "f1 micro-avg"):
        assert stored_name(name) == name


def test_r28_a_shortened_value_says_so() -> None:
    value = "v" * 6001 + "TAIL"
    stored = stored_value(value)
    assert len(stored) <= 6000 and "shortened: 6005 characters, sha256 " in stored
    assert stored_value("v" * 6000) == "v" * 6000


def test_non_finite_numbers_are_strings_and_every_line_is_strict_json(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write({"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": 2.5, "e": None})
    metrics.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line == {"step": 1, "a": "nan", "b": "inf", "c": "-inf", "d": 2.5, "e": None}


def test_a_resumed_run_keeps_one_history(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 4)) + '{"step": 5, "lo')
    metrics = MetricsFile(path, after_step=2)
    metrics.write({"step": 3, "new": True})
    metrics.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1}, {"step": 2}, {"step": 3, "new": True},
    ]  # fmt: skip


def test_r28_r29_r30_a_run_reaches_the_store_whole_and_a_resumed_one_continues_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    long = "v" * 6001 + "TAIL"
    metrics = MetricsFile(run / "metrics.jsonl")
    metrics.write({"kind": "train", "step": 1, "time": 5.0, "loss": math.nan, "f1@0.5": 0.5, "x%": 1.0, "/abs": 2.0})
    metrics.write({"kind": "train", "step": 2, "time": 6.0, "loss": math.inf, "a/../b": 3.0, "nsp_loss": None})
    metrics.write({"kind": "train", "step": 3, "time": 7.0, **{f"m{i}": float(i) for i in range(1001)}})
    forwarder = forward(run, long=long, **{"odd@name": 1})
    assert forwarder.close(timeout=60), forwarder.problem
    metrics.write({"kind": "validation", "step": 3, "time": 8.0, "mlm_loss": 2.5})
    metrics.close()
    second = forward(run)
    assert second.close(status="KILLED", timeout=60), second.problem

    client = client_of(run)
    found = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert len(found) == 1
    data, info = found[0].data, found[0].info
    assert info.status == "KILLED"
    assert data.params["seed"] == "1" and "shortened: 6005" in data.params["long"]
    assert data.metrics["validation/mlm_loss"] == 2.5 and data.metrics["train/m1000"] == 1000.0
    losses = client.get_metric_history(info.run_id, "train/loss")
    assert [metric.step for metric in losses] == [1, 2]  # once each: the second start sent only what was new
    assert math.isnan(losses[0].value) and losses[1].value >= 1.797e308
    assert {stored_name("train/f1@0.5"), stored_name("train/x%"), stored_name("train//abs")} <= data.metrics.keys()
    stored = Path(client.download_artifacts(info.run_id, "config.json", str(tmp_path))).read_text()
    assert json.loads(stored) == {"seed": 1}
    assert len(data.tags["config_sha256"]) == 64
    assert (tmp_path / "mlartifacts").is_dir()


@pytest.mark.slow
@pytest.mark.multiproc
def test_r30_four_starts_at_once_on_an_empty_store_all_succeed(tmp_path: Path) -> None:
    store = default_uri(tmp_path / "any")
    command = [sys.executable, "-c", START, store]
    processes = [subprocess.Popen([*command, str(tmp_path / f"run-{i}" / "pretrain")]) for i in range(4)]
    assert [process.wait(timeout=500) for process in processes] == [0, 0, 0, 0]
    client = mlflow.MlflowClient(tracking_uri=store)
    runs = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert len(runs) == 4
    assert all(len(client.get_metric_history(run.info.run_id, "train/loss")) == 20 for run in runs)


def test_a_store_that_is_away_costs_nothing_and_loses_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    metrics = MetricsFile(run / "metrics.jsonl")
    metrics.write({"kind": "train", "step": 1, "time": 5.0, "loss": 1.0})
    metrics.close()
    away = MlflowForwarder(run, uri="http://127.0.0.1:9", experiment="e", run_name="r", config={})
    away.start()
    assert not away.close(timeout=3)
    assert forward(run).close(timeout=60)
    client = client_of(run)
    runs = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert [item.data.metrics for item in runs] == [{"train/loss": 1.0}]
