"""Tables of ablations from what lies on disk: our numbers beside the paper's, a dash where nothing was run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.ablation_rows import HELD_OUT, Row, Table
from eval.report_data import Run, as_number, read_run

MISSING = "–"


def render(tables: Iterable[Table], root: Path) -> list[dict[str, Any]]:
    """Each table as title, header, rows of text and notes.

    A cell is "ours (paper)". Tasks that were run but are no column of the paper come behind the paper's columns.
    """
    runs: dict[str, Run] = {}
    rendered = []
    for table in tables:
        for row in table.rows:
            if row.run not in runs and (root / row.run).is_dir():
                runs[row.run] = read_run(root / row.run)
        rendered.append(_table(table, runs))
    return rendered


def _table(table: Table, runs: Mapping[str, Run]) -> dict[str, Any]:
    extra = _other_columns(table, runs)
    notes: list[str] = []
    rows = []
    for row in table.rows:
        run = runs.get(row.run)
        size, state = _state(run)
        if state:
            notes.append(f"{row.name}: {state}")
        cells = [_cell(row, column, run, notes) for column in (*table.columns, *extra)]
        paper = [f"{number:g}" for number in row.paper] + [MISSING] * len(extra)
        pairs = [ours if theirs == MISSING else f"{ours} ({theirs})" for ours, theirs in zip(cells, paper, strict=True)]
        rows.append([row.name, size, *pairs])
    header = [table.name, "parameters", *(_title(column) for column in (*table.columns, *extra))]
    return {
        "title": f"{table.title}: ours (the paper's, {table.source})",
        "header": header,
        "rows": rows,
        "notes": list(dict.fromkeys(notes)),
    }


def _title(column: str) -> str:
    return column.replace(" accuracy", ", accuracy").replace(" dev ", " ").replace(" dev,", ",")


def _other_columns(table: Table, runs: Mapping[str, Run]) -> list[str]:
    """Headlines of tasks that were run for a row and are no column of the table."""
    found: dict[str, None] = {}
    for row in table.rows:
        for group in runs[row.run].results if row.run in runs else []:
            if group["task"] not in table.tasks and group["task"] not in ("", HELD_OUT):
                found[f"{group['task']} {group['headline']['split']} {group['headline']['metric']}"] = None
    return list(found)


def _state(run: Run | None) -> tuple[str, str]:
    """Size of the model, and a note where its pretraining is missing or not complete."""
    if run is None or not run.description:
        return MISSING, "no pretraining yet"
    size = f"{run.description.get('parameters', 0):,}"
    wanted = run.description.get("config", {}).get("train", {}).get("steps")
    done = run.train[-1]["step"] if run.train else 0
    return size, "" if done == wanted else f"pretraining is at step {done} of {wanted}"


def _cell(row: Row, column: str, run: Run | None, notes: list[str]) -> str:
    if run is None:
        return MISSING
    words = column.split()
    if words[0] == HELD_OUT:
        last = as_number(run.validation[-1].get(words[1])) if run.validation else None
        return MISSING if last is None else f"{last:.2f}" if math.isfinite(last) else str(last)
    groups = [g for g in run.results if g["task"] == words[0] and g.get("bilstm", 0) == row.bilstm and "start" not in g]
    if not groups:
        return MISSING
    marked = [group for group in groups if "best_of_grid" in group]
    group = (marked or groups)[-1]
    if len(groups) > 1:
        said = f"the best of {group['best_of_grid']} settings on dev" if marked else "the last of several settings"
        notes.append(f"{row.name}, {words[0]}: {said}")
    summary = group["splits"].get(words[1], {}).get("metrics", {}).get(words[2])
    if summary is None:
        return MISSING
    if summary["mean"] is None:
        notes.append(f"{row.name}, {column}: undefined ({', '.join(summary['reasons'])})")
        return "undefined"
    spread = f" ± {100 * summary['sd']:.1f}" if summary["sd"] is not None else ""
    return f"{100 * summary['mean']:.1f}{spread}, n={summary['n']}"


def as_markdown(tables: Sequence[Mapping[str, Any]]) -> str:
    """The rendered tables as Markdown."""
    lines = []
    for table in tables:
        lines += [
            f"## {table['title']}",
            "",
            "| " + " | ".join(table["header"]) + " |",
            "|---" * len(table["header"]) + "|",
        ]
        lines += ["| " + " | ".join(row) + " |" for row in table["rows"]]
        lines += ["", *(f"- {note}" for note in table["notes"]), *([""] if table["notes"] else [])]
    return "\n".join(lines)


def as_json(tables: Sequence[Mapping[str, Any]]) -> str:
    """The rendered tables for `eval.report`, which shows them above the runs of the folder."""
    return json.dumps({"schema": 1, "tables": tables}, indent=1, ensure_ascii=False) + "\n"
