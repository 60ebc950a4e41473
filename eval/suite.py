"""Tasks times seeds: fine-tune, score, write the result; what is finished is not repeated."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.metrics import Score
from eval.results import SCHEMA, read_result, result_path, scores_as_json, write_result, write_summary
from eval.task_data import TaskData, build_problem, read_task, score_split
from eval.tasks import Recipe, Task, TaskError

if TYPE_CHECKING:
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


def run_suite(source: ModelSource, tasks: Sequence[Task], plan: Plan) -> Path:
    """Run every (task, seed) that has no result yet, and write the summary; returns its path.

    Raises:
        ReadError, TaskError: a task that cannot be run as asked; all files are read before anything is trained.
    """
    data = [read_task(task, plan.data, plan.max_train_examples) for task in tasks]
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
        build_problem(source.tokenizer, task, data.train, recipe),
        recipe,
        seed=seed,
        device=resolve_device(plan.device),
        label=f"{task.name} seed {seed}",
        features=task.features,
    )
    warnings: list[str] = []
    splits = {}
    for name, examples in data.scored.items():
        problem = build_problem(source.tokenizer, task, examples, recipe)
        splits[name] = score_split(data, name, problem, predict(trained.model, problem), warnings)
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
