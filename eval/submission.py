"""`python -m eval.submission --results DIR --output glue.zip`: the files that GLUE's server takes.

`eval.run --predictions` writes one prediction file for each run and unlabelled test split. Here, for each task, the run with the
best score on dev (never on test) is chosen and its file goes into the archive under the official name.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.artefacts import write_bytes, write_text
from eval.readers import Examples
from eval.results import read_result, result_path
from eval.squad_data import SquadData
from eval.task_data import AnyExamples, predicted_labels
from eval.tasks import Task, TaskError

OFFICIAL = {
    ("CoLA", "test"): "CoLA.tsv",
    ("SST-2", "test"): "SST-2.tsv",
    ("MRPC", "test"): "MRPC.tsv",
    ("STS-B", "test"): "STS-B.tsv",
    ("QQP", "test"): "QQP.tsv",
    ("MNLI", "test_matched"): "MNLI-m.tsv",
    ("MNLI", "test_mismatched"): "MNLI-mm.tsv",
    ("QNLI", "test"): "QNLI.tsv",
    ("RTE", "test"): "RTE.tsv",
    ("WNLI", "test"): "WNLI.tsv",
    ("diagnostic", "test"): "AX.tsv",
}
"""(task, split) -> file name in the archive, as https://gluebenchmark.com/faq lists them."""
_NUMBERS = ("CoLA", "SST-2", "MRPC", "QQP", "WNLI")
"""Tasks whose labels the server wants as 0 and 1; the others by name."""


def predictions_folder(output: Path, result: Mapping[str, Any]) -> Path:
    """Where the prediction files of a run lie."""
    return result_path(output, result).with_suffix("")


def prediction_text(task: Task, examples: Examples, logits: np.ndarray) -> str:
    """`index<TAB>prediction` lines in GLUE's format.

    Args:
        task: a classification, regression or multiple-choice task.
        examples: of the split, with or without labels.
        logits: (rows, outputs).
    """
    predicted = predicted_labels(task, examples, logits)
    if task.head == "regression":
        words = [f"{score:.3f}" for score in np.clip(predicted, 0.0, 5.0)]
    elif task.name in _NUMBERS or not examples.label_names:
        words = [str(label) for label in predicted]
    else:
        words = [examples.label_names[label] for label in predicted]
    rows = "".join(f"{index}\t{word}\n" for index, word in zip(examples.ids, words, strict=True))
    return "index\tprediction\n" + rows


def write_predictions(
    folder: Path, task: Task, split: str, examples: AnyExamples, problem: Any, logits: np.ndarray
) -> None:
    """Write what a run predicts for a split: TSV, SQuAD's JSON files, or one word and tag a line."""
    if isinstance(examples, SquadData):
        from eval.squad_answers import answer_files, decode

        answers = decode(problem.windows, problem.examples, logits)
        for name, tree in answer_files(answers, examples.version).items():
            write_text(folder / f"{split}.{name}", json.dumps(tree, ensure_ascii=False, indent=1) + "\n")
    elif isinstance(examples, Examples):
        write_text(folder / f"{split}.tsv", prediction_text(task, examples, logits))
    else:
        from eval.tagging import decode_tags

        pairs = zip(examples.words, decode_tags(problem, logits), strict=True)
        blocks = ["".join(f"{word} {tag}\n" for word, tag in zip(*pair, strict=True)) for pair in pairs]
        write_text(folder / f"{split}.conll", "\n".join(blocks))


def write_archive(results: Path, output: Path) -> tuple[dict[str, str], list[str]]:
    """Write the archive; returns file name -> the run it is from, and the official files that are lacking.

    Raises:
        TaskError: no prediction file of a GLUE task below `results`.
    """
    chosen: dict[str, tuple[float, Path]] = {}
    for (task, split), name in OFFICIAL.items():
        for path in sorted((results / task).glob("seed-*.json")):
            result, predictions = read_result(path), path.with_suffix("") / f"{split}.tsv"
            if result is None or not predictions.is_file():
                continue
            headline = result["headline"]
            score = result["splits"][headline["split"]]["metrics"][headline["metric"]]["value"]
            if score is not None and (name not in chosen or score > chosen[name][0]):
                chosen[name] = (score, predictions)
    if not chosen:
        raise TaskError(f"{results}: no prediction file of a GLUE task; run eval.run with --predictions first")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (_, path) in sorted(chosen.items()):
            # A fixed date: the same predictions give the same bytes.
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), path.read_bytes(), zipfile.ZIP_DEFLATED)
    write_bytes(output, buffer.getvalue())
    runs = {name: f"{path.parent.name}, dev {score:.4f}" for name, (score, path) in sorted(chosen.items())}
    return runs, [name for name in OFFICIAL.values() if name not in chosen]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m eval.submission", description=__doc__)
    parser.add_argument("--results", required=True, type=Path, help="output folder of eval.run --predictions")
    parser.add_argument("--output", required=True, type=Path, help="the archive to write")
    options = parser.parse_args(arguments)
    try:
        runs, lacking = write_archive(options.results, options.output)
    except TaskError as error:
        print(f"eval.submission: {error}", file=sys.stderr)
        return 2
    for name, run in runs.items():
        print(f"{name}: {run}")
    if lacking:
        print(f"eval.submission: the server also wants {', '.join(lacking)}", file=sys.stderr)
    print(f"submission: {options.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
