"""Examples from official task files, as columns.

GLUE's TSV files are not CSV: a field may start with a lone `"`, so quoting is off; only LF and CRLF end a row, so that
U+0085 or U+2028 inside a sentence never splits it. Malformed rows are counted by reason and never silently lost.
"""

from __future__ import annotations

import gzip
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from eval.tasks import Split, Task


class ReadError(ValueError):
    """A task file that is missing or not what it should be; the message names file, row and remedy."""


MALFORMED_LIMIT = 0.01
"""Largest share of malformed rows that is still taken as the known dirt of a release (QQP has some)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """The examples of one split as columns of equal length.

    Attributes:
        ids: the row's number in the file as text, counted from 0 below the header: GLUE's test index.
        texts_a, texts_b: the text; `texts_b` is None for single sentences.
        labels: int64 class ids, float64 scores, or None for a file without labels.
        label_names: class names in the order of the ids; empty for regression.
        choices: inputs per example; above 1 (multiple choice), `texts_a` and `texts_b` have that many rows for each.
        malformed: rows left out, by reason.
        sha256: of the file's bytes, uncompressed.
    """

    ids: list[str]
    texts_a: list[str]
    texts_b: list[str] | None
    labels: np.ndarray | None
    label_names: tuple[str, ...] = ()
    choices: int = 1
    malformed: dict[str, int] = field(default_factory=dict)
    sha256: str = ""

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: np.ndarray) -> Examples:
        """The examples at these rows, in this order."""
        inputs = (rows[:, None] * self.choices + np.arange(self.choices)).reshape(-1)
        return replace(
            self,
            ids=[self.ids[row] for row in rows],
            texts_a=[self.texts_a[row] for row in inputs],
            texts_b=None if self.texts_b is None else [self.texts_b[row] for row in inputs],
            labels=None if self.labels is None else self.labels[rows],
        )


def find_file(data: Path, task: Task, *names: str) -> Path:
    """The file of a task: `DATA/FOLDER/NAME` or `DATA/glue/FOLDER/NAME`, as it is or with `.gz`; the first name found.

    Raises:
        ReadError: none of them exists; all places looked at are named.
    """
    places = [base / task.folder / name for name in names for base in (data, data / "glue")]
    for place in places:
        for path in (place, place.with_name(place.name + ".gz")):
            if path.is_file():
                return path
    raise ReadError(
        f"{places[0]}: no such file (nor {places[0].name}.gz, nor below {data / 'glue'}); "
        f"task {task.name} needs it: put the official file there or point --data elsewhere"
    )


def read_bytes(path: Path) -> bytes:
    """The file's bytes, uncompressed where its name ends in .gz.

    Raises:
        ReadError: unreadable or a damaged gzip file.
    """
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise ReadError(f"{path}: cannot be read ({error})") from error


def label_names(data: Path, task: Task) -> tuple[str, ...]:
    """The task's label names in the order of their ids: from its row, or from its labels file.

    Raises:
        ReadError: the labels file is missing, or holds fewer than two names or one twice.
    """
    if not task.labels_file:
        return task.labels
    path = find_file(data, task, task.labels_file)
    names = tuple(line.strip() for line in _decode(path, read_bytes(path)).split("\n") if line.strip())
    if len(names) < 2 or len(set(names)) != len(names):
        raise ReadError(f"{path}: expected at least two different label names, one a line, got {list(names)}")
    return names


def read_split(data: Path, task: Task, split_name: str) -> Examples:
    """The examples of one split of a task with TSV files.

    Raises:
        ReadError: a missing file or column, too many malformed rows, no usable row.
    """
    if split_name not in task.splits:
        raise ReadError(f"task {task.name} has no split {split_name!r}; it has {sorted(task.splits)}")
    split = task.splits[split_name]
    path = find_file(data, task, split.file)
    raw = read_bytes(path)
    names = label_names(data, task)
    values = {value: number for number, value in enumerate(task.label_values or names)}
    table = _read_table(path, _decode(path, raw), task, split)
    malformed = Counter(table.malformed)
    kept: list[int] = []
    labels: list[float] = []
    for row, text in enumerate(table.labels or ()):
        label = _label(text, values, regression=task.head == "regression")
        if label is None:
            malformed["unknown label"] += 1
            table.first_bad.setdefault("unknown label", f"row {table.ids[row]}: {text!r}")
        else:
            kept.append(row)
            labels.append(label)
    _check_malformed(path, table, malformed, task, names)
    examples = Examples(
        ids=table.ids,
        texts_a=table.texts[0],
        texts_b=table.texts[1] if len(table.texts) > 1 else None,
        labels=None,
        label_names=names,
        malformed=dict(malformed),
        sha256=hashlib.sha256(raw).hexdigest(),
    )
    if table.labels is None:
        return examples
    dtype = np.float64 if task.head == "regression" else np.int64
    return replace(examples.take(np.array(kept, dtype=np.int64)), labels=np.array(labels, dtype=dtype))


@dataclass(kw_only=True)
class _Table:
    ids: list[str]
    texts: list[list[str]]
    labels: list[str] | None
    malformed: dict[str, int]
    first_bad: dict[str, str]


def _decode(path: Path, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ReadError(f"{path}: not UTF-8 at byte {error.start}; GLUE's files are UTF-8") from error


def _lines(text: str) -> list[str]:
    """Rows ended by LF or CRLF; a last row without newline counts, an empty one does not."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if lines and not lines[-1]:
        lines.pop()
    return lines


