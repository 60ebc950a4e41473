"""Evaluation tasks as data: one row per task. Adding a task is adding a row and, at most, a reader.

File and column names are those of the official releases (https://gluebenchmark.com/tasks); recipes are the BERT paper's
(arXiv 1810.04805, sections 4.1 to 4.4 and appendix A.3). Nothing here imports torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
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
    """

    file: str
    columns: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    labelled: bool = True
    extra_columns: bool = False


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
    version: int = 1
    about: str = ""

    def __post_init__(self) -> None:
        if self.label_values and len(self.label_values) != len(self.labels):
            raise TaskError(f"task {self.name}: {len(self.labels)} labels but {len(self.label_values)} label_values")
        missing = [name for name in self.dev_splits if name not in self.splits]
        if missing:
            raise TaskError(f"task {self.name}: dev_splits {missing} are no splits; known: {sorted(self.splits)}")


def _tsv(train: str = "train.tsv", dev: str = "dev.tsv", test: str = "test.tsv") -> dict[str, Split]:
    return {"train": Split(file=train), "dev": Split(file=dev), "test": Split(file=test, labelled=False)}


_PAIR = ("sentence1", "sentence2")
_COLA_COLUMNS = ("source", "label", "star", "sentence")
_QQP_COLUMNS = ("id", "qid1", "qid2", "question1", "question2", "is_duplicate")
_STS_COLUMNS = ("genre", "filename", "year", "old_index", "score", "sentence1", "sentence2")
_NLI = ("entailment", "neutral", "contradiction")

