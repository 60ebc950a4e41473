"""`python -m eval.report --runs DIR --output DIR`: one self-contained HTML page about one run, or about several."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from data_pipeline.artefacts import write_text
from eval.plots import HELD_OUT, TRAIN, Curve, bars_svg, curves_svg, scores_svg
from eval.report_data import (
    ReportError,
    Run,
    as_number,
    best_row,
    find_runs,
    finite_mean,
    flatten,
    read_run,
    read_tables,
    series,
)

TEMPLATES = Path(__file__).resolve().parent / "templates"
UNIGRAM_KEY = "unigram_loss"
"""In run.json: the held-out MLM loss of predicting by the training text's token frequencies."""

_VALIDATION_COLUMNS = (
    ("step", "step", 0),
    ("MLM loss", "mlm_loss", 4),
    ("perplexity", "perplexity", 2),
    ("MLM accuracy", "mlm_accuracy", 4),
    ("NSP loss", "nsp_loss", 4),
    ("NSP accuracy", "nsp_accuracy", 4),
    ("examples", "examples", 0),
)


def shown(value: float | None, digits: int = 4) -> str:
    """A number in words: thousands apart, non-finite as `nan` or `inf`, a dash for none."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.{digits}f}" if digits else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """A fraction as per cent with two digits."""
    return "undefined" if value is None else shown(100 * value, 2)


def write_report(runs_folder: Path, output: Path) -> Path:
    """Write `output/index.html` and return its path.

    Raises:
        ReportError: no run in the folder.
    """
    runs = [read_run(folder) for folder in find_runs(runs_folder)]
    page = render_page(
        title=f"Clozeworks: {runs[0].name}" if len(runs) == 1 else f"Clozeworks: {len(runs)} runs",
        subtitle=_subtitle(runs[0]) if len(runs) == 1 else ", ".join(run.name for run in runs),
        runs=runs,
        tables=read_tables(runs_folder),
    )
    path = output / "index.html"
    write_text(path, page)
    return path


def render_page(
    *,
    title: str,
    subtitle: str,
    runs: Sequence[Run],
    tables: Sequence[Mapping[str, Any]] = (),
    figures: Sequence[Mapping[str, str]] = (),
    alerts: Sequence[str] = (),
) -> str:
    """The page as HTML.

    Args:
        title, subtitle: its head.
        runs: a part for each.
        tables: above the runs: title, header, rows of text, notes.
        figures: above the runs: title, svg.
        alerts: what must be seen first.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html.j2").render(
        title=title,
        subtitle=subtitle,
        runs=[_view(run, f"run{number}") for number, run in enumerate(runs)],
        tables=tables,
        figures=figures,
        alerts=alerts,
    )


def _subtitle(run: Run) -> str:
    """When and with which code the run was started, as far as it says so."""
    starts = run.description.get("starts") or [{}]
    parts = []
    created = as_number(run.description.get("created"))
    if created is not None and math.isfinite(created):
        parts.append(time.strftime("created %Y-%m-%d %H:%M UTC", time.gmtime(created)))
    if starts[-1].get("git"):
        parts.append(f"code {str(starts[-1]['git'])[:12]}")
    if starts[-1].get("world_size"):
        parts.append(f"{starts[-1]['world_size']} ranks")
    if len(starts) > 1:
        parts.append(f"resumed {len(starts) - 1} times, last at step {starts[-1].get('step')}")
    return " · ".join(parts) or "pretraining, task scores and configuration of one run"


def _view(run: Run, prefix: str) -> dict[str, Any]:
    """What the template needs, in its words."""
    best = best_row(run.validation, "mlm_loss")
    details = [("Configuration and versions", flatten(run.description))] if run.description else []
    details += [(f"Statistics of the {part} data", flatten(stats)) for part, stats in run.stats.items() if stats]
    return {
        "name": run.name,
        "tiles": _tiles(run, best),
        "notes": run.notes,
        "task_rows": _task_rows(run.results),
        "task_figure": _task_figure(run.results, prefix),
        "task_notes": _task_notes(run.results),
        "figures": _figures(run, prefix),
        "validation_header": [title for title, _, _ in _VALIDATION_COLUMNS],
        "validation_rows": [
            [shown(as_number(row.get(key)), digits) for _, key, digits in _VALIDATION_COLUMNS] for row in run.validation
        ],
        "best": None if best is None else run.validation.index(dict(best)),
        **_data_table(run),
        "data_figure": _length_figure(run, prefix),
        "details": details,
    }


