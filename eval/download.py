"""`python -m eval.download --tasks NAMES --output DATA`: task files through the `datasets` library, in their official form.

What is written is what `eval.run` reads from a folder: GLUE's TSV, SQuAD's JSON, SWAG's CSV, CoNLL's columns. Files that are
there are left alone. Needs `pip install datasets` and a network, or `--source` with clones of the data sets' repositories.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.artefacts import write_text
from eval.labels import label_outputs
from eval.tasks import Split, Task, TaskError, select_tasks

Rows = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSet:
    """Where a task lies on the Hugging Face hub.

    Attributes:
        path, config: as `load_dataset` takes them.
        splits: ours -> the hub's.
        columns: our text columns -> the hub's, where they differ.
        label: the hub's label column.
    """

    path: str
    config: str | None = None
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "dev": "validation", "test": "test"})
    columns: Mapping[str, str] = field(default_factory=dict)
    label: str = "label"


def _glue(config: str, **columns: str) -> HubSet:
    return HubSet(path="nyu-mll/glue", config=config, columns=columns)


_MNLI_SPLITS = {"train": "train"} | {
    f"{ours}_{genre}": f"{theirs}_{genre}"
    for ours, theirs in (("dev", "validation"), ("test", "test"))
    for genre in ("matched", "mismatched")
}
_NO_TEST = {"train": "train", "dev": "validation"}
HUB: Mapping[str, HubSet] = {
    "CoLA": _glue("cola"),
    "SST-2": _glue("sst2"),
    "MRPC": HubSet(path="nyu-mll/glue", config="mrpc", columns={"#1 String": "sentence1", "#2 String": "sentence2"}),
    "STS-B": _glue("stsb"),
    "QQP": _glue("qqp"),
    "MNLI": HubSet(
        path="nyu-mll/glue",
        config="mnli",
        splits=_MNLI_SPLITS,
        columns={"sentence1": "premise", "sentence2": "hypothesis"},
    ),
    "QNLI": _glue("qnli"),
    "RTE": _glue("rte"),
    "WNLI": _glue("wnli"),
    "SQuAD1.1": HubSet(path="rajpurkar/squad", splits=_NO_TEST),
    "SQuAD2.0": HubSet(path="rajpurkar/squad_v2", splits=_NO_TEST),
    "SWAG": HubSet(path="allenai/swag", config="regular"),
    "CoNLL": HubSet(path="tomaarsen/conll2003", label="ner_tags"),
}
"""Tasks that can be fetched; the feature-based rows of CoNLL read its files."""


def fetch(task: Task, output: Path, source: Path | None = None) -> list[Path]:
    """Write the files of a task that are not there yet, and return them.

    Args:
        task: its row.
        output: the data folder.
        source: folder with `PATH` of each hub set, a clone of its repository; None: the hub.

    Raises:
        TaskError: not on the hub, no `datasets`, no network, or columns and labels that are not those of the task.
    """
    if task.features:
        return []
    if task.name not in HUB:
        raise TaskError(f"{task.name} cannot be downloaded; known: {', '.join(HUB)}")
    hub = HUB[task.name]
    written = []
    for ours, theirs in hub.splits.items():
        split = task.splits.get(ours)
        if split is None:
            continue
        path = output / task.folder / split.file
        if path.exists() or path.with_name(path.name + ".gz").exists():
            continue
        rows = _load(hub, theirs, source)
        try:
            write_text(path, _text(task, hub, split, rows))
        except KeyError as error:
            raise TaskError(f"{hub.path} {theirs}: no column {error}; found {list(rows.features)}") from error
        written.append(path)
    return written


def _load(hub: HubSet, split: str, source: Path | None) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise TaskError("downloading needs the datasets library: pip install datasets") from error
    path = hub.path if source is None else str(source / hub.path)
    try:
        return load_dataset(path, hub.config, split=split)
    except Exception as error:  # of its dependencies' many kinds; all mean the same here
        where = "is there a network?" if source is None else "expected a clone of the data set's repository"
        said = str(error).strip().splitlines() or [""]
        raise TaskError(
            f"{path} {hub.config or ''}: cannot be loaded ({type(error).__name__}: {said[0][:200]}); {where} "
            "Without one, put the official files into the data folder: python -m eval.run --help names them"
        ) from error


def _text(task: Task, hub: HubSet, split: Split, rows: Any) -> str:
    writers: dict[str, Callable[..., str]] = {"squad": _squad, "swag": _swag, "conll": _conll, "tsv": _tsv}
    return writers[task.reader](task, hub, split, rows)


def _tsv(task: Task, hub: HubSet, split: Split, rows: Any) -> str:
    label = _label_writer(task, hub, rows.features.get(hub.label)) if split.labelled else None
    names = list(split.columns) or ["index", *task.text_columns, *([task.label_column] if label else [])]
    lines = [] if split.columns else ["\t".join(names)]
    for number, row in enumerate(rows):
        cells = {name: _cell(row[hub.columns.get(name, name)]) for name in task.text_columns}
        cells |= {"index": str(number)} | ({task.label_column: label(row[hub.label])} if label else {})
        lines.append("\t".join(cells.get(name, "") for name in names))
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """A field of a file that has no quoting: what would end it becomes a blank."""
    return " ".join(text.replace("\t", " ").split("\n")).replace("\r", " ")


def _label_writer(task: Task, hub: HubSet, feature: Any) -> Callable[[Any], str]:
    """From the hub's label to the file's spelling; class numbers are matched by name (R35)."""
    if task.head == "regression":
        return lambda value: f"{value:.3f}"
    spelled = task.label_values or task.labels
    named = getattr(feature, "names", None)
    if named is None:
        raise TaskError(f"{hub.path}: the column {hub.label!r} does not name its labels")
    outputs = label_outputs(dict(enumerate(named)), task.labels, task=task.name)
    words = {int(output): spelled[number] for number, output in enumerate(outputs)}
    return lambda value: words[int(value)]


def _squad(task: Task, hub: HubSet, split: Split, rows: Any) -> str:
    articles: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        answers = [
            {"text": text, "answer_start": start}
            for text, start in zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
        ]
        question: dict[str, Any] = {"id": row["id"], "question": row["question"], "answers": answers}
        if task.name == "SQuAD2.0":
            question["is_impossible"] = not answers
        articles.setdefault(row["title"], {}).setdefault(row["context"], []).append(question)
    data = [
        {"title": title, "paragraphs": [{"context": context, "qas": qas} for context, qas in paragraphs.items()]}
        for title, paragraphs in articles.items()
    ]
    version = "v2.0" if task.name == "SQuAD2.0" else "1.1"
    return json.dumps({"version": version, "data": data}, ensure_ascii=False) + "\n"


def _swag(task: Task, hub: HubSet, split: Split, rows: Any) -> str:
    names = ["video-id", "fold-ind", "startphrase", "sent1", "sent2", "gold-source", *(f"ending{n}" for n in range(4))]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*names, "label"] if split.labelled else names)
    for row in rows:
        cells = [row[name] for name in names]
        writer.writerow([*cells, int(row["label"])] if split.labelled else cells)
    return buffer.getvalue()


def _conll(task: Task, hub: HubSet, split: Split, rows: Any) -> str:
    feature = rows.features[hub.label]
    names = (feature.feature if hasattr(feature, "feature") else feature[0]).names
    lines: list[str] = []
    document: Any = None
    for row in rows:
        if row.get("document_id", 0) != document:
            document = row.get("document_id", 0)
            lines += ["-DOCSTART- -X- -X- O", ""]
        lines += [f"{word} {names[tag]}" for word, tag in zip(row["tokens"], row[hub.label], strict=True)] + [""]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.download", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", required=True, nargs="+", help=f"of {', '.join(HUB)}; or glue for its nine")
    parser.add_argument("--output", required=True, type=Path, help="data folder: what --data of eval.run takes")
    parser.add_argument("--source", type=Path, help="folder with clones of the repositories (nyu-mll/glue, ...)")
    options = parser.parse_args(arguments)
    try:
        for task in select_tasks(options.tasks):
            written = fetch(task, options.output, options.source)
            print(f"{task.name}: " + (", ".join(map(str, written)) or "everything is there"))
    except TaskError as error:
        print(f"eval.download: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
