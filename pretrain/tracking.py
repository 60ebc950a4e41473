"""Where numbers go: metrics.jsonl always, MLflow behind it. The only file that imports mlflow.

Rank 0 appends to metrics.jsonl. A background thread follows that file and sends what is new to MLflow, so a slow or dead
store costs the training loop nothing and loses nothing: what was sent is noted in tracking.json, and the thread, or the
next start of the job, goes on from there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import posixpath
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from data_pipeline.artefacts import write_text

_UNSAFE = re.compile(r"[^/\w.\- ]")
_MARKED = re.compile(r".*_x[0-9a-f]{10}")
_NAME_LENGTH, _VALUE_LENGTH, _DIGEST_LENGTH = 250, 6000, 36
_METRICS_A_CALL, _PARAMS_A_CALL = 1000, 100
_RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)


def to_json(record: Mapping[str, Any]) -> str:
    """One line of strict JSON; non-finite numbers become the strings "nan", "inf" and "-inf"."""
    plain = {key: _spelled(value) for key, value in record.items()}
    return json.dumps(plain, allow_nan=False)


def _spelled(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class MetricsFile:
    """metrics.jsonl, open for appending.

    Args:
        path: the file.
        after_step: the run goes on after this step: later lines, written by a job that was killed before its next
            checkpoint, are dropped, and so is a torn last line. One file tells one history.
    """

    def __init__(self, path: Path, after_step: int = 0) -> None:
        self.path = path
        if path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step(line) <= after_step]
            write_text(path, "".join(line + "\n" for line in kept))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._unwritten = b""

    def write(self, record: Mapping[str, Any]) -> str:
        """Append one record; it is in the file when this returns, or kept until the disk takes it.

        Returns:
            What stands in the way, for example a full disk; empty where all is well. A line of metrics is no reason to end
            a run: the next checkpoint is, where the disk is still full.
        """
        self._unwritten += to_json(record).encode() + b"\n"
        try:
            self._write_kept()
        except OSError as error:
            return f"{self.path} cannot be written ({error}); its lines are kept until it can be"
        return ""

    def close(self) -> str:
        """Write what was kept, sync and close; what stood in the way, as `write`."""
        try:
            self._write_kept()
            os.fsync(self._file)
        except OSError as error:
            return f"{self.path} lacks {len(self._unwritten):,} bytes at its end ({error})"
        finally:
            os.close(self._file)
        return ""

    def _write_kept(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]


def _step(line: str) -> float:
    """The step of a line; infinite where it is not a whole record."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def stored_name(name: str) -> str:
    """A name that MLflow accepts, different for different originals.

    What MLflow would refuse (characters outside `/ letters digits _ . - blank`, a path that is not its own normal
    form, over 250 characters) is replaced, and a hash of the original is appended.
    """
    plain = posixpath.normpath(name) == name and not name.startswith(("/", "..")) and name != "."
    if plain and not _UNSAFE.search(name) and len(name) <= _NAME_LENGTH and not _MARKED.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    cleaned = _UNSAFE.sub("_", name).replace("..", "_").strip("/. ") or "unnamed"
    cleaned = posixpath.normpath(cleaned)[: _NAME_LENGTH - 12].rstrip("/. ")
    return f"{cleaned}_x{digest}"


def stored_value(value: Any) -> str:
    """A parameter's value that MLflow accepts; a shortened one says so, with its length and hash."""
    text = str(value)
    if len(text) <= _VALUE_LENGTH:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    note = f"... [shortened: {len(text)} characters, sha256 {digest}]"
    return text[: _VALUE_LENGTH - len(note)] + note


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def default_uri(run_dir: Path) -> str:
    """The embedded store: mlflow.db beside the run folder."""
    return f"sqlite:///{run_dir.resolve().parent / 'mlflow.db'}"


def unsent_bytes(run_dir: Path) -> int:
    """How much of a run folder's metrics.jsonl its store lacks."""
    metrics = run_dir / "metrics.jsonl"
    return max(metrics.stat().st_size - _read_position(run_dir).offset, 0) if metrics.exists() else 0


class _Position(NamedTuple):
    run_id: str
    offset: int
    """Bytes of metrics.jsonl that the store has."""


