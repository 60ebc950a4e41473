"""What a task is made of: its files, its head, its metrics and how it is fine-tuned. The rows are in `eval/tasks.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

HeadKind = Literal["classification", "regression", "span", "choice", "tagging"]


class TaskError(ValueError):
    """A task that cannot be run as asked; the message says what was expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a task is fine-tuned.

    Attributes:
        batch_size: examples per optimizer step.
        learning_rate: peak of the linear schedule.
        epochs: passes over the training examples.
        max_length: tokens per example, specials included; longer ones are truncated (span tasks: windows).
        warmup: share of all steps in which the rate rises linearly.
        weight_decay: AdamW's, on weight matrices only.
        clip: largest global gradient norm.
        stride: span tasks only: tokens by which two windows of one document overlap.
    """

    batch_size: int = 32
    learning_rate: float = 3e-5
    epochs: int = 3
    max_length: int = 128
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    stride: int = 128

    def __post_init__(self) -> None:
        for name in ("batch_size", "learning_rate", "epochs", "max_length", "clip"):
            if getattr(self, name) <= 0:
                raise TaskError(f"recipe: {name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.warmup < 1:
            raise TaskError(f"recipe: warmup is a share of the steps in [0, 1), got {self.warmup}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """One file of a task.

    Attributes:
        file: name below the task's folder; `NAME.gz` is accepted too.
        columns: names for a file without header; empty: the first row is the header.
        renamed: the task's column name -> this file's, where they differ.
        labelled: False for official test files.
        extra_columns: rows may have more fields than `columns` (ignored).
        other_names: names under which the same examples go around.
    """

    file: str
    columns: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    labelled: bool = True
    extra_columns: bool = False
    other_names: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """All accepted names, the official one first."""
        return (self.file, *self.other_names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One row.

    Attributes:
        name: as given on the command line.
        folder: below the data folder.
        splits: by name; `train` is trained on, every one in `dev_splits` is scored.
        text_columns: one or two columns (or keys) with the text.
        label_column: the gold label or score.
        labels: label names in the order of their ids: the one documented order, used where a model names none.
        label_values: the same labels as the files spell them; empty: as `labels`.
        labels_file: a file in the task's folder with one label name a line, for tasks whose labels depend on the data.
        metrics: the first one is the headline.
        grid: learning rates that the paper searched on the dev set.
        train_task: the task whose training set is used, where this one has none.
        features: feature-based: the hidden states that feed a BiLSTM while the encoder stays frozen; empty: fine-tuned.
        version: raised whenever scores stop being comparable.
        about: one line for the help text.
    """

    name: str
    folder: str
    head: HeadKind
    splits: Mapping[str, Split]
    text_columns: tuple[str, ...]
    label_column: str
    metrics: tuple[str, ...]
    dev_splits: tuple[str, ...] = ("dev",)
    labels: tuple[str, ...] = ()
    label_values: tuple[str, ...] = ()
    labels_file: str = ""
    reader: Literal["tsv", "squad", "swag", "conll", "arc"] = "tsv"
    recipe: Recipe = Recipe()
    grid: tuple[float, ...] = (5e-5, 4e-5, 3e-5, 2e-5)
    train_task: str = ""
    features: str = ""
    version: int = 1
    about: str = ""

    def __post_init__(self) -> None:
        if self.label_values and len(self.label_values) != len(self.labels):
            raise TaskError(f"task {self.name}: {len(self.labels)} labels but {len(self.label_values)} label_values")
        missing = [name for name in self.dev_splits if name not in self.splits]
        if missing:
            raise TaskError(f"task {self.name}: dev_splits {missing} are no splits; known: {sorted(self.splits)}")