_ROWS = (
    Task(
        name="CoLA",
        folder="CoLA",
        head="classification",
        splits={
            "train": Split(file="train.tsv", columns=_COLA_COLUMNS),
            "dev": Split(file="dev.tsv", columns=_COLA_COLUMNS),
            "test": Split(file="test.tsv", labelled=False),
        },
        text_columns=("sentence",),
        label_column="label",
        labels=("unacceptable", "acceptable"),
        label_values=("0", "1"),
        metrics=("mcc", "accuracy"),
        about="is the sentence acceptable English",
    ),
    Task(
        name="SST-2",
        folder="SST-2",
        head="classification",
        splits=_tsv(),
        text_columns=("sentence",),
        label_column="label",
        labels=("negative", "positive"),
        label_values=("0", "1"),
        metrics=("accuracy",),
        about="sentiment of a film review sentence",
    ),
    Task(
        name="MRPC",
        folder="MRPC",
        head="classification",
        splits=_tsv(),
        text_columns=("#1 String", "#2 String"),
        label_column="Quality",
        labels=("not_equivalent", "equivalent"),
        label_values=("0", "1"),
        metrics=("f1", "accuracy"),
        about="do two news sentences say the same",
    ),
    Task(
        name="STS-B",
        folder="STS-B",
        head="regression",
        splits={
            **_tsv(),
            "test_gold": Split(file="original/sts-test.tsv", columns=_STS_COLUMNS, extra_columns=True),
        },
        text_columns=_PAIR,
        label_column="score",
        metrics=("pearson", "spearman"),
        about="similarity of two sentences, 0 to 5",
    ),
    Task(
        name="QQP",
        folder="QQP",
        head="classification",
        splits={**_tsv(), "dev_part": Split(file="dev.part.noheader.tsv", columns=_QQP_COLUMNS)},
        text_columns=("question1", "question2"),
        label_column="is_duplicate",
        labels=("not_duplicate", "duplicate"),
        label_values=("0", "1"),
        metrics=("f1", "accuracy"),
        about="are two questions the same",
    ),
    Task(
        name="MNLI",
        folder="MNLI",
        head="classification",
        splits={
            "train": Split(file="train.tsv"),
            "dev_matched": Split(file="dev_matched.tsv"),
            "dev_mismatched": Split(file="dev_mismatched.tsv"),
            "test_matched": Split(file="test_matched.tsv", labelled=False),
            "test_mismatched": Split(file="test_mismatched.tsv", labelled=False),
        },
        dev_splits=("dev_matched", "dev_mismatched"),
        text_columns=_PAIR,
        label_column="gold_label",
        labels=_NLI,
        metrics=("accuracy",),
        about="does the premise entail the hypothesis (3 classes); matched and mismatched genres",
    ),
    Task(
        name="QNLI",
        folder="QNLI",
        head="classification",
        splits=_tsv(),
        text_columns=("question", "sentence"),
        label_column="label",
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        about="does the sentence answer the question (v2)",
    ),
    Task(
        name="RTE",
        folder="RTE",
        head="classification",
        splits=_tsv(),
        text_columns=_PAIR,
        label_column="label",
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        about="does the text entail the hypothesis",
    ),
    Task(
        name="WNLI",
        folder="WNLI",
        head="classification",
        splits=_tsv(),
        text_columns=_PAIR,
        label_column="label",
        labels=("not_entailment", "entailment"),
        label_values=("0", "1"),
        metrics=("accuracy",),
        about="pronoun resolution as entailment; train and dev disagree on purpose, the paper leaves it out",
    ),
    Task(
        name="diagnostic",
        folder="diagnostic",
        head="classification",
        splits={
            "dev": Split(
                file="diagnostic-full.tsv",
                renamed={"sentence1": "Premise", "sentence2": "Hypothesis", "label": "Label"},
            ),
            "test": Split(file="diagnostic.tsv", labelled=False),
        },
        text_columns=_PAIR,
        label_column="label",
        labels=_NLI,
        metrics=("mcc", "accuracy"),
        train_task="MNLI",
        about="GLUE's hand-made entailment cases, scored by a model fine-tuned on MNLI",
    ),
    Task(
        name="SICK-E",
        folder="sick",
        head="classification",
        splits={
            "train": Split(file="SICK_train.txt"),
            "dev": Split(file="SICK_trial.txt"),
            "test": Split(file="SICK_test_annotated.txt"),
        },
        dev_splits=("dev", "test"),
        text_columns=("sentence_A", "sentence_B"),
        label_column="entailment_judgment",
        labels=_NLI,
        label_values=("ENTAILMENT", "NEUTRAL", "CONTRADICTION"),
        metrics=("accuracy",),
        about="three-way entailment of image captions",
    ),
    Task(
        name="SICK-R",
        folder="sick",
        head="regression",
        splits={
            "train": Split(file="SICK_train.txt"),
            "dev": Split(file="SICK_trial.txt"),
            "test": Split(file="SICK_test_annotated.txt"),
        },
        dev_splits=("dev", "test"),
        text_columns=("sentence_A", "sentence_B"),
        label_column="relatedness_score",
        metrics=("pearson", "spearman"),
        about="relatedness of image captions, 1 to 5",
    ),
    Task(
        name="SWAG",
        folder="swag",
        head="choice",
        reader="swag",
        splits={
            "train": Split(file="train.csv"),
            "dev": Split(file="val.csv"),
            "test": Split(file="test.csv", labelled=False),
        },
        text_columns=("sent1", "sent2"),
        label_column="label",
        metrics=("accuracy",),
        recipe=Recipe(batch_size=16, learning_rate=2e-5),
        about="which of four endings follows",
    ),
    Task(
        name="ARC-easy",
        folder="arc",
        head="choice",
        reader="arc",
        splits={"dev": Split(file="arc_easy.jsonl"), "train": Split(file="arc_challenge.jsonl")},
        text_columns=("query", "choices"),
        label_column="gold",
        metrics=("accuracy",),
        recipe=Recipe(batch_size=16, learning_rate=2e-5),
        about="school science questions with four answers, trained on the challenge set",
    ),
    Task(
        name="package",
        folder="package",
        head="classification",
        splits={"train": Split(file="train.tsv"), "dev": Split(file="dev.tsv")},
        text_columns=("sentence",),
        label_column="label",
        labels_file="labels.txt",
        metrics=("accuracy",),
        recipe=Recipe(batch_size=32, learning_rate=5e-4, epochs=3, max_length=64),
        grid=(1e-3, 5e-4, 2e-4),
        about="the demo's own task: which Python package a documentation paragraph is from (eval.embedded_task)",
    ),
)

TASKS: Mapping[str, Task] = {task.name: task for task in _ROWS}
"""All tasks by name."""

GLUE = ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE", "WNLI")
"""The nine tasks of GLUE, in the order of its leaderboard."""


def select_tasks(names: Sequence[str]) -> list[Task]:
    """Tasks by name, ignoring case; `glue` stands for all nine. Commas separate names too.

    Raises:
        TaskError: an unknown name; the nearest one is named. Or no name at all.
    """
    known = {name.lower(): name for name in TASKS}
    chosen: dict[str, Task] = {}
    for word in (part.strip() for name in names for part in name.split(",")):
        if word.lower() == "glue":
            chosen.update({name: TASKS[name] for name in GLUE})
        elif word.lower() in known:
            chosen[known[word.lower()]] = TASKS[known[word.lower()]]
        elif word:
            near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.4)
            hint = f"did you mean {known[near[0]]!r}? " if near else ""
            raise TaskError(f"unknown task {word!r}; {hint}known: glue, {', '.join(TASKS)}")
    if not chosen:
        raise TaskError(f"no task named; known: glue, {', '.join(TASKS)}")
    return list(chosen.values())