class MlflowForwarder(threading.Thread):
    """Sends metrics.jsonl of one run folder to MLflow until closed; never raises into the training loop.

    Args:
        run_dir: the run folder.
        uri: tracking server or store.
        experiment, run_name: as MLflow shows them.
        config: nested tables; parameters of the run, and stored whole as config.json.
        dataset: name and fingerprint of what the run reads; an input of the run.
        tags: strings to tag the run with.
        run_id: an MLflow run to go on with; empty: the one in tracking.json, or a new one.
        on_run_id: called once, from this thread, with the run's id.
    """

    _newest: ClassVar[dict[Path, MlflowForwarder]] = {}
    """Of each run folder, so that two never send the same lines, nor make two runs of one."""

    def __init__(
        self,
        run_dir: Path,
        *,
        uri: str,
        experiment: str,
        run_name: str,
        config: Mapping[str, Any],
        dataset: tuple[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        run_id: str = "",
        on_run_id: Any = None,
    ) -> None:
        super().__init__(name="mlflow", daemon=True)
        self._dir, self._metrics = run_dir, run_dir / "metrics.jsonl"
        self._uri, self._experiment, self._run_name = uri, experiment, run_name
        self._config, self._tags, self._on_run_id = config, dict(tags or {}), on_run_id
        self._wake, self._closing = threading.Event(), threading.Event()
        self._status = "FINISHED"
        self._dataset, self._run_id = dataset, run_id
        self._size_at_start, self._end = self._size(), math.inf
        self._client: Any = None
        self._before = self._newest.get(run_dir.resolve())
        self._newest[run_dir.resolve()] = self
        self._succeeded = threading.Event()
        self.problem = ""
        """The last error of the store; empty while all is well."""

    def notify(self) -> None:
        """There is something new in the file."""
        self._wake.set()

    def close(self, status: str = "FINISHED", timeout: float = 30.0) -> bool:
        """Send the rest and end the run in MLflow.

        Args:
            status: FINISHED, FAILED or KILLED.
            timeout: seconds to wait for the store.

        Returns:
            Whether the store has everything; what it lacks is sent by the next start of the job.
        """
        self._status, self._end = status, self._size()
        self._closing.set()
        self._wake.set()
        self.join(timeout)
        return not self.is_alive() and not self.problem

    def run(self) -> None:
        """Connect, then follow the file; after an error wait and try again from the last position."""
        if self._before is not None and self._before.is_alive():
            self._before._succeeded.set()  # of the phase before, which may still be trying: what it lacks is sent here
            self._before.join()
        known = _read_position(self._dir)
        # A file that was cut back to a checkpoint's step was shorter than what was sent; it has grown again since then.
        self._position = _Position(self._run_id or known.run_id, min(known.offset, self._size_at_start))
        failures = 0
        while not self._succeeded.is_set():
            closing = self._closing.is_set()
            try:
                if self._client is None:
                    self._connect()
                self._send_new()
                if closing:
                    self._client.set_terminated(self._position.run_id, self._status)
                self.problem, failures = "", 0
                if closing:
                    return
                self._wake.wait(2.0)
                self._wake.clear()
            except Exception as error:  # noqa: BLE001 - whatever a store does, training goes on
                self.problem = f"{type(error).__name__}: {error}".splitlines()[0]
                delay = _RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)]
                failures += 1
                # While closing, a store that is still down is tried again at once a second until the join gives up.
                self._succeeded.wait(1.0) if closing else self._closing.wait(delay)

    def _connect(self) -> None:
        client = open_client(self._uri)
        experiment_id = open_experiment(client, self._uri, self._experiment)
        run_id = self._position.run_id
        if run_id and not _go_on_with(client, run_id):
            run_id = ""  # another store than before, or an emptied one: it gets all of the run
        if not run_id:
            run_id = client.create_run(experiment_id, run_name=self._run_name, tags=self._tags).info.run_id
            self._keep(_Position(run_id, 0))
        self._send_params(client, run_id)
        if self._dataset:
            self._send_dataset(client, run_id, *self._dataset)
        text = json.dumps(self._config, indent=1, sort_keys=True) + "\n"
        client.log_text(run_id, text, "config.json")
        client.set_tag(run_id, "config_sha256", hashlib.sha256(text.encode()).hexdigest())
        if self._on_run_id:
            self._on_run_id(run_id)
        self._client = client

    def _send_params(self, client: Any, run_id: str) -> None:
        """Parameters that the store lacks: a start that lost the store in between is made whole by the next try."""
        from mlflow.entities import Param

        there = client.get_run(run_id).data.params
        named = {stored_name(key): stored_value(value) for key, value in flatten(self._config).items()}
        params = [Param(name, value) for name, value in named.items() if name not in there]
        for at in range(0, len(params), _PARAMS_A_CALL):
            client.log_batch(run_id, params=params[at : at + _PARAMS_A_CALL])

    def _send_dataset(self, client: Any, run_id: str, name: str, fingerprint: str) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        digest = fingerprint[:_DIGEST_LENGTH]
        dataset = Dataset(name[:_NAME_LENGTH], digest, "local", json.dumps({"uri": name, "fingerprint": fingerprint}))
        client.log_inputs(run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])

    def _send_new(self) -> None:
        from mlflow.entities import Metric

        size, offset = min(self._size(), self._end), self._position.offset
        if size <= offset:
            return
        with open(self._metrics, "rb") as handle:
            handle.seek(offset)
            data = handle.read(int(size - offset))
        whole = data[: data.rfind(b"\n") + 1]
        metrics = [Metric(*row) for line in whole.splitlines() for row in _metric_rows(json.loads(line))]
        for at in range(0, len(metrics), _METRICS_A_CALL):
            self._client.log_batch(self._position.run_id, metrics=metrics[at : at + _METRICS_A_CALL])
        if whole:
            self._keep(_Position(self._position.run_id, offset + len(whole)))

    def _size(self) -> int:
        """Bytes of metrics.jsonl."""
        return self._metrics.stat().st_size if self._metrics.exists() else 0

    def _keep(self, position: _Position) -> None:
        self._position = position
        write_text(self._dir / "tracking.json", json.dumps(position._asdict()) + "\n")


