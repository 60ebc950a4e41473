"""Tasks times seeds: fine-tune, score, write the result; what is finished is not repeated."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.choice_readers import read_choices
from eval.labels import far_below_chance
from eval.metrics import METRICS, Score, baseline, compute
from eval.readers import Examples, ReadError, read_split
from eval.results import SCHEMA, read_result, result_path, scores_as_json, write_result, write_summary
from eval.tasks import TASKS, Recipe, Task, TaskError

if TYPE_CHECKING:
    from eval.problems import Problem
    from eval.source import ModelSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one command asks for.

    Attributes:
        data, output: folders.
        seeds: number of seeds, counted from `first_seed`.
        max_train_examples: train on this many, drawn once for all seeds; 0: all.
        overrides: recipe fields that replace the task's own.
        device: "cpu", "cuda", or "auto".
    """

    data: Path
    output: Path
    seeds: int = 1
    first_seed: int = 0
    max_train_examples: int = 0
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    device: str = "auto"

    def recipe(self, task: Task) -> Recipe:
        """The task's recipe with the command's changes."""
        return dataclasses.replace(task.recipe, **self.overrides)


@dataclass(kw_only=True)
class TaskData:
    """The files of a task, read.

    Attributes:
        train: what is trained on (perhaps a subset, perhaps another task's file).
        scored: the labelled splits, by name.
    """

    task: Task
    train: Examples
    scored: dict[str, Examples]

    @property
    def sha256(self) -> dict[str, str]:
        """Hash of each file's bytes."""
        return {"train": self.train.sha256, **{name: examples.sha256 for name, examples in self.scored.items()}}


def read_task(task: Task, plan: Plan) -> TaskData:
    """Training and scored examples of a task.

    Raises:
        ReadError: a file is missing or not usable.
        TaskError: the training task has other labels.
    """
    source = TASKS[task.train_task] if task.train_task else task
    read = read_choices if task.head == "choice" else read_split
    train = read(plan.data, source, "train")
    scored = {name: read(plan.data, task, name) for name in task.dev_splits}
    unlabelled = [name for name, examples in {"train": train, **scored}.items() if examples.labels is None]
    if unlabelled:
        raise ReadError(f"task {task.name}: no labels in {', '.join(unlabelled)}; nothing to train on or to score")
    for name, examples in scored.items():
        if examples.label_names != train.label_names:
            raise TaskError(f"task {task.name}: {name} has labels {examples.label_names}, train {train.label_names}")
    if plan.max_train_examples and plan.max_train_examples < len(train):
        from data_pipeline.order import permutation

        train = train.take(np.sort(permutation(len(train), 0)[: plan.max_train_examples]))
    return TaskData(task=task, train=train, scored=scored)


def run_suite(source: ModelSource, tasks: Sequence[Task], plan: Plan) -> Path:
    """Run every (task, seed) that has no result yet, and write the summary; returns its path.

    Raises:
        ReadError, TaskError: a task that cannot be run as asked; all files are read before anything is trained.
    """
    data = [read_task(task, plan) for task in tasks]
    for task_data in data:
        _check_length(plan.recipe(task_data.task), source)
    for task_data in data:
        for seed in range(plan.first_seed, plan.first_seed + plan.seeds):
            _run_one(source, task_data, plan, seed)
    return write_summary(plan.output)


def _check_length(recipe: Recipe, source: ModelSource) -> None:
    if recipe.max_length > source.max_positions:
        raise TaskError(
            f"{source.folder}: the model has {source.max_positions} positions, the recipe asks for "
            f"{recipe.max_length}; pass --max-length {source.max_positions}"
        )