def _read_table(path: Path, text: str, task: Task, split: Split) -> _Table:
    lines = _lines(text)
    if not lines:
        raise ReadError(f"{path}: the file is empty")
    header: Sequence[str] = split.columns or lines[0].split("\t")
    rows = lines if split.columns else lines[1:]
    column = {name: number for number, name in enumerate(header)}
    wanted = [split.renamed.get(name, name) for name in task.text_columns]
    label = split.renamed.get(task.label_column, task.label_column)
    required = [*wanted, label] if split.labelled else wanted
    missing = [name for name in required if name not in column]
    if missing:
        raise ReadError(f"{path}: no column {missing} in the header {list(header)}; task {task.name} needs {required}")
    table = _Table(
        ids=[], texts=[[] for _ in wanted], labels=[] if split.labelled else None, malformed={}, first_bad={}
    )
    malformed: Counter[str] = Counter()
    for number, line in enumerate(rows):
        fields = line.split("\t")
        if len(fields) < len(header) or (len(fields) > len(header) and not split.extra_columns):
            malformed["number of fields"] += 1
            table.first_bad.setdefault("number of fields", f"row {number}: {len(fields)} instead of {len(header)}")
            continue
        table.ids.append(str(number))
        for texts, name in zip(table.texts, wanted, strict=True):
            texts.append(fields[column[name]].strip())
        if table.labels is not None:
            table.labels.append(fields[column[label]].strip())
    table.malformed = dict(malformed)
    return table


def _label(text: str, values: dict[str, int], *, regression: bool) -> float | None:
    """The class id or the finite score that a field spells; None where it spells neither."""
    if not regression:
        return values.get(text)
    try:
        score = float(text)
    except ValueError:
        return None
    return score if np.isfinite(score) else None


def _check_malformed(path: Path, table: _Table, malformed: Counter[str], task: Task, names: tuple[str, ...]) -> None:
    rows = len(table.ids) + table.malformed.get("number of fields", 0)
    bad = sum(malformed.values())
    if bad > max(1, MALFORMED_LIMIT * rows) or bad == rows:
        reasons = "; ".join(
            f"{count} x {reason}, first {table.first_bad[reason]}" for reason, count in malformed.items()
        )
        expected = (
            f"; labels of {task.name}: {list(task.label_values or names)}" if "unknown label" in malformed else ""
        )
        raise ReadError(f"{path}: {bad} of {rows} rows are malformed ({reasons}){expected}")
