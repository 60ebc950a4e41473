"""A fine-tuned model as a Hugging Face folder: `AutoModelForSequenceClassification`, `...TokenClassification`,
`...QuestionAnswering` or `...MultipleChoice` load it with the same logits."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from data_pipeline.artefacts import write_text
from eval.feature_model import FeatureModel
from eval.model import TaskModel
from eval.results import result_path
from eval.source import ModelSource
from eval.tasks import Task, TaskError
from pretrain.hf_config import InterchangeError, to_hf_config
from pretrain.name_map import to_hf_tensors

_KINDS = {
    "classification": "ForSequenceClassification",
    "regression": "ForSequenceClassification",
    "span": "ForQuestionAnswering",
    "choice": "ForMultipleChoice",
    "tagging": "ForTokenClassification",
}
_FAMILIES = {"bert": "Bert", "roberta": "Roberta", "albert": "Albert", "distilbert": "DistilBert"}


def model_folder(output: Path, result: Mapping[str, Any]) -> Path:
    """Where the model of a run is saved."""
    path = result_path(output, result)
    return path.with_name(f"{path.stem}.model")


def check_savable(source: ModelSource, task: Task) -> None:
    """Raises TaskError where Hugging Face has no class for what fine-tuning makes of this model; before anything is trained."""
    config = source.encoder().config
    per_token = task.head in ("span", "tagging")
    reason = ""
    if task.features:
        reason = "a BiLSTM on frozen states has no class there"
    elif config.architecture not in _FAMILIES:
        reason = f"{config.architecture} models have another head there"
    elif config.architecture == "distilbert" and not per_token:
        reason = "DistilBERT's head there has ReLU in place of tanh"
    elif config.causal and not per_token:
        reason = "a left-to-right encoder is read at its last token here, at its first there"
    else:
        try:
            to_hf_config(config)
        except InterchangeError as error:
            reason = str(error)
    if reason:
        raise TaskError(f"--save-models: {task.name} with {source.folder} cannot be saved for Hugging Face: {reason}")


def save_fine_tuned(
    model: TaskModel | FeatureModel, source: ModelSource, task: Task, label_names: Sequence[str], folder: Path
) -> None:
    """Write the folder, tokenizer included, under its name only when it is whole.

    Args:
        model: fine-tuned.
        source: what it was made from.
        task: its head.
        label_names: in the order of the outputs; empty for spans, choices and regression.
        folder: replaced where it exists.

    Raises:
        TaskError: as `check_savable`.
    """
    check_savable(source, task)
    assert isinstance(model, TaskModel)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        source.tokenizer.save(temporary)
        write_text(temporary / "config.json", json.dumps(_config(model, source, task, label_names), indent=2) + "\n")
        save_file(_tensors(model, task), temporary / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _config(model: TaskModel, source: ModelSource, task: Task, label_names: Sequence[str]) -> dict[str, Any]:
    config, tokenizer = model.encoder.config, source.tokenizer
    ids = {"pad_id": tokenizer.pad_id, "cls_id": tokenizer.cls_id, "sep_id": tokenizer.sep_id}
    names = list(label_names) or [f"LABEL_{number}" for number in range(model.outputs)]
    content = to_hf_config(config, ids) | {
        "architectures": [_FAMILIES[config.architecture] + _KINDS[task.head]],
        "dtype": "float32",
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "finetuning_task": task.name,
    }
    if task.head in ("classification", "regression"):
        content["problem_type"] = "regression" if task.head == "regression" else "single_label_classification"
    return content


def _tensors(model: TaskModel, task: Task) -> dict[str, torch.Tensor]:
    config = model.encoder.config
    pooler = model.pooler if model.pooler is not None else model.encoder.pooler
    state = {f"encoder.{name}": tensor for name, tensor in model.encoder.state_dict().items()}
    state = {name: tensor for name, tensor in state.items() if not name.startswith("encoder.pooler.")}
    # RoBERTa's classifier has the dense layer inside.
    inside = config.architecture == "roberta" and _KINDS[task.head] == "ForSequenceClassification"
    if pooler is not None and not model.per_token and not inside:
        state |= {f"encoder.pooler.{name}": tensor for name, tensor in pooler.state_dict().items()}
    tensors = to_hf_tensors(state, config)
    head = "qa_outputs" if task.head == "span" else "classifier.out_proj" if inside else "classifier"
    tensors |= {f"{head}.{name}": tensor for name, tensor in model.classifier.state_dict().items()}
    if inside and pooler is not None:
        tensors |= {f"classifier.dense.{name}": tensor for name, tensor in pooler.state_dict().items()}
    return {name: tensor.detach().cpu().float().contiguous() for name, tensor in tensors.items()}
