"""An exported model as a version in MLflow's registry, with its scores; the client is `tracking.open_client`'s."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pretrain.tracking import open_client, open_experiment, stored_name, stored_value

WEIGHTS_TAG = "clozeworks.weights_sha256"


class ModelVersion(NamedTuple):
    """What was registered.

    Attributes:
        run_id: the MLflow run that has the scores.
        version: of the registered model.
    """

    run_id: str
    version: str


def register_export(
    uri: str,
    *,
    name: str,
    folder: Path,
    weights: str,
    step: int,
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    run_id: str = "",
    experiment: str = "nightly",
) -> ModelVersion:
    """Log scores at a step and register the folder; the same weights a second time are the version that is there.

    Args:
        uri: tracking server or store.
        name: of the registered model.
        folder: a Hugging Face folder; its files are copied into the store.
        weights: sha256 of the weights.
        step: optimizer step of the checkpoint.
        metrics: name -> value; non-finite values are stored as such.
        tags: of the version, its scores in words for example.
        run_id: the MLflow run of the pretraining, where the store has it; else a run in `experiment` is made.
        experiment: its name.

    Raises:
        OSError, Exception: whatever the store answers; nothing here retries.
    """
    client = open_client(uri)
    known = {model.name for model in client.search_registered_models(filter_string=f"name = '{name}'")}
    if name not in known:
        client.create_registered_model(name)
    versions = client.search_model_versions(f"name = '{name}'")
    there = next((each for each in versions if each.tags.get(WEIGHTS_TAG) == weights), None)
    if there is not None:
        run_id = there.run_id
    elif not _has_run(client, run_id):
        experiment_id = open_experiment(client, uri, experiment)
        run_id = client.create_run(experiment_id, run_name=f"{name} step {step}").info.run_id
        client.set_terminated(run_id)
    for key, value in metrics.items():
        client.log_metric(run_id, stored_name(key), value, step=step)
    if there is None:
        place = f"export/step-{step}"
        client.log_artifacts(run_id, str(folder), place)
        source = f"{client.get_run(run_id).info.artifact_uri}/{place}"
        there = client.create_model_version(
            name, source, run_id=run_id, tags={WEIGHTS_TAG: weights, "step": str(step)}, description=f"step {step}"
        )
    for key, words in tags.items():
        client.set_model_version_tag(name, there.version, stored_name(key), stored_value(words))
    return ModelVersion(run_id, str(there.version))


def _has_run(client: Any, run_id: str) -> bool:
    if not run_id:
        return False
    try:
        client.get_run(run_id)
    except Exception as error:  # the class is MLflow's own, which tracking.py alone imports
        if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
    return True
