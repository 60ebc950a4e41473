"""Tasks x settings x seeds: fine-tune, score, write the result; what is finished is not repeated."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.metrics import Score
from eval.plan import Plan
from eval.readers import ReadError
from eval.results import SCHEMA, read_result, result_path, scores_as_json, write_result, write_summary
from eval.submission import predictions_folder, write_predictions
from eval.task_data import TaskData, build_problem, label_names, read_examples, read_task, score_split
from eval.tasks import Recipe, Task, TaskError, select_tasks

if TYPE_CHECKING:
    from eval.source import ModelSource
    from pretrain.encoder import Encoder


def run_suite(source: ModelSource, tasks: Sequence[Task], plan: Plan, *, evaluate_only: bool = False) -> Path:
    """Run every (task, setting, seed) that has no result yet, and write the summary; returns its path.

    Args:
        source: the checkpoint.
        tasks: rows.
        plan: what is asked for.
        evaluate_only: the checkpoint is fine-tuned already: score it as it is.

    Raises:
        ReadError, TaskError: a task that cannot be run as asked; all files are read before anything is trained.
    """
    from eval.saved_model import check_savable

    suite = _Suite(source, plan, tasks)
    data = {task.name: read_task(task, plan.data, plan.max_train_examples) for task in tasks}
    for task in tasks:
        for recipe in plan.recipes(task):
            _check_length(recipe, source)
        if plan.save_models:
            check_savable(source, task)
    with suite.autocast():
        if evaluate_only:
            for task in tasks[plan.part :: plan.parts]:
                suite.score_as_it_is(data[task.name], plan.recipe(task))
        else:
            for task, recipe, seed in plan.runs(tasks):
                suite.run(data[task.name], recipe, seed)
    return write_summary(plan.output)


def _check_length(recipe: Recipe, source: ModelSource) -> None:
    if recipe.max_length > source.max_positions:
        raise TaskError(
            f"{source.folder}: the model has {source.max_positions} positions, the recipe asks for "
            f"{recipe.max_length}; pass --max-length {source.max_positions}"
        )


class _Suite:
    """One checkpoint and one plan; keeps the encoder that was fine-tuned on the start task, for one seed."""

    def __init__(self, source: ModelSource, plan: Plan, tasks: Sequence[Task]) -> None:
        from eval.frozen_states import FrozenStates

        self.source, self.plan = source, plan
        self.device = resolve_device(plan.device)
        self.start = read_task(select_tasks([plan.start_task])[0], plan.data) if plan.start_task else None
        self.started: tuple[int, Encoder] | None = None
        self.frozen = FrozenStates(task.features for task in tasks if task.features)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Under which models compute. Nothing is kept from one step to the next: weights change in between."""
        import torch

        kind = torch.device(self.device).type
        return torch.autocast(kind, torch.bfloat16, enabled=self.plan.precision == "bf16", cache_enabled=False)

    def run(self, data: TaskData, recipe: Recipe, seed: int) -> None:
        """Fine-tune, score and write one result, unless it is there."""
        from eval.finetune import finetune
        from eval.saved_model import model_folder, save_fine_tuned

        label = f"{data.task.name} seed {seed}"
        if self.plan.grid:
            label += f" rate {recipe.learning_rate:g} batch {recipe.batch_size} epochs {recipe.epochs}"
        result = self._identity(data, recipe, seed)
        if self._finished(result, label):
            return
        start = time.perf_counter()
        trained = finetune(
            self._encoder(data.task, seed),
            build_problem(self.source.tokenizer, data.task, data.train, recipe),
            recipe,
            seed=seed,
            device=self.device,
            label=label,
            features=data.task.features,
            frozen=self.frozen,
        )
        result |= self._scores(data, recipe, trained.model, result, None)
        if self.plan.save_models:
            save_fine_tuned(
                trained.model, self.source, data.task, label_names(data), model_folder(self.plan.output, result)
            )
        if trained.diverged_at is not None:
            undefined = Score(None, f"training diverged at step {trained.diverged_at}")
            for scores in result["splits"].values():
                scores["metrics"] = scores_as_json({metric: undefined for metric in data.task.metrics})
        tail = trained.losses[-50:]
        result |= {
            "steps": len(trained.losses),
            "final_loss": sum(tail) / len(tail) if all(map(math.isfinite, tail)) else None,
            "seconds": round(time.perf_counter() - start, 3),
            "train_seconds": round(trained.seconds, 3),
            "examples_per_second": round(trained.examples_per_second, 2),
            "tokens_per_second": round(trained.tokens_per_second, 1),
        }
        self._write(result, label)

    def score_as_it_is(self, data: TaskData, recipe: Recipe) -> None:
        """Score a checkpoint that carries the task's classifier; nothing is trained."""
        from eval.fine_tuned import load_fine_tuned

        result = self._identity(data, recipe, 0) | {"recipe": {"evaluate_only": True, "max_length": recipe.max_length}}
        if self._finished(result, data.task.name):
            return
        start = time.perf_counter()
        model, order = load_fine_tuned(self.source, data.task, label_names(data))
        result |= self._scores(data, recipe, model.to(self.device), result, order)
        self._write(result | {"seconds": round(time.perf_counter() - start, 3)}, data.task.name)

    def _identity(self, data: TaskData, recipe: Recipe, seed: int) -> dict[str, Any]:
        result = {
            "schema": SCHEMA,
            "task": data.task.name,
            "task_version": data.task.version,
            "recipe": dataclasses.asdict(recipe),
            "seed": seed,
            "train_examples_limit": self.plan.max_train_examples,
            "data_sha256": data.sha256,
            "model": self.source.fingerprint,
            "tokenizer": self.source.tokenizer.fingerprint,
        }
        if self.source.bilstm:
            result["bilstm"] = self.source.bilstm
        if self.plan.precision != "fp32":
            result["precision"] = self.plan.precision
        if self.start is not None and self.start.task != data.task:
            result["start"] = {
                "task": self.start.task.name,
                "recipe": dataclasses.asdict(self.plan.recipe(self.start.task)),
                "data_sha256": self.start.train.sha256,
            }
        return result

    def _finished(self, result: dict[str, Any], label: str) -> bool:
        from eval.saved_model import model_folder

        finished = read_result(result_path(self.plan.output, result))
        wanted = [predictions_folder(self.plan.output, result)] if self.plan.predictions else []
        wanted += [model_folder(self.plan.output, result)] if self.plan.save_models else []
        if finished is None or not all(folder.is_dir() for folder in wanted):
            return False
        print(f"{label}: {_headline_text(finished)} (finished before)")
        return True

    def _encoder(self, task: Task, seed: int) -> Encoder:
        """A fresh copy of the checkpoint's encoder, or of the one fine-tuned on the start task with this seed."""
        from eval.finetune import finetune

        if self.start is None or self.start.task == task:
            return self.source.encoder(seed)
        if self.started is None or self.started[0] != seed:
            first, recipe = self.start.task, self.plan.recipe(self.start.task)
            problem = build_problem(self.source.tokenizer, first, self.start.train, recipe)
            label = f"{first.name} seed {seed} as a start"
            trained = finetune(self.source.encoder(seed), problem, recipe, seed=seed, device=self.device, label=label)
            self.started = seed, trained.model.encoder.cpu()
        return copy.deepcopy(self.started[1])

    def _scores(self, data: TaskData, recipe: Recipe, model: Any, result: dict[str, Any], order: Any) -> dict[str, Any]:
        """Scores of every labelled split; prediction files where they are asked for."""
        from eval.predict import predict

        task, splits = data.task, {}
        warnings: list[str] = []
        folder = predictions_folder(self.plan.output, result)
        for name, examples in data.scored.items():
            problem = build_problem(self.source.tokenizer, task, examples, recipe)
            logits = predict(model, problem)
            logits = logits if order is None else logits[:, order]
            splits[name] = score_split(data, name, problem, logits, warnings)
            if self.plan.predictions:
                write_predictions(folder, task, name, examples, problem, logits)
        for name in [name for name, split in task.splits.items() if self.plan.predictions and not split.labelled]:
            try:
                examples = read_examples(self.plan.data, task, name)
            except ReadError as error:
                warnings.append(f"{name}: no predictions ({error})")
                continue
            problem = build_problem(self.source.tokenizer, task, examples, recipe)
            logits = predict(model, problem)
            logits = logits if order is None else logits[:, order]
            write_predictions(folder, task, name, examples, problem, logits)
        return {
            "splits": splits,
            "headline": {"split": task.dev_splits[0], "metric": task.metrics[0]},
            "warnings": warnings,
            "model_folder": self.source.folder.name,
            "train_examples": len(data.train),
            "train_malformed": data.train.malformed,
            **_provenance(),
        }

    def _write(self, result: dict[str, Any], label: str) -> None:
        write_result(self.plan.output, result)
        print(f"{label}: {_headline_text(result)}, {result['seconds']:.0f} s")
        for warning in result["warnings"]:
            print(f"{label}: warning: {warning}")


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
