"""Tracking of one run folder: which store, which MLflow run, and what a finished run still owes it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pretrain.config import TrainConfig
from pretrain.run_folder import RunFolder
from pretrain.tracking import MlflowForwarder, default_uri, unsent_bytes

_TAGS = ("git", "data", "tokenizer", "run_id", "platform", "config_sha256")
_SECONDS = 60.0


def start_tracking(config: TrainConfig, folder: RunFolder) -> MlflowForwarder | None:
    """Begin to send the folder's metrics; None where tracking is off. Rank 0 calls this, after metrics.jsonl is cut."""
    if not config.tracking.enabled:
        return None
    record = folder.record
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or default_uri(folder.path)
    versions = {f"clozeworks.version.{name}": version for name, version in record.get("versions", {}).items()}
    forwarder = MlflowForwarder(
        folder.path,
        uri=uri,
        experiment=config.tracking.experiment,
        run_name=record["name"],
        config=config.as_tree(),
        dataset=(config.data.dir, record["data"]),
        tags={**{f"clozeworks.{name}": str(record[name]) for name in _TAGS}, **versions},
        run_id=record.get("mlflow_run_id", ""),
        on_run_id=lambda run_id: folder.update(mlflow_run_id=run_id, mlflow_uri=uri),
    )
    forwarder.start()
    return forwarder


def send_rest(config: TrainConfig) -> str:
    """Send what a finished run still owes its store, which was away when it ended; what to tell the user, or nothing."""
    path = Path(config.run.dir)
    if not config.tracking.enabled or not unsent_bytes(path):
        return ""
    folder = RunFolder(path, json.loads((path / "run.json").read_text(encoding="utf-8")))
    forwarder = start_tracking(config, folder)
    if forwarder is not None and not forwarder.close("FINISHED", timeout=_SECONDS):
        return f"MLflow still lacks metrics ({forwarder.problem or 'it is slow'}); metrics.jsonl has all"
    return "MLflow has the last metrics now"
