"""Scoring a Hugging Face folder that is fine-tuned already, with its labels matched by name (R35)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eval.labels import label_outputs
from eval.model import TaskModel
from eval.source import ModelSource
from eval.tasks import Task, TaskError


def load_fine_tuned(source: ModelSource, task: Task, label_names: tuple[str, ...]) -> tuple[TaskModel, np.ndarray]:
    """The folder's classifier and, for each label of the task, the output that stands for it.

    Args:
        source: a folder as `BertForSequenceClassification` (or `...TokenClassification`, `...QuestionAnswering`,
            `...MultipleChoice`) writes it.
        task: what it is to be scored on.
        label_names: the task's labels in the order of their ids; none for spans, choices and regression.

    Raises:
        TaskError: no such classifier in the folder, or labels that do not match the task's.
    """
    tensors = _read(source.folder)
    # RoBERTa's classifier holds the pooler and the last layer.
    inside = "classifier.out_proj.weight" in tensors
    name = "qa_outputs" if task.head == "span" else "classifier.out_proj" if inside else "classifier"
    head = _layer(source.folder, tensors, name)
    outputs = len(head["weight"])
    wanted = {"span": 2, "choice": 1, "regression": 1}.get(task.head, len(label_names))
    if label_names:
        config = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
        named = {int(key): str(value) for key, value in (config.get("id2label") or {}).items()}
        named = named or {number: f"LABEL_{number}" for number in range(outputs)}
        order = label_outputs(named, label_names, task=task.name)
    else:
        order = np.arange(wanted)
    if outputs != wanted:
        raise TaskError(f"{source.folder}: {name} has {outputs} outputs, task {task.name} needs {wanted}")
    per_token = task.head in ("span", "tagging")
    encoder = source.encoder()
    if not per_token and encoder.pooler is None and not inside:
        raise TaskError(f"{source.folder}: no pooler in the weights; the classifier was trained on one")
    model = TaskModel(encoder, outputs, per_token=per_token)
    model.classifier.load_state_dict(head)
    if inside and model.pooler is not None:
        model.pooler.load_state_dict(_layer(source.folder, tensors, "classifier.dense"))
    return model.eval(), order


def _read(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "model.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise TaskError(f"{path}: cannot be read ({error}); scoring as it is needs a safetensors file") from error


def _layer(folder: Path, tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    if f"{name}.weight" not in tensors:
        raise TaskError(
            f"{folder}: no {name}.weight; --evaluate-only takes a fine-tuned BERT, leave it out to fine-tune this folder"
        )
    return {part: tensors[f"{name}.{part}"].float() for part in ("weight", "bias")}
