"""How long a run will take: a few real training steps on a sample, scaled up."""

from __future__ import annotations

import numpy as np

from eval.finetune import finetune
from eval.source import ModelSource
from eval.task_data import TaskData, build_problem
from eval.tasks import Recipe

STEPS = 3
FORWARD_SHARE = 1 / 3
"""Cost of predicting an example beside training on it: forward alone, against forward and twice as much backward."""


def estimate_seconds(source: ModelSource, data: TaskData, recipe: Recipe, device: str) -> float:
    """Seconds of one run on this machine, as loaded as it is now; tokenizing and reading are left out."""
    units = min(len(data.train), (STEPS + 1) * recipe.batch_size)
    rows = np.linspace(0, len(data.train) - 1, units).astype(np.int64)
    sample = build_problem(source.tokenizer, data.task, data.train.take(rows), recipe)
    trained = finetune(
        source.encoder(), sample, recipe, seed=0, device=device, features=data.task.features, max_steps=STEPS + 1
    )
    per_unit = 1 / trained.examples_per_second * len(sample) / units
    scored = sum(len(examples) for examples in data.scored.values())
    return per_unit * (len(data.train) * recipe.epochs + FORWARD_SHARE * scored)


def in_words(seconds: float) -> str:
    """Two digits are all that an estimate has: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
