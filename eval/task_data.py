"""The examples of a task, from its files to its scores: where the kinds of heads differ, they differ here.

Legend: `E` rows, `N` ids of all rows, `K` outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.choice_readers import read_choices
from eval.conll_data import Sentences, baseline_tags, read_conll, score_tags
from eval.labels import far_below_chance
from eval.metrics import METRICS, baseline, compute
from eval.readers import Examples, ReadError, find_file, read_split
from eval.results import scores_as_json
from eval.squad_data import SquadData, read_squad
from eval.tasks import TASKS, Recipe, Task, TaskError

if TYPE_CHECKING:
    from data_pipeline.tokenizer import Tokenizer
    from eval.problems import Problem

AnyExamples = Examples | SquadData | Sentences
"""What a reader gives. All have a length (units that are counted), `take(rows)`, `malformed` and `sha256`."""


@dataclass(kw_only=True)
class TaskData:
    """The files of a task, read.

    Attributes:
        train: what is trained on (perhaps a subset, perhaps another task's file).
        scored: the labelled splits, by name.
    """

    task: Task
    train: AnyExamples
    scored: dict[str, AnyExamples]

    @property
    def sha256(self) -> dict[str, str]:
        """Hash of each file's bytes."""
        return {"train": self.train.sha256, **{name: examples.sha256 for name, examples in self.scored.items()}}


def read_examples(data: Path, task: Task, split: str) -> AnyExamples:
    """One split, by the task's reader.

    Raises:
        ReadError: a file is missing or not usable.
    """
    if split not in task.splits:
        raise ReadError(f"task {task.name} has no split {split!r}; it has {sorted(task.splits)}")
    if task.reader == "squad":
        return read_squad(find_file(data, task, *task.splits[split].files))
    if task.reader == "conll":
        return read_conll(find_file(data, task, *task.splits[split].files), task.labels)
    if task.head == "choice":
        return read_choices(data, task, split)
    return read_split(data, task, split)


def label_names(data: TaskData) -> tuple[str, ...]:
    """The task's labels in the order of their ids; none for spans, choices and regression."""
    return () if isinstance(data.train, SquadData) or data.task.head == "choice" else data.train.label_names


def labelled(examples: AnyExamples) -> bool:
    """Whether there is something to train on or to score."""
    return not isinstance(examples, Examples) or examples.labels is not None


def read_task(task: Task, data: Path, max_train_examples: int = 0) -> TaskData:
    """Training and scored examples of a task.

    Args:
        task: its row.
        data: folder with the official files.
        max_train_examples: as many training examples, drawn once for all seeds; 0: all.

    Raises:
        ReadError: a file is missing or not usable.
        TaskError: the training task has other labels.
    """
    source = TASKS[task.train_task] if task.train_task else task
    train = read_examples(data, source, "train")
    scored = {name: read_examples(data, task, name) for name in task.dev_splits}
    unlabelled = [name for name, examples in {"train": train, **scored}.items() if not labelled(examples)]
    if unlabelled:
        raise ReadError(f"task {task.name}: no labels in {', '.join(unlabelled)}; nothing to train on or to score")
    for name, examples in scored.items():
        if isinstance(examples, Examples) and isinstance(train, Examples) and examples.label_names != train.label_names:
            raise TaskError(f"task {task.name}: {name} has labels {examples.label_names}, train {train.label_names}")
    if max_train_examples and max_train_examples < len(train):
        from data_pipeline.order import permutation

        train = train.take(np.sort(permutation(len(train), 0)[:max_train_examples]))
    return TaskData(task=task, train=train, scored=scored)


def build_problem(tokenizer: Tokenizer, task: Task, examples: AnyExamples, recipe: Recipe) -> Problem:
    """Encode the examples of a task for its head.

    Raises:
        TaskError: the recipe leaves no room for a text.
    """
    from eval.packing import encode_examples
    from eval.problems import ChoiceProblem, ClassProblem, RegressionProblem
    from eval.squad_answers import squad_problem
    from eval.tagging import tag_problem

    if isinstance(examples, SquadData):
        return squad_problem(tokenizer, examples, recipe.max_length, recipe.stride)
    if isinstance(examples, Sentences):
        return tag_problem(tokenizer, examples, recipe.max_length)
    encoded = encode_examples(tokenizer, examples.texts_a, examples.texts_b, recipe.max_length)
    if task.head == "choice":
        return ChoiceProblem(encoded=encoded, labels=examples.labels, choices=examples.choices)
    if task.head == "regression":
        return RegressionProblem(encoded=encoded, labels=examples.labels)
    return ClassProblem(encoded=encoded, labels=examples.labels, outputs=len(examples.label_names))


def predicted_labels(task: Task, examples: Examples, logits: np.ndarray) -> np.ndarray:
    """(units,) class ids or scores from the logits of all rows, (E, K)."""
    if task.head == "regression":
        return logits[:, 0].astype(np.float64)
    return (logits.reshape(len(examples), examples.choices) if task.head == "choice" else logits).argmax(1)


def score_split(
    data: TaskData, split: str, problem: Problem, logits: np.ndarray, warnings: list[str]
) -> dict[str, Any]:
    """Metrics and baseline of one scored split as plain values; what looks wrong is added to the warnings.

    Args:
        data: with the split and the training examples, which the baseline looks at.
        split: its name.
        problem: of the split.
        logits: (E, K), or (N, K) for a head on every token.
        warnings: appended to.
    """
    task, examples = data.task, data.scored[split]
    details: dict[str, Any] = {}
    if isinstance(examples, SquadData):
        from eval.squad_answers import SquadProblem, baseline_answers, decode, score_answers

        assert isinstance(problem, SquadProblem)
        scores, details = score_answers(examples, decode(problem.windows, problem.examples, logits))
        base = baseline_answers(examples)
    elif isinstance(examples, Sentences):
        from eval.tagging import SentenceProblem, decode_tags

        assert isinstance(problem, SentenceProblem) and isinstance(data.train, Sentences)
        scores, details = score_tags(examples.tags, decode_tags(problem, logits))
        base, _ = score_tags(examples.tags, baseline_tags(data.train, examples))
    else:
        assert isinstance(data.train, Examples) and examples.labels is not None and data.train.labels is not None
        predicted = predicted_labels(task, examples, logits)
        if task.head != "regression":
            _check_chance(split, examples, predicted, warnings)
        scores = compute(task.metrics, examples.labels, predicted)
        base = baseline(task.metrics, data.train.labels, examples.labels)
    wanted = task.metrics
    return {
        "n": len(examples),
        "malformed": examples.malformed,
        "metrics": scores_as_json({name: scores[name] for name in wanted}),
        "baseline": scores_as_json({name: base[name] for name in wanted}),
    } | ({"details": details} if details else {})


def _check_chance(split: str, examples: Examples, predicted: np.ndarray, warnings: list[str]) -> None:
    assert examples.labels is not None
    correct = int((predicted == examples.labels).sum())
    classes = examples.choices if examples.choices > 1 else len(examples.label_names)
    if far_below_chance(correct, len(examples), classes):
        warnings.append(f"{split}: {correct} of {len(examples)} right is far below chance; are labels swapped?")


assert set(METRICS) >= {
    name for task in TASKS.values() if task.reader not in ("squad", "conll") for name in task.metrics
}
