"""What one evaluation command asks for: tasks x settings x seeds, and which part of them this process takes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.tasks import Recipe, Task, TaskError

PAPER = "paper"
"""In place of a grid: the learning rates that the task's row names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one command asks for.

    Attributes:
        data, output: folders.
        seeds: number of seeds, counted from `first_seed`.
        max_train_examples: train on this many, drawn once for all seeds; 0: all.
        overrides: recipe fields that replace the task's own.
        grid: recipe field -> values to try, all combinations; or `PAPER`; empty: one setting.
        start_task: fine-tune on this task first and start the others from there; empty: from the checkpoint.
        predictions: also write prediction files (unlabelled test splits, SQuAD's answers).
        save_models: also write each fine-tuned model as a Hugging Face folder.
        precision: "fp32", or "bf16": matrix products in bfloat16, weights and optimizer in fp32.
        part, parts: this process takes every `parts`-th run from number `part` on.
        device: "cpu", "cuda", or "auto".
    """

    data: Path
    output: Path
    seeds: int = 1
    first_seed: int = 0
    max_train_examples: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] | str = field(default_factory=dict)
    start_task: str = ""
    predictions: bool = False
    save_models: bool = False
    precision: str = "fp32"
    part: int = 0
    parts: int = 1
    device: str = "auto"

    def recipe(self, task: Task) -> Recipe:
        """The task's recipe with the command's changes."""
        return dataclasses.replace(task.recipe, **self.overrides)

    def recipes(self, task: Task) -> list[Recipe]:
        """Every setting of the grid, or the one recipe."""
        axes = {"learning_rate": task.grid} if isinstance(self.grid, str) else dict(self.grid)
        return [
            dataclasses.replace(self.recipe(task), **dict(zip(axes, values, strict=True)))
            for values in itertools.product(*axes.values())
        ]

    def runs(self, tasks: Sequence[Task]) -> list[tuple[Task, Recipe, int]]:
        """(task, recipe, seed) of this part, task by task."""
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        every = [(task, recipe, seed) for task in tasks for recipe in self.recipes(task) for seed in seeds]
        return every[self.part :: self.parts]


def parse_grid(words: Sequence[str] | None) -> Mapping[str, Sequence[Any]] | str:
    """`--grid` without anything is the paper's; else KEY=VALUE,VALUE for each recipe field to vary.

    Raises:
        TaskError: a word without values, an unknown key, or a value that is no number.
    """
    if words is None:
        return {}
    if not words:
        return PAPER
    kinds = {name: type(value) for name, value in dataclasses.asdict(Recipe()).items()}
    grid: dict[str, list[Any]] = {}
    for word in words:
        key, _, values = word.partition("=")
        if key not in kinds or not values:
            raise TaskError(f"--grid {word!r}: expected KEY=VALUE,VALUE with KEY one of {', '.join(kinds)}")
        try:
            grid[key] = [kinds[key](value) for value in values.split(",")]
        except ValueError as error:
            raise TaskError(f"--grid {word!r}: {key} takes {kinds[key].__name__} values ({error})") from error
    return grid


def parse_part(text: str) -> tuple[int, int]:
    """`K/N`: part K of N, counted from 0.

    Raises:
        TaskError: another form, or K out of range.
    """
    part, slash, parts = text.partition("/")
    if not (slash and part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise TaskError(f"--part {text!r}: expected K/N with K from 0 to N-1")
    return int(part), int(parts)
