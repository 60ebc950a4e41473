"""Which output of a classifier is which label: matched by name, never by position (R35)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from eval.tasks import TaskError

_UNNAMED = re.compile(r"LABEL_\d+")


def label_outputs(id2label: Mapping[int, str], names: Sequence[str], *, task: str) -> np.ndarray:
    """For each label of the task, in the task's order, the output of the classifier that stands for it.

    Names are compared without case, with `-`, `_` and blanks alike. Outputs that a model leaves unnamed (`LABEL_0`,
    `LABEL_1`, ...: the default of Hugging Face configurations) follow the order of the task's row.

    Raises:
        TaskError: another number of outputs than labels, or names that do not match.
    """
    outputs = [id2label[number] for number in sorted(id2label)]
    if len(outputs) != len(names):
        raise TaskError(f"task {task} has {len(names)} labels {list(names)}, the model has {len(outputs)}: {outputs}")
    if all(_UNNAMED.fullmatch(name) for name in outputs):
        return np.arange(len(names))
    position = {_plain(name): number for number, name in enumerate(outputs)}
    missing = [name for name in names if _plain(name) not in position]
    if missing or len(position) != len(outputs):
        raise TaskError(f"task {task} needs the labels {list(names)}, the model's are named {outputs}")
    return np.array([position[_plain(name)] for name in names])


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()


def far_below_chance(correct: int, examples: int, classes: int) -> bool:
    """Whether an accuracy is lower than guessing by more than three standard errors: labels are probably swapped."""
    chance = 1 / classes
    error = (chance * (1 - chance) / examples) ** 0.5
    return correct / examples < chance - 3 * error