def _unigram(run: Run) -> float | None:
    return as_number(run.description.get(UNIGRAM_KEY))


def _tiles(run: Run, best: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    tiles = []

    def add(what: str, value: str, beside: str = "", wrong: bool = False) -> None:
        tiles.append({"what": what, "value": value, "beside": beside, "wrong": wrong})

    if run.validation:
        last = run.validation[-1] if best is None else best
        at = f"at step {last['step']}"
        loss, unigram = as_number(last.get("mlm_loss")), _unigram(run)
        beside = f"unigram baseline {shown(unigram, 3)}" if unigram is not None else at
        add("held-out MLM loss", shown(loss, 3), beside, wrong=loss is not None and not math.isfinite(loss))
        add("held-out perplexity", shown(as_number(last.get("perplexity")), 1), at)
        add("held-out MLM accuracy", percent(as_number(last.get("mlm_accuracy"))) + " %", at)
        if as_number(last.get("nsp_accuracy")) is not None:
            add("held-out NSP accuracy", percent(as_number(last.get("nsp_accuracy"))) + " %", "guessing gives 50 %")
    if run.train:
        rate = finite_mean(series(run.train, "tokens_per_second")[1])
        add("tokens per second", shown(rate, 0), "mean over the logged steps")
        add("optimizer steps", shown(as_number(run.train[-1]["step"]), 0), _seen(run))
    for group in run.results:
        split, metric = group["headline"]["split"], group["headline"]["metric"]
        scores = group["splits"][split]
        score, base = scores["metrics"][metric]["mean"], scores["baseline"][metric]["value"]
        wrong = score is None
        value = "undefined" if wrong else f"{percent(score)} %"
        add(f"{group['task']}, {metric}", value, "" if base is None else f"baseline {percent(base)} %", wrong=wrong)
    return tiles


def _seen(run: Run) -> str:
    pieces = [as_number(line.get("tokens")) for line in run.train]  # each line counts since the one before
    tokens = sum(piece for piece in pieces if piece is not None and math.isfinite(piece))
    return f"{shown(tokens / 1e6, 1)} M tokens" if tokens else ""


def _figures(run: Run, prefix: str) -> list[dict[str, str]]:
    if not run.train and not run.validation:
        return []
    unigram = _unigram(run)
    reference = None if unigram is None else ("unigram baseline", unigram)
    plans: list[tuple[str, str, str, tuple[str, float] | None]] = [
        ("MLM loss", "mlm_loss", "nats per prediction", reference),
        ("MLM accuracy", "mlm_accuracy", "share right", None),
        ("NSP loss", "nsp_loss", "nats per pair", ("guessing", math.log(2))),
        ("NSP accuracy", "nsp_accuracy", "share right", ("guessing", 0.5)),
        ("Throughput", "tokens_per_second", "tokens per second", None),
        ("Gradient norm", "grad_norm", "before clipping", None),
        ("Learning rate", "lr", "rate", None),
    ]
    figures = []
    for title, key, unit, line in plans:
        curves = [
            Curve(label=label, steps=steps, values=values, colour=colour, markers=markers)
            for label, rows, colour, markers in (
                ("training", run.train, TRAIN if key.endswith(("loss", "accuracy")) else HELD_OUT, False),
                ("held-out", run.validation, HELD_OUT, True),
            )
            for steps, values in [series(rows, key)]
            if steps
        ]
        if curves:
            figures.append({"title": title, "svg": curves_svg(f"{prefix}-{key}", curves, unit=unit, reference=line)})
    return figures


def task_label(group: Mapping[str, Any]) -> str:
    """The task, and what sets this group apart from others of it."""
    label = str(group["task"])
    if "start" in group:
        label += f" from {group['start']['task']}"
    if "bilstm" in group:
        label += " + BiLSTM"
    if "precision" in group:
        label += f" in {group['precision']}"
    if "best_of_grid" in group:
        label += f", best of {group['best_of_grid']} settings on dev"
    return label


def _task_rows(groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    for group in groups:
        for split, scores in group["splits"].items():
            for metric, summary in scores["metrics"].items():
                base = scores["baseline"][metric]["value"]
                mean = summary["mean"]
                over = None if mean is None or base is None else mean - base
                rows.append(
                    [
                        task_label(group),
                        split,
                        metric,
                        percent(mean),
                        "–" if summary["sd"] is None else percent(summary["sd"]),
                        f"{summary['n']}"
                        + (f" of {summary['n'] + summary['left_out']}" if summary["left_out"] else ""),
                        percent(base),
                        "–" if over is None else f"{100 * over:+.2f}",
                        shown(scores["n"], 0),
                    ]
                )
    return rows


def _task_notes(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = []
    for group in groups:
        for split, scores in group["splits"].items():
            for metric, summary in scores["metrics"].items():
                if summary["left_out"]:
                    reasons = ", ".join(summary["reasons"])
                    notes.append(
                        f"{group['task']} {split} {metric}: {summary['left_out']} run(s) without a score ({reasons}), "
                        "left out of the mean"
                    )
        notes += [f"{group['task']}: {warning}" for warning in group.get("warnings", [])]
    return notes


def _task_figure(groups: Sequence[Mapping[str, Any]], prefix: str) -> str:
    rows = []
    for group in groups:
        for split, scores in group["splits"].items():
            metric = group["headline"]["metric"]
            summary = scores["metrics"][metric]
            if summary["mean"] is not None:
                label = f"{task_label(group)} {split}, {metric}"
                rows.append((label, summary["mean"], summary["sd"], scores["baseline"][metric]["value"]))
    return scores_svg(f"{prefix}-tasks", rows) if rows else ""


def _data_table(run: Run) -> dict[str, Any]:
    """The plain numbers of both stats.json side by side."""
    parts = {part: dict(flatten(stats)) for part, stats in run.stats.items() if stats}
    keys = [key for stats in parts.values() for key in stats]
    rows = []
    for key in dict.fromkeys(keys):
        if key in ("schema", "lengths.bin_width"):
            continue
        numbers = [_stat(stats.get(key)) for stats in parts.values()]
        if any(number is not None for number in numbers):
            rows.append([key.replace("_", " ").replace(".", ": "), *(number or "–" for number in numbers)])
    return {"data_header": ["", *({"validation": "held-out"}.get(part, part) for part in parts)], "data_rows": rows}


def _length_figure(run: Run, prefix: str) -> str:
    """Lengths of the training examples, as the build counted them."""
    lengths = run.stats["train"].get("lengths")
    if not isinstance(lengths, dict) or not lengths.get("examples") or not lengths.get("bin_width"):
        return ""
    width, counts = int(lengths["bin_width"]), lengths["examples"]
    bins = [(f"{n * width}", float(count)) for n, count in enumerate(counts)]
    return bars_svg(f"{prefix}-lengths", bins, unit=f"tokens of a training example, in bins of {width}")


def _stat(text: str | None) -> str | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return shown(value, 0 if value == int(value) else 4) if math.isfinite(value) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m eval.report", description=__doc__)
    parser.add_argument("--runs", required=True, type=Path, help="a run folder (runs/demo), or a folder of runs")
    parser.add_argument("--output", required=True, type=Path, help="folder for index.html")
    options = parser.parse_args(arguments)
    try:
        path = write_report(options.runs, options.output)
    except ReportError as error:
        print(f"eval.report: {error}", file=sys.stderr)
        return 2
    print(f"report: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
