"""The report's figures as SVG text to be set inside a page: no files, no fonts, no scripts from elsewhere."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#697886", "#e3e8ec"
TRAIN, HELD_OUT, REFERENCE, WRONG = "#9bb4c4", "#0b6e8a", "#c2601a", "#b3261e"

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: selectable, and in the page's own font
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One line of a figure.

    Attributes:
        label: in the legend.
        steps, values: non-finite values are drawn as crosses at the upper edge, never joined.
        colour: any matplotlib colour.
        markers: draw the points too (few values).
    """

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    colour: str
    markers: bool = False


def curves_svg(
    name: str, curves: Sequence[Curve], *, unit: str, reference: tuple[str, float] | None = None, log: bool = False
) -> str:
    """Curves over the step, with a dashed reference line where there is one.

    Args:
        name: a short word, unique in the page: it keeps the ids of two figures apart.
        unit: label of the vertical axis.
        reference: legend and value of a constant to compare with.
        log: logarithmic vertical axis.
    """
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure, axes = _figure(width=5.6, height=3.1)
        for curve in curves:
            _draw(axes, curve)
        if reference and math.isfinite(reference[1]):
            axes.axhline(reference[1], color=REFERENCE, linestyle=(0, (5, 3)), linewidth=1.4, label=reference[0])
        if log:
            axes.set_yscale("log")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(unit)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9, loc="best", labelcolor=INK)
        return _svg(figure)


def scores_svg(name: str, rows: Sequence[tuple[str, float, float | None, float | None]]) -> str:
    """Task scores as bars, in per cent: (label, score, standard deviation, baseline), the baseline as a mark."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure, axes = _figure(width=7.4, height=0.75 + 0.42 * len(rows))
        places = range(len(rows))
        values = [100 * score for _, score, _, _ in rows]
        axes.barh(places, values, height=0.55, color=HELD_OUT, label="score")
        errors = [(place, 100 * row[1], 100 * row[2]) for place, row in enumerate(rows) if row[2]]
        for place, value, error in errors:
            axes.errorbar(value, place, xerr=error, color=INK, linewidth=1.2, capsize=3)
        marks = [(100 * row[3], place) for place, row in enumerate(rows) if row[3] is not None]
        if marks:
            axes.plot(*zip(*marks, strict=True), "|", color=REFERENCE, markersize=17, mew=2.6, label="baseline")
        axes.set_yticks(list(places), [row[0] for row in rows], color=INK)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(left=min(0, *values), right=100)
        axes.set_xlabel("headline metric, %")
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.02))
        return _svg(figure)


def bars_svg(name: str, counts: Sequence[tuple[str, float]], *, unit: str) -> str:
    """A histogram that is already counted: (label of the bin, count)."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure, axes = _figure(width=5.6, height=2.6)
        places = range(len(counts))
        axes.bar(places, [count for _, count in counts], width=0.85, color=TRAIN)
        every = max(1, len(counts) // 8)
        axes.set_xticks(list(places)[::every], [label for label, _ in counts][::every])
        axes.grid(axis="x", visible=False)
        axes.set_xlabel(unit)
        axes.set_ylabel("examples")
        return _svg(figure)


def _figure(*, width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
    return figure, axes


def _draw(axes: Axes, curve: Curve) -> None:
    broken = [value if math.isfinite(value) else math.nan for value in curve.values]
    style: dict[str, Any] = {"marker": "o", "markersize": 3.6} if curve.markers else {}
    axes.plot(curve.steps, broken, color=curve.colour, linewidth=1.7, label=curve.label, **style)
    bad = [step for step, value in zip(curve.steps, curve.values, strict=True) if not math.isfinite(value)]
    if bad:
        axes.plot(
            bad,
            [0.97] * len(bad),
            "x",
            color=WRONG,
            transform=axes.get_xaxis_transform(),
            label=f"{curve.label}: not finite",
        )


def _svg(figure: Figure) -> str:
    """The figure's SVG element without prolog and metadata: the same input gives the same text."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(
        r'<svg [^>]*viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" role="img">', text, count=1, flags=re.DOTALL
    )
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
