"""What a report shows of one run, read from its folder: curves, tables and notes on what is missing or not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class ReportError(ValueError):
    """A folder that cannot be reported on; the message says what was expected."""


LARGEST_STORED = 1.797e308
"""MLflow stores an infinite value as the largest double: from here on a number counts as infinite (R29)."""

PARTS = {
    "pretraining metrics": "pretrain/metrics.jsonl",
    "run description": "pretrain/run.json",
    "statistics of the training data": "data/train/stats.json",
    "statistics of the held-out data": "data/validation/stats.json",
    "task scores": "eval/results.json",
}
"""The parts of a run, by the file that holds them."""
TABLES = "ablations.json"


def as_number(value: object) -> float | None:
    """A stored number as a float; NaN, infinities and their stored spellings come back non-finite, other things None."""
    if isinstance(value, str) and value.lower() in ("nan", "inf", "-inf", "infinity", "-infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if abs(value) >= LARGEST_STORED:
        return math.copysign(math.inf, value)
    return float(value)


@dataclass(kw_only=True)
class Run:
    """One run folder.

    Attributes:
        train, validation: lines of metrics.jsonl by kind, in the order of their steps; a repeated step (after a
            resume) counts once, the last one written.
        description: run.json.
        stats: stats.json by part of the corpus.
        results: groups of eval/results.json.
        notes: missing parts and odd lines, in words.
    """

    name: str
    train: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    description: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_runs(folder: Path) -> list[Path]:
    """The folder itself where it is a run, else those of its subfolders that are.

    Raises:
        ReportError: neither; what a run holds is listed.
    """
    if not folder.is_dir():
        raise ReportError(f"{folder}: no such folder; --runs takes a run folder or a folder of runs")
    if _is_run(folder):
        return [folder]
    runs = [path for path in sorted(folder.iterdir()) if path.is_dir() and _is_run(path)]
    if not runs:
        raise ReportError(f"{folder}: no run here; a run holds at least one of {', '.join(PARTS.values())}")
    return runs


def _is_run(folder: Path) -> bool:
    return any((folder / part).is_file() for part in PARTS.values())


def read_run(folder: Path) -> Run:
    """Everything a report shows of a run; missing or unreadable parts become notes."""
    run = Run(name=folder.resolve().name)
    for what, part in PARTS.items():
        if not (folder / part).is_file():
            run.notes.append(f"{what}: no {part} in this run")
    run.train, run.validation = _read_metrics(folder / PARTS["pretraining metrics"], run.notes)
    run.description = _read_json(folder / PARTS["run description"], run.notes)
    run.name = str(run.description.get("name") or run.name)
    for part in ("train", "validation"):
        run.stats[part] = _read_json(folder / f"data/{part}/stats.json", run.notes)
    results = _read_json(folder / PARTS["task scores"], run.notes)
    run.results = [group for group in results.get("results", []) if isinstance(group, dict)]
    for kind, rows in (("train", run.train), ("validation", run.validation)):
        run.notes += _non_finite_notes(kind, rows)
    return run


def read_tables(folder: Path) -> list[dict[str, Any]]:
    """Tables of `eval.ablations` in a folder of runs: title, header, rows, notes; none where they were not made."""
    tables = _read_json(folder / TABLES, []).get("tables", [])
    return [table for table in tables if isinstance(table, dict) and {"title", "header", "rows", "notes"} <= set(table)]


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"{path.name}: not readable as JSON ({error})")
        return {}
    return tree if isinstance(tree, dict) else {}


def _read_metrics(path: Path, notes: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    by_kind: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "validation": {}}
    if path.is_file():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                by_kind[row["kind"]][int(row["step"])] = row
            except (ValueError, KeyError, TypeError):
                notes.append(f"{path.name}: line {number} is no metrics line, left out")
    return tuple([rows[step] for step in sorted(rows)] for rows in by_kind.values())  # type: ignore[return-value]


def series(rows: Iterable[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one key, non-finite values included; rows without the key are left out."""
    pairs = [(int(row["step"]), as_number(row.get(key))) for row in rows]
    kept = [(step, value) for step, value in pairs if value is not None]
    return [step for step, _ in kept], [value for _, value in kept]


def _non_finite_notes(kind: str, rows: list[dict[str, Any]]) -> list[str]:
    notes = []
    for key in sorted({key for row in rows for key in row}):
        steps, values = series(rows, key)
        bad = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
        if bad:
            shown = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
            notes.append(
                f"{kind} {key}: {len(bad)} non-finite of {len(values)} values (steps {shown}); shown as such, "
                "left out of averages, never chosen as best"
            )
    return notes


def finite_mean(values: Iterable[float | None]) -> float | None:
    """The mean of the finite values; None where there is none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def best_row(rows: Iterable[Mapping[str, Any]], key: str) -> Mapping[str, Any] | None:
    """The row with the smallest finite value of `key`; None where no value is finite."""
    finite = [row for row in rows if (value := as_number(row.get(key))) is not None and math.isfinite(value)]
    return min(finite, key=lambda row: float(row[key]), default=None)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted key, value in words) pairs in the order of the tree."""
    rows: list[tuple[str, str]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            rows += flatten(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
    return rows
