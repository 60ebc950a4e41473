"""The run folder and its run.json: what this run is, so that the same command continues it and nothing else does."""

from __future__ import annotations

import json
import platform
import subprocess
import threading
import time
import uuid
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from data_pipeline.artefacts import write_text
from data_pipeline.config import ConfigError
from pretrain.config import TrainConfig

SCHEMA = 1
_PACKAGES = (
    "torch",
    "deepspeed",
    "mlflow",
    "transformers",
    "numpy",
    "tokenizers",
    "tokie",
    "sentencepiece",
    "datatrove",
)
# A resumed run may change its length, its rate or its ZeRO stage. These decide what the weights and examples are.
_FIXED = ("seed", "model")
SAME_RESULTS = ("kernels", "head_chunk", "activation_checkpointing")
"""Keys of `[model]` that say how it is computed; a run may go on with others."""
_LIVE = ("run", "tracking", "corpus", "tokenizer", "data")


class RunFolder:
    """One run's folder; rank 0 writes, every rank may read.

    Attributes:
        path: the folder.
        record: the content of run.json.
    """

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self.path = path
        self.record = record
        self._lock = threading.Lock()

    @property
    def run_id(self) -> str:
        """Written into every checkpoint of this run."""
        return str(self.record["run_id"])

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The metrics file, one JSON object a line."""
        return self.path / "metrics.jsonl"

    def update(self, **values: Any) -> None:
        """Set keys of run.json; threads may call this."""
        with self._lock:
            self.record.update(values)
            write_text(self.path / "run.json", json.dumps(self.record, indent=1, sort_keys=True) + "\n")

    def add_start(self, *, step: int, world_size: int) -> None:
        """Note one more start of the job: when, from which step, on how many ranks, with which code and settings."""
        start = {"time": time.time(), "step": step, "world_size": world_size}
        start |= {key: self.record[key] for key in ("git", "changes")}
        self.update(starts=[*self.record.get("starts", []), start])


def open_run(config: TrainConfig, *, tokenizer: str, data: str) -> RunFolder:
    """The folder of this configuration's run, made where it is new; its record then describes the current settings.

    Args:
        config: the merged configuration, vocabulary filled in.
        tokenizer, data: fingerprints of what the run reads.

    Raises:
        ConfigError: the folder holds a run of another model, seed, tokenizer or data set.
    """
    path = Path(config.run.dir)
    file = path / "run.json"
    current = _describe(config, tokenizer=tokenizer, data=data)
    if not file.is_file():
        folder = RunFolder(path, {"run_id": uuid.uuid4().hex, "created": time.time(), "changes": [], **current})
        folder.update()
        return folder
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        run_id = stored["run_id"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: not a run record ({error}); name another run.dir or remove the folder") from error
    _refuse_other_run(stored, current, file)
    changes = changed_keys(stored.get("config", {}), current["config"])
    folder = RunFolder(path, {**stored, **current, "run_id": run_id, "changes": changes})
    folder.update()
    return folder


def changed_keys(stored: Mapping[str, Any], current: Mapping[str, Any], *, live: Collection[str] = _LIVE) -> list[str]:
    """`table.key: old -> new` for each setting that differs; tables in `live` do not affect training and are left out."""
    lines = []
    for table in sorted(set(stored) | set(current)):
        if table in live:
            continue
        old, new = stored.get(table), current.get(table)
        if isinstance(old, dict) and isinstance(new, dict):
            keys = sorted(key for key in set(old) | set(new) if old.get(key) != new.get(key))
            lines += [f"{table}.{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys]
        elif old != new:
            lines.append(f"{table}: {old!r} -> {new!r}")
    return lines


def fixed_changes(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """`changed_keys` of two whole configurations, of what makes another run."""
    return changed_keys(*({key: _without_how(tree.get(key)) for key in _FIXED} for tree in (stored, current)))


def _without_how(table: Any) -> Any:
    return {key: table[key] for key in table if key not in SAME_RESULTS} if isinstance(table, dict) else table


def git_revision() -> str:
    """The commit of this code, "-dirty" where files differ from it, "unknown" outside a repository."""
    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages whose change could change results."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _describe(config: TrainConfig, *, tokenizer: str, data: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "name": config.run.name or Path(config.run.dir).name,
        "config": config.as_tree(),
        "config_sha256": config.fingerprint(),
        "git": git_revision(),
        "versions": versions(),
        "platform": platform.platform(),
        "tokenizer": tokenizer,
        "data": data,
    }


def _refuse_other_run(stored: Mapping[str, Any], current: Mapping[str, Any], file: Path) -> None:
    """A folder continues only the run that it holds."""
    differing = [key for key in ("tokenizer", "data") if stored.get(key) != current[key]]
    lines = [f"fingerprint of the {key}: {stored.get(key)} -> {current[key]}" for key in differing]
    lines += fixed_changes(stored.get("config", {}), current["config"])
    if lines:
        changes = "\n".join(f"  {line}" for line in lines)
        raise ConfigError(
            f"{file}: this folder holds a run that cannot be continued with these settings:\n{changes}\n"
            f"name another folder (--set run.dir=...) or restore the settings"
        )
