"""Multiple choice: SWAG's CSV files (https://github.com/rowanz/swagaf) and ARC as JSON lines."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from pathlib import Path

import numpy as np

from eval.readers import Examples, ReadError, find_file, read_bytes
from eval.tasks import Task

CHOICES = 4
_ALL_FIRST = 20
"""With this many rows, a right answer that is always the first one is no accident."""


def read_choices(data: Path, task: Task, split_name: str) -> Examples:
    """The examples of one split: `CHOICES` consecutive inputs for each, so that `texts_a` has four times as many rows.

    Raises:
        ReadError: a missing file or column, a label out of range, or a file whose first choice is always right.
    """
    split = task.splits[split_name]
    path = find_file(data, task, split.file)
    raw = read_bytes(path)
    try:
        text = raw.decode("utf-8-sig")
        rows = _swag_rows(path, text) if task.reader == "swag" else _arc_rows(path, text)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ReadError(f"{path}: cannot be read ({error})") from error
    if not rows:
        raise ReadError(f"{path}: no example in this file")
    labels = [label for _, _, label in rows]
    known = [label for label in labels if label is not None]
    if known and len(known) < len(rows):
        raise ReadError(f"{path}: {len(rows) - len(known)} of {len(rows)} rows have no label")
    if len(known) >= _ALL_FIRST and not any(known):
        raise ReadError(f"{path}: the first ending is the right one in all {len(rows)} rows; shuffle the endings first")
    return Examples(
        ids=[str(number) for number in range(len(rows))],
        texts_a=[first for firsts, _, _ in rows for first in firsts],
        texts_b=[second for _, seconds, _ in rows for second in seconds],
        labels=np.array(known, dtype=np.int64) if known else None,
        choices=CHOICES,
        sha256=hashlib.sha256(raw).hexdigest(),
    )


_Row = tuple[list[str], list[str], int | None]


def _swag_rows(path: Path, text: str) -> list[_Row]:
    """Rows of either form: `ending0..3` with a label, or the full form with gold and distractor endings."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    header = reader.fieldnames or []
    full = "gold-ending" in header
    endings = (
        ["gold-ending", *(f"distractor-{n}" for n in range(CHOICES - 1))]
        if full
        else [f"ending{n}" for n in range(CHOICES)]
    )
    missing = [name for name in ("sent1", "sent2", *endings) if name not in header]
    if missing:
        raise ReadError(f"{path}: no column {missing} in the header {list(header)}; expected SWAG's CSV")
    rows: list[_Row] = []
    for number, row in enumerate(reader):
        if any(row[name] is None for name in ("sent1", "sent2", *endings)):
            raise ReadError(f"{path}: row {number} has too few fields; is a quote missing?")
        seconds = [f"{row['sent2']} {row[name]}".strip() for name in endings]
        label = 0 if full else _label(path, number, row.get("label"))
        if full:
            # The full form has the right ending first: order the endings by a hash of their text.
            order = sorted(range(CHOICES), key=lambda n: hashlib.blake2b(seconds[n].encode(), digest_size=8).digest())
            seconds, label = [seconds[n] for n in order], order.index(0)
        rows.append(([row["sent1"]] * CHOICES, seconds, label))
    return rows


def _label(path: Path, number: int, text: str | None) -> int | None:
    if text is None or not text.strip():
        return None
    if text.strip() not in map(str, range(CHOICES)):
        raise ReadError(f"{path}: row {number} has the label {text!r}; expected 0 to {CHOICES - 1}")
    return int(text)


def _arc_rows(path: Path, text: str) -> list[_Row]:
    rows: list[_Row] = []
    for number, line in enumerate(text.split("\n")):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            question, choices, gold = row["query"].removeprefix("Question:").strip(), row["choices"], row.get("gold")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReadError(f"{path}: line {number + 1} is no ARC example ({error})") from error
        if len(choices) != CHOICES:
            raise ReadError(f"{path}: line {number + 1} has {len(choices)} choices, expected {CHOICES}")
        rows.append(([question] * CHOICES, list(choices), None if gold is None else _label(path, number, str(gold))))
    return rows
