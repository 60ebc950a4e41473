"""metrics.jsonl and MLflow: names, values, one history, four starts at once, a store that is away."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretrain import tracking
from pretrain.config import TrainConfig
from pretrain.run_tracking import send_rest
from pretrain.system_metrics import SystemMetrics
from pretrain.tracking import (
    MetricsFile,
    MlflowForwarder,
    default_uri,
    stored_name,
    stored_value,
    to_json,
    unsent_bytes,
)

ROOT = Path(__file__).resolve().parent.parent
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


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[int]]:
    """An SQLite store on which four processes started at once, and their exit codes."""
    folder = tmp_path_factory.mktemp("tracking")
    store = default_uri(folder / "any")
    command = [sys.executable, "-c", START, store]
    processes = [subprocess.Popen([*command, str(folder / f"run-{i}" / "pretrain")], cwd=ROOT) for i in range(4)]
    return store, [process.wait(timeout=500) for process in processes]


@pytest.fixture
def store(started: tuple[str, list[int]]) -> str:
    """The same store, whose tables exist by now: making them takes seconds."""
    return started[0]


def runs_of(store: str, experiment: str) -> list[Any]:
    client = mlflow.MlflowClient(tracking_uri=store)
    return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


def forward(run: Path, uri: str, **config: object) -> MlflowForwarder:
    """A forwarder whose experiment is named after the test's folder."""
    forwarder = MlflowForwarder(
        run,
        uri=uri,
        experiment=run.parent.name,
        run_name="r",
        config={"seed": 1, **config},
        dataset=("runs/demo/data", "f" * 64),
    )
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