def _run_one(source: ModelSource, data: TaskData, plan: Plan, seed: int) -> None:
    task, recipe = data.task, plan.recipe(data.task)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "task": task.name,
        "task_version": task.version,
        "recipe": dataclasses.asdict(recipe),
        "seed": seed,
        "train_examples_limit": plan.max_train_examples,
        "data_sha256": data.sha256,
        "model": source.fingerprint,
        "tokenizer": source.tokenizer.fingerprint,
    }
    path = result_path(plan.output, result)
    finished = read_result(path)
    if finished is not None:
        print(f"{task.name} seed {seed}: {_headline_text(finished)} (finished before)")
        return
    from eval.finetune import finetune
    from eval.predict import predict

    start = time.perf_counter()
    trained = finetune(
        source.encoder(),
        build_problem(source, task, data.train, recipe),
        recipe,
        seed=seed,
        device=resolve_device(plan.device),
        label=f"{task.name} seed {seed}",
    )
    warnings: list[str] = []
    splits = {}
    for name, examples in data.scored.items():
        logits = predict(trained.model, build_problem(source, task, examples, recipe))
        splits[name] = _score_split(task, name, data.train, examples, logits, warnings)
        if trained.diverged_at is not None:
            undefined = Score(None, f"training diverged at step {trained.diverged_at}")
            splits[name]["metrics"] = scores_as_json({metric: undefined for metric in task.metrics})
    tail = trained.losses[-50:]
    result |= {
        "splits": splits,
        "headline": {"split": task.dev_splits[0], "metric": task.metrics[0]},
        "warnings": warnings,
        "model_folder": source.folder.name,
        "train_examples": len(data.train),
        "train_malformed": data.train.malformed,
        "steps": len(trained.losses),
        "final_loss": sum(tail) / len(tail) if all(map(math.isfinite, tail)) else None,
        "seconds": round(time.perf_counter() - start, 3),
        "train_seconds": round(trained.seconds, 3),
        "examples_per_second": round(trained.examples_per_second, 2),
        "tokens_per_second": round(trained.tokens_per_second, 1),
        **_provenance(),
    }
    write_result(plan.output, result)
    print(f"{task.name} seed {seed}: {_headline_text(result)}, {result['seconds']:.0f} s")
    for warning in warnings:
        print(f"{task.name} seed {seed}: warning: {warning}")


def build_problem(source: ModelSource, task: Task, examples: Examples, recipe: Recipe) -> Problem:
    """Encode the examples of a task for its head."""
    from eval.packing import encode_examples
    from eval.problems import ChoiceProblem, ClassProblem, RegressionProblem

    encoded = encode_examples(source.tokenizer, examples.texts_a, examples.texts_b, recipe.max_length)
    if task.head == "choice":
        return ChoiceProblem(encoded=encoded, labels=examples.labels, choices=examples.choices)
    if task.head == "regression":
        return RegressionProblem(encoded=encoded, labels=examples.labels)
    return ClassProblem(encoded=encoded, labels=examples.labels, outputs=len(examples.label_names))


def _score_split(
    task: Task, split: str, train: Examples, examples: Examples, logits: np.ndarray, warnings: list[str]
) -> dict[str, Any]:
    assert examples.labels is not None and train.labels is not None
    if task.head == "choice":
        logits = logits.reshape(len(examples), examples.choices)
    predicted = logits[:, 0].astype(np.float64) if task.head == "regression" else logits.argmax(1)
    if task.head != "regression":
        correct = int((predicted == examples.labels).sum())
        if far_below_chance(correct, len(examples), logits.shape[1]):
            warnings.append(f"{split}: {correct} of {len(examples)} right is far below chance; are labels swapped?")
    return {
        "n": len(examples),
        "malformed": examples.malformed,
        "metrics": scores_as_json(compute(task.metrics, examples.labels, predicted)),
        "baseline": scores_as_json(baseline(task.metrics, train.labels, examples.labels)),
    }


def _headline_text(result: dict[str, Any]) -> str:
    parts = []
    for split, scores in result["splits"].items():
        for name in scores["metrics"]:
            score, base = scores["metrics"][name], scores["baseline"][name]
            value = f"{score['value']:.4f}" if score["value"] is not None else f"undefined ({score['undefined']})"
            beside = f" (baseline {base['value']:.4f})" if base["value"] is not None else ""
            parts.append(f"{split} {name} {value}{beside}")
    return ", ".join(parts)


def resolve_device(name: str) -> str:
    """ "auto" is a GPU where there is one."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _provenance() -> dict[str, Any]:
    from importlib.metadata import version

    from pretrain.run_folder import git_revision

    return {
        "git_revision": git_revision(),
        "versions": {name: version(name) for name in ("torch", "numpy", "scikit-learn", "scipy")},
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


assert set(METRICS) >= {metric for task in TASKS.values() for metric in task.metrics}
