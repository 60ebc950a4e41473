"""`python -m eval.score squad|glue|conll ...`: score prediction files made elsewhere, printing JSON with the official keys."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.conll_data import read_conll, score_tags
from eval.metrics import compute
from eval.readers import Examples, ReadError, read_bytes, read_split
from eval.squad_data import read_squad
from eval.squad_metrics import score_v1, score_v2
from eval.tasks import Task, TaskError, select_tasks


def score_squad(
    data: Path, predictions: Path, null_scores: Path | None = None, threshold: float | None = None
) -> dict[str, float]:
    """The official scores of a SQuAD prediction file; version 2.0 where the data say so.

    Raises:
        ReadError: a file is missing or not what it should be.
    """
    squad = read_squad(data)
    answers = _read_map(predictions, str)
    nulls = None if null_scores is None else {key: float(v) for key, v in _read_map(null_scores, int | float).items()}
    if squad.version == "1.1":
        if nulls is not None:
            raise ReadError(f"{data}: every question has an answer; null scores are for version 2.0")
        return score_v1(squad.questions(), answers)
    return score_v2(squad.questions(), answers, nulls, threshold)


def score_glue(task: Task, data: Path, predictions: Path, split: str = "") -> dict[str, Any]:
    """Metrics of a prediction file in GLUE's submission format (`index<TAB>prediction`) against a labelled split.

    Labels may be written as names or as the task's own files spell them. A missing prediction is an error.

    Raises:
        ReadError: a file is missing, an index is missing, unknown or doubled, or a label is not one of the task.
        TaskError: the task is no classification or regression.
    """
    if task.head not in ("classification", "regression"):
        raise TaskError(f"task {task.name} is not scored by label; use eval.score {task.head}")
    gold = read_split(data, task, split or task.dev_splits[0])
    if gold.labels is None:
        raise ReadError(f"task {task.name}: {split} has no labels to score against")
    rows = _read_submission(predictions)
    if set(rows) != set(gold.ids):
        missing, extra = sorted(set(gold.ids) - set(rows)), sorted(set(rows) - set(gold.ids))
        raise ReadError(
            f"{predictions}: {len(rows)} predictions for {len(gold)} examples; "
            f"missing {missing[:3]}, not in the data {extra[:3]}"
        )
    predicted = np.array([_label(rows[index], task, gold, predictions) for index in gold.ids])
    scores = compute(task.metrics, gold.labels, predicted)
    return (
        {name: score.value for name, score in scores.items()}
        | {"total": len(gold)}
        | {f"{name}_undefined": score.undefined for name, score in scores.items() if score.undefined}
    )


def score_conll(gold: Path, predictions: Path) -> dict[str, float]:
    """Entity precision, recall and F1 as fractions, over all kinds and for each, as the official `conlleval` counts.

    Both files have one word a line, the tag in the last column, in IOB1 or IOB2.

    Raises:
        ReadError: a file is missing or not usable, or the two do not have the same sentences.
    """
    wanted, given = read_conll(gold), read_conll(predictions)
    if len(wanted) != len(given):
        raise ReadError(f"{predictions}: {len(given)} sentences, expected {len(wanted)} as in {gold}")
    for number, (ours, theirs) in enumerate(zip(wanted.words, given.words, strict=True), 1):
        if ours != theirs:
            raise ReadError(f"{predictions}: sentence {number} is not the gold file's ({theirs[:6]}, {ours[:6]})")
    scores, details = score_tags(wanted.tags, given.tags)
    return {name: float(score.value or 0.0) for name, score in scores.items()} | details


def _label(text: str, task: Task, gold: Examples, path: Path) -> float:
    if task.head == "regression":
        try:
            return float(text)
        except ValueError as error:
            raise ReadError(f"{path}: {text!r} is not a number") from error
    for spelling in (gold.label_names, task.label_values):
        if text in spelling:
            return spelling.index(text)
    raise ReadError(f"{path}: {text!r} is no label of {task.name}; expected one of {list(gold.label_names)}")


def _read_submission(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ReadError(f"{path}: no such file")
    lines = read_bytes(path).decode("utf-8-sig", "replace").split("\n")
    rows: dict[str, str] = {}
    for number, line in enumerate(lines):
        fields = line.rstrip("\r").split("\t")
        if fields == [""] or (number == 0 and fields[0] == "index"):
            continue
        if len(fields) != 2:
            raise ReadError(f"{path}: line {number + 1} has {len(fields)} fields, expected index and prediction")
        if fields[0] in rows:
            raise ReadError(f"{path}: line {number + 1} repeats index {fields[0]}")
        rows[fields[0]] = fields[1]
    return rows


def _read_map(path: Path, kind: Any) -> Mapping[str, Any]:
    """A JSON object of question id -> value."""
    if not path.is_file():
        raise ReadError(f"{path}: no such file")
    try:
        tree = json.loads(read_bytes(path))
    except ValueError as error:
        raise ReadError(f"{path}: not JSON ({error})") from error
    if not isinstance(tree, dict) or not all(isinstance(value, kind) for value in tree.values()):
        raise ReadError(f"{path}: expected one JSON object of question id to {'text' if kind is str else 'number'}")
    return tree


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m eval.score", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    squad = kinds.add_parser("squad", help="SQuAD 1.1 or 2.0")
    squad.add_argument("data", type=Path, help="the data set's JSON, .gz accepted")
    squad.add_argument("predictions", type=Path, help="JSON: question id to answer text")
    squad.add_argument("--na-prob", type=Path, help="JSON: question id to null score; best thresholds are reported")
    squad.add_argument(
        "--na-prob-thresh", type=float, help="take null scores above this as 'no answer' (default: none)"
    )
    glue = kinds.add_parser("glue", help="GLUE and the other labelled TSV tasks")
    glue.add_argument("task", help="name of the task")
    glue.add_argument("data", type=Path, help="folder with the task's folder, as for eval.run")
    glue.add_argument("predictions", type=Path, help="TSV: index and prediction")
    glue.add_argument("--split", default="", help="labelled split to score against (default: the first dev split)")
    conll = kinds.add_parser("conll", help="CoNLL-2003 and other files of one word and tag a line")
    conll.add_argument("gold", type=Path, help="file with the right tags in the last column, .gz accepted")
    conll.add_argument("predictions", type=Path, help="the same words with predicted tags in the last column")
    options = parser.parse_args(arguments)
    try:
        if options.kind == "conll":
            scores: dict[str, Any] = score_conll(options.gold, options.predictions)
        elif options.kind == "squad":
            scores = score_squad(options.data, options.predictions, options.na_prob, options.na_prob_thresh)
        else:
            (task,) = select_tasks([options.task])[:1]
            scores = score_glue(task, options.data, options.predictions, options.split)
    except (ReadError, TaskError) as error:
        print(f"eval.score: {error}", file=sys.stderr)
        return 2
    print(json.dumps(scores, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