def _go_on_with(client: Any, run_id: str) -> bool:
    """Set an MLflow run to running; false where the store does not know it."""
    from mlflow.exceptions import MlflowException

    try:
        client.update_run(run_id, status="RUNNING")
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
    return True


def _read_position(run_dir: Path) -> _Position:
    try:
        return _Position(**json.loads((run_dir / "tracking.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return _Position("", 0)


def _metric_rows(record: Mapping[str, Any]) -> Iterator[tuple[str, float, int, int]]:
    """Name, value, milliseconds and step of each number in a line of metrics.jsonl.

    What lies under "system" goes to `system/...`, where MLflow's pages look for a machine's figures.
    """
    kind, step = record.get("kind", "train"), int(record.get("step", 0))
    milliseconds = int(float(record.get("time", time.time())) * 1000)
    named = {f"{kind}/{key}": value for key, value in record.items() if key not in ("kind", "step", "time", "system")}
    named |= {f"system/{key}": value for key, value in record.get("system", {}).items()}
    for name, value in named.items():
        if value is None or isinstance(value, bool):
            continue
        try:
            yield stored_name(name), float(value), milliseconds, step
        except (TypeError, ValueError):
            continue


def open_client(uri: str) -> Any:
    """A client whose calls fail soon instead of hanging for minutes; the thread does the retrying."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    from mlflow import MlflowClient  # seconds: before the lock, which others wait for

    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with _store_lock(uri):
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)  # makes the tables of an empty store
    return client


def open_experiment(client: Any, uri: str, name: str) -> str:
    """The id of the experiment, made where it is new; a client of `open_client`.

    An embedded store keeps its files beside its database, not in whatever folder the job started in.
    """
    with _store_lock(uri):
        experiment = client.get_experiment_by_name(name)
        if experiment:
            return experiment.experiment_id
        location = None
        if uri.startswith("sqlite:///"):
            location = (Path(uri.removeprefix("sqlite:///")).resolve().parent / "mlartifacts").as_uri()
        return client.create_experiment(name, artifact_location=location)


@contextlib.contextmanager
def _store_lock(uri: str) -> Iterator[None]:
    """One process at a time prepares an SQLite store: its first migration is not safe to run twice at once."""
    if not uri.startswith("sqlite:///"):
        yield
        return
    path = Path(uri.removeprefix("sqlite:///"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
