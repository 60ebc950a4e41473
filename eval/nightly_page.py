"""The nightly page and its Markdown: scores beside the night before, the best so far and the paper, and curves over steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.artefacts import write_text
from eval.ablation_table import as_markdown
from eval.nights import Night, Score, Verdict, judge
from eval.paper import paper_score
from eval.plots import HELD_OUT, Curve, curves_svg
from eval.report import percent, render_page, shown
from eval.report_data import Run, as_number, finite_mean

HEADER = ("task", "scored on", "metric", "score", "sd", "seeds", "night before", "change", "best so far", "BERT-base")


def write_pages(
    output: Path, nights: Sequence[Night], fresh: Collection[str], alerts: Sequence[str], runs: Sequence[Run]
) -> None:
    """Write `index.html` and `report.md`.

    Args:
        output: folder.
        nights: the whole history, in order.
        fresh: names of the runs that were evaluated tonight.
        alerts: what must be seen first.
        runs: their pretraining curves.
    """
    last = {night.run: night for night in nights}
    tables = [table_of(night, nights, fresh=night.run in fresh) for night in last.values()]
    newest = max((night.time for night in nights), default="never")
    subtitle = f"last evaluated {newest} UTC · {len(fresh)} of {len(runs)} runs had a new checkpoint"
    page = render_page(
        title="Clozeworks: the night's scores",
        subtitle=subtitle,
        runs=[_slim(run) for run in runs],
        tables=tables,
        figures=[figure for number, name in enumerate(last) for figure in _figures(name, nights, f"night{number}")],
        alerts=alerts,
    )
    write_text(output / "index.html", page)
    write_text(output / "report.md", _markdown(subtitle, tables, alerts))


def table_of(night: Night, nights: Sequence[Night], *, fresh: bool) -> dict[str, Any]:
    """Scores of one run's last evaluation beside its history."""
    earlier = nights[: nights.index(night)]
    verdicts = judge(night, earlier)
    notes = []
    when = "tonight" if fresh else "nothing new since then"
    loss, perplexity = (as_number(night.held_out.get(key)) for key in ("mlm_loss", "perplexity"))
    notes.append(
        f"Step {night.step}, {night.time} UTC ({when}); held-out MLM loss {shown(loss)}, perplexity {shown(perplexity, 2)}."
    )
    notes.append(f"Registered as version {night.version}." if night.version else "Not registered in MLflow.")
    if any(verdict.regression for verdict in verdicts):
        notes.append("▼: worse than the night before beyond the noise of seeds.")
    means = [verdict.score.mean for verdict in verdicts if verdict.score.headline]
    mean, left_out = finite_mean(means), [v.score.label for v in verdicts if v.score.headline and not _finite(v.score)]
    if mean is not None:
        beside = f"; left out, without a score: {', '.join(left_out)}" if left_out else ""
        notes.append(f"Mean of {len(means) - len(left_out)} headline scores: {percent(mean)}{beside}.")
    notes += [
        f"{v.score.label} {v.score.split}: the noise is unknown with one seed, the change is not judged."
        for v in verdicts
        if v.score.headline and v.before is not None and not v.judged and v.score.mean is not None
    ]
    notes += [
        f"{s.label} {s.split} {s.metric}: {s.left_out} seed(s) without a score, left out of the mean"
        for s in (v.score for v in verdicts)
        if s.left_out
    ]
    return {
        "title": f"{night.run}: task scores",
        "header": list(HEADER),
        "rows": [_row(v) for v in verdicts],
        "notes": notes,
    }


def _finite(score: Score | None) -> bool:
    return score is not None and score.mean is not None and math.isfinite(score.mean)


def _row(verdict: Verdict) -> list[str]:
    score, before, best = verdict.score, verdict.before, verdict.best
    change = "–"
    if _finite(score) and before is not None and _finite(before):
        change = f"{100 * ((score.mean or 0) - (before.mean or 0)):+.2f}"
    if verdict.regression:
        change += " ▼"
    if best is None:
        record = "–"
    elif _finite(score) and (score.mean or 0) > best[0]:
        record = f"{percent(best[0])} (step {best[1]}), beaten"
    else:
        record = f"{percent(best[0])} (step {best[1]})"
    return [
        score.label,
        score.split,
        score.metric,
        percent(score.mean),
        "–" if score.sd is None else percent(score.sd),
        f"{score.n}" + (f" of {score.n + score.left_out}" if score.left_out else ""),
        "–" if before is None else percent(before.mean),
        change,
        record,
        paper_score(score.task, score.split, score.metric),
    ]


def _figures(run: str, nights: Sequence[Night], prefix: str) -> list[dict[str, str]]:
    """A curve for each task over the steps that were evaluated, from two on."""
    mine = [night for night in nights if night.run == run]
    figures = []
    keys = dict.fromkeys(score.key for night in mine for score in night.scores if score.headline)
    for number, key in enumerate(keys):
        points = [(night.step, score.mean) for night in mine for score in night.scores if score.key == key]
        values = [100 * mean if mean is not None else math.nan for _, mean in points]
        if len(points) > 1:
            curve = Curve(
                label=key[1], steps=[step for step, _ in points], values=values, colour=HELD_OUT, markers=True
            )
            svg = curves_svg(f"{prefix}-{number}", [curve], unit=f"{key[2]}, %")
            figures.append({"title": f"{run}: {key[0]} {key[1]}", "svg": svg})
    return figures


def _slim(run: Run) -> Run:
    """The pretraining alone: task scores stand in the tables above."""
    return Run(
        name=run.name, train=run.train, validation=run.validation, description=run.description, stats={"train": {}}
    )


def _markdown(subtitle: str, tables: Sequence[dict[str, Any]], alerts: Sequence[str]) -> str:
    lines = ["# The night's scores", "", subtitle, ""]
    if alerts:
        lines += ["## Look here first", "", *(f"- {alert}" for alert in alerts), ""]
    return "\n".join([*lines, as_markdown(tables)])
