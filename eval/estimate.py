"""How long a run will take: a few real training steps on a sample, scaled up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eval.finetune import finetune
from eval.source import ModelSource
from eval.task_data import TaskData, build_problem
from eval.tasks import Recipe

STEPS = 3
SAMPLE = 400
"""Questions or sentences that are cut into windows or rows to see how many of them a file has."""
FORWARD_SHARE = 1 / 3
"""Cost of predicting an example beside training on it: forward alone, against forward and twice as much backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a dry run says of one run.

    Attributes:
        units: what a batch counts: examples, or windows of a span task.
        exact: whether the units were counted; else they are scaled up from a sample.
        seconds: of training and scoring on this machine, as loaded as it is now; tokenizing and reading are left out.
    """

    units: int
    exact: bool
    seconds: float


def estimate_run(source: ModelSource, data: TaskData, recipe: Recipe, device: str) -> Estimate:
    """Train a few steps on a sample drawn evenly from the training file."""
    examples = len(data.train)
    counted = data.task.head not in ("span", "tagging")
    few = (STEPS + 1) * recipe.batch_size
    # Sentences share a row with their neighbours, so a sample of them is a piece of the file.
    tagging = data.task.head == "tagging"
    rows = np.arange(min(SAMPLE, examples)) if tagging else _evenly(examples, few if counted else SAMPLE)
    sample = data.train.take(rows)
    problem = build_problem(source.tokenizer, data.task, sample, recipe)
    trained = finetune(
        source.encoder(), problem, recipe, seed=0, device=device, features=data.task.features, max_steps=STEPS + 1
    )
    per_example = 1.0 if counted else len(problem) / len(sample)
    units = round(examples * per_example)
    scored = sum(len(part) for part in data.scored.values()) * per_example
    seconds = (units * recipe.epochs + FORWARD_SHARE * scored) / trained.examples_per_second
    # A frozen encoder sees each example once.
    seconds += trained.frozen_seconds * (units + scored) / len(problem)
    return Estimate(units=units, exact=counted or len(sample) == examples, seconds=seconds)


def _evenly(examples: int, count: int) -> np.ndarray:
    """At most `count` rows, spread over all of them."""
    return np.linspace(0, examples - 1, min(count, examples)).astype(np.int64)


def in_words(seconds: float) -> str:
    """Two digits are all that an estimate has: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