def test_a_full_disk_ends_no_run_and_loses_no_line(tmp_path: Path) -> None:
    """The operating system refuses in the middle of a line; later there is room."""
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    assert metrics.write({"step": 1}) == ""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        problem = metrics.write({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(path) in problem and "its lines are kept" in problem
    assert metrics.write({"step": 3}) == "" and metrics.close() == ""
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_the_machines_figures_are_read_once_in_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("pretrain.system_metrics.time.monotonic", lambda: now[0])
    system = SystemMetrics(tmp_path, torch.device("cpu"))
    found = system.read()
    assert 0 <= found["cpu_utilization_percentage"] <= 100 and 0 < found["system_memory_usage_percentage"] <= 100
    assert found["process_memory_usage_megabytes"] > 10 and found["disk_available_megabytes"] > 0
    now[0] += 9
    assert system.read() == {}
    now[0] += 2
    assert system.read().keys() == found.keys()


@pytest.mark.slow
@pytest.mark.multiproc
def test_r30_four_starts_at_once_on_an_empty_store_all_succeed(started: tuple[str, list[int]]) -> None:
    store, codes = started
    assert codes == [0, 0, 0, 0]
    client = mlflow.MlflowClient(tracking_uri=store)
    runs = runs_of(store, "e")
    assert len(runs) == 4
    assert all(len(client.get_metric_history(run.info.run_id, "train/loss")) == 20 for run in runs)


@pytest.mark.slow
def test_r28_r29_r30_a_run_reaches_the_store_whole_and_a_resumed_one_continues_it(store: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    long = "v" * 6001 + "TAIL"
    metrics = MetricsFile(run / "metrics.jsonl")
    metrics.write({"kind": "train", "step": 1, "time": 5.0, "loss": math.nan, "f1@0.5": 0.5, "x%": 1.0, "/abs": 2.0})
    system = {"cpu_utilization_percentage": 12.5}
    metrics.write(
        {"kind": "train", "step": 2, "time": 6.0, "loss": math.inf, "a/../b": 3.0, "nsp_loss": None, "system": system}
    )
    metrics.write({"kind": "train", "step": 3, "time": 7.0, **{f"m{i}": float(i) for i in range(1001)}})
    forwarder = forward(run, store, long=long, **{"odd@name": 1})
    assert forwarder.close(timeout=300), forwarder.problem
    metrics.close()
    metrics = MetricsFile(run / "metrics.jsonl", after_step=2)  # killed before the checkpoint of step 3
    second = forward(run, store, added=2)
    for step in (3, 4):
        metrics.write({"kind": "validation", "step": step, "time": 8.0, "mlm_loss": 2.5})
    metrics.close()
    assert second.close(status="KILLED", timeout=300), second.problem

    (found,) = runs_of(store, tmp_path.name)
    client = mlflow.MlflowClient(tracking_uri=store)
    data, info = found.data, found.info
    assert info.status == "KILLED"
    assert data.params["seed"] == "1" and "shortened: 6005" in data.params["long"] and data.params["added"] == "2"
    assert data.metrics["train/m1000"] == 1000.0
    assert data.metrics["system/cpu_utilization_percentage"] == 12.5
    losses = client.get_metric_history(info.run_id, "train/loss")
    assert [metric.step for metric in losses] == [1, 2]  # once each: the second start sent only what was new
    assert math.isnan(losses[0].value) and losses[1].value >= 1.797e308
    held_out = client.get_metric_history(info.run_id, "validation/mlm_loss")
    assert [metric.step for metric in held_out] == [3, 4]  # also what lies where the lines of the killed job lay
    assert {stored_name("train/f1@0.5"), stored_name("train/x%"), stored_name("train//abs")} <= data.metrics.keys()
    stored = Path(client.download_artifacts(info.run_id, "config.json", str(tmp_path))).read_text()
    assert json.loads(stored) == {"seed": 1, "added": 2}
    assert data.tags["config_sha256"] == hashlib.sha256(stored.encode()).hexdigest()
    (used,) = found.inputs.dataset_inputs
    assert used.dataset.name == "runs/demo/data" and used.dataset.digest == "f" * 36

    (run / "tracking.json").write_text(json.dumps({"run_id": "f" * 32, "offset": 10}))  # as another store called it
    third = forward(run, store, added=2)
    assert third.close(timeout=300), third.problem
    (other,) = (run for run in runs_of(store, tmp_path.name) if run.info.run_id != info.run_id)
    assert [metric.step for metric in client.get_metric_history(other.info.run_id, "train/loss")] == [1, 2]


class Gate:
    """A TCP relay in front of a server that lets nothing through while it is shut; connections stay open and wait."""

    def __init__(self, server_port: int) -> None:
        self.open = threading.Event()
        self.waiting = threading.Event()
        self.server = server_port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(here,), daemon=True).start()

    def _serve(self, here: socket.socket) -> None:
        self.waiting.set()
        self.open.wait()
        try:
            there = socket.create_connection(("127.0.0.1", self.server))
        except OSError:
            here.close()
            return
        threading.Thread(target=self._pump, args=(there, here), daemon=True).start()
        self._pump(here, there)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.open.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [held.getsockname()[1] for held in sockets]


def start_server(store: str, port: int, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1", "--artifacts-destination", str(folder / "artifacts")]
    with open(folder / "server.log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def end_server(server: subprocess.Popen[bytes]) -> None:
    """Kill it with its workers, as a crash of its machine would."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait(timeout=30)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_real_server_slow_then_killed_then_back_loses_nothing_and_holds_up_nothing(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pretrain.tracking._RETRY_SECONDS", (0.5,))
    run = tmp_path / "run"
    run.mkdir()
    ports = free_ports(2)
    gate = Gate(ports[0])
    # The one that comes back starts now too, behind a port that nothing asks yet: it takes many seconds.
    server, back = (start_server(store, port, tmp_path) for port in ports)
    try:
        metrics = MetricsFile(run / "metrics.jsonl")
        forwarder = forward(run, f"http://127.0.0.1:{gate.port}")

        def log(steps: range) -> None:
            for step in steps:
                metrics.write({"kind": "train", "step": step, "time": float(step), "loss": step / 2})
                forwarder.notify()

        assert gate.waiting.wait(120)  # a call hangs in the server's gate
        log(range(1, 101))  # and all of this is written meanwhile
        assert unsent_bytes(run) == (run / "metrics.jsonl").stat().st_size
        gate.open.set()
        wait_until(lambda: not unsent_bytes(run))
        end_server(server)
        log(range(101, 201))
        wait_until(lambda: bool(forwarder.problem))
        assert unsent_bytes(run)
        gate.server = ports[1]
        wait_until(lambda: not unsent_bytes(run))
        metrics.close()
        assert forwarder.close(timeout=300), forwarder.problem
    finally:
        end_server(server)
        end_server(back)
    (found,) = runs_of(store, tmp_path.name)
    assert found.info.status == "FINISHED" and found.data.params == {"seed": "1"}
    history = mlflow.MlflowClient(tracking_uri=store).get_metric_history(found.info.run_id, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(step, step / 2) for step in range(1, 201)]


@pytest.mark.slow
def test_what_a_finished_run_owes_is_sent_by_the_same_command(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is away during the whole run; `pretrain.run` on the complete run sends everything."""
    monkeypatch.setattr("pretrain.run_tracking._SECONDS", 300.0)  # a busy machine
    config = run_config(tmp_path, store)
    run = Path(config.run.dir)
    run.mkdir(parents=True)
    away = MlflowForwarder(run, uri="http://127.0.0.1:9", experiment=tmp_path.name, run_name="r", config={})
    (run / "metrics.jsonl").write_text(to_json({"kind": "train", "step": 1, "time": 5.0, "loss": 1.0}) + "\n")
    record = {name: name for name in ("name", "git", "data", "tokenizer", "run_id", "platform", "config_sha256")}
    (run / "run.json").write_text(json.dumps({**record, "versions": {"torch": "2.0"}}))
    away.start()
    assert not away.close(timeout=2)
    assert unsent_bytes(run)
    assert send_rest(config) == "MLflow has the last metrics now"
    (found,) = runs_of(store, tmp_path.name)
    assert found.data.metrics == {"train/loss": 1.0} and found.data.params["optimizer.lr"] == "0.001"
    assert {f"clozeworks.{name}": name for name in record if name != "name"}.items() <= found.data.tags.items()
    assert found.data.tags["clozeworks.version.torch"] == "2.0"
    assert found.inputs.dataset_inputs[0].dataset.digest == "data"
    assert send_rest(config) == ""


@pytest.mark.slow
def test_r30_the_next_phase_waits_for_what_the_last_one_still_sends(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is away at the end of a phase and at the beginning of the next, in one process; then it comes back."""
    opened, back = tracking.open_client, threading.Event()

    def open_later(uri: str) -> Any:
        if not back.is_set():
            raise OSError("away")
        return opened(uri)

    monkeypatch.setattr(tracking, "open_client", open_later)
    monkeypatch.setattr(tracking, "_RETRY_SECONDS", (0.1,))
    run = tmp_path / "run"
    run.mkdir()
    line = {"kind": "train", "time": 5.0, "loss": 1.0}
    (run / "metrics.jsonl").write_text(to_json({**line, "step": 1}) + "\n")
    first = forward(run, store)
    assert not first.close("RUNNING", timeout=0.1)
    second = forward(run, store)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(to_json({**line, "step": 2}) + "\n")
    back.set()
    assert second.close(timeout=200), second.problem
    (found,) = runs_of(store, tmp_path.name)
    history = mlflow.MlflowClient(tracking_uri=store).get_metric_history(found.info.run_id, "train/loss")
    assert [metric.step for metric in history] == [1, 2] and found.info.status == "FINISHED"


def run_config(folder: Path, store: str) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "data": {"dir": str(folder / "data")},
            "run": {"dir": str(folder / "run")},
            "model": {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 64},
            "train": {"steps": 1, "global_batch": 1, "micro_batch": 1},
            "optimizer": {"lr": 1e-3},
            "tracking": {"uri": store, "experiment": folder.name},
        }
    )
