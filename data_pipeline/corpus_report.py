"""The corpus report: one HTML page about a data set, with its figures inside. `python -m data_pipeline.stats` writes it."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data_pipeline.artefacts import write_text
from data_pipeline.block_codec import ShardError, decode_block
from data_pipeline.buckets import SPLITS
from data_pipeline.clean_stage import REPORT_NAME
from data_pipeline.inspect import describe, find_tokenizer
from data_pipeline.records import Block
from data_pipeline.shard_index import ShardIndex
from data_pipeline.tokenizer import Tokenizer

FILE_NAME = "corpus.html"
CLEANING = Path("cleaning", REPORT_NAME)
SAMPLED_BLOCKS = 64
"""Blocks, evenly over the set, whose tokens are counted for the figure of frequencies."""
_EXAMPLES = 4
_COLOUR = "#0b6e8a"
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1f2933;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2.5rem;border-bottom:1px solid #e3e8ec}h3{font-size:1rem}
table{border-collapse:collapse}td,th{padding:.15rem .8rem .15rem 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}th{color:#697886;font-weight:normal}
.figures{display:flex;flex-wrap:wrap;gap:1rem}.figures svg{width:29rem;height:auto}
.warning{background:#fff4e5;border-left:4px solid #c2601a;padding:.4rem .8rem;margin:.4rem 0}
pre{white-space:pre-wrap;background:#f5f7f8;padding:.6rem;font-size:.85rem}
"""


def write_corpus_report(directory: Path, output: Path | None = None) -> Path:
    """Write the page and return its path.

    Args:
        directory: `data.dir` of a build, or the folder of one split.
        output: the file; default: `corpus.html` in `data.dir`.

    Raises:
        ShardError: no finished data set there, or a damaged one.
    """
    folders = [directory] if (directory / "index.json").exists() else [directory / split for split in SPLITS]
    folders = [folder for folder in folders if (folder / "index.json").exists()]
    if not folders:
        raise ShardError(
            f"{directory}: holds no finished data set; name data.dir of a build, or a folder with index.json"
        )
    base = directory.parent if folders[0] == directory else directory
    body = _cleaning(base / CLEANING) + "".join(_section(folder) for folder in folders)
    title = f"Corpus report: {html.escape(str(base))}"
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1>{body}</html>\n"
    )
    path = output or base / FILE_NAME
    write_text(path, page)
    return path


def _section(folder: Path) -> str:
    index = ShardIndex.open(folder)
    tokenizer = find_tokenizer(folder, None)
    path = folder / "stats.json"
    if not path.exists():
        raise ShardError(f"{folder}: has no stats.json; the build writes it beside the index")
    stats = json.loads(path.read_bytes())
    blocks = _sample(index)
    figures = [_lengths(stats["lengths"]), _frequencies(blocks, index.info.vocab_size), _masks(stats["masking"])]
    if dropped := {name: count for name, count in stats["corpus"]["documents_dropped"].items() if count}:
        figures.append(_dropped(dropped))
    totals = {
        "examples": index.examples,
        "tokens": index.tokens,
        "shards": len(index.shards),
        "tokens cut off by truncation": stats["truncated_tokens"],
        "share of random pairs": stats["nsp"]["random_share"],
        "tokens that continue a word": stats["continuation_share"],
    }
    corpus = {name: value for name, value in stats["corpus"].items() if not isinstance(value, dict)}
    notes = "".join(f'<p class="warning">{html.escape(note)}</p>' for note in stats.get("warnings", []))
    parts = [
        f"<h2>{html.escape(folder.name)}</h2>{notes}{_table(totals)}",
        f'<div class="figures">{"".join(figures)}</div>',
        f"<h3>Corpus, both splits</h3>{_table(corpus)}",
        _table({f"dropped: {name}": count for name, count in stats["corpus"]["documents_dropped"].items()}),
        f"<h3>Frequent tokens</h3>{_frequent(blocks, tokenizer)}" if tokenizer else "",
        f"<h3>Examples</h3>{_examples(blocks, tokenizer)}",
        f"<h3>Settings</h3>{_table(_flat(index.info.settings) | {'tokenizer': index.info.tokenizer})}",
    ]
    index.close()
    return "".join(parts)


def _kinds(counts: dict[str, int]) -> str:
    """Languages, rules or evaluation files with their counts, the most frequent first."""
    found = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:12]
    return f"<p>{html.escape(', '.join(f'{name} {count:,}' for name, count in found))}</p>" if found else ""


def _cleaning(path: Path) -> str:
    """What cleaning left out and why, with samples; nothing where the build cleaned nothing."""
    if not path.exists():
        return ""
    report = json.loads(path.read_bytes())
    rows = "".join(
        f"<h3>{html.escape(reason.replace('_', ' '))}: {report['dropped'].get(reason, 0):,}</h3>"
        f"{_kinds(report['kinds'].get(reason, {}))}{_table_of(samples)}"
        for reason, samples in report["samples"].items()
    )
    return f"<h2>Left out by cleaning</h2>{rows or '<p>Nothing.</p>'}"


def _table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = (f"<td>{'</td><td>'.join(html.escape(str(value)) for value in row.values())}</td>" for row in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _sample(index: ShardIndex) -> list[Block]:
    rows = np.unique(np.linspace(0, len(index.blocks) - 1, SAMPLED_BLOCKS).astype(int)).tolist()
    return [decode_block(index.read_block(row), where=index.where(row)) for row in rows]


def _table(rows: Mapping[str, Any]) -> str:
    cells = []
    for name, value in rows.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        shown = f"{value:,}" if isinstance(value, int) and number else f"{value:.4f}" if number else str(value)
        css = ' class="n"' if number else ""
        cells.append(f"<tr><th>{html.escape(name.replace('_', ' '))}</th><td{css}>{html.escape(shown)}</td></tr>")
    return f"<table>{''.join(cells)}</table>"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _frequent(blocks: Sequence[Block], tokenizer: Tokenizer) -> str:
    counts = np.bincount(np.concatenate([block.input_ids for block in blocks]), minlength=tokenizer.vocab_size)
    top = np.argsort(-counts, kind="stable")[:60]
    return "<p>" + " · ".join(html.escape(f"{tokenizer.tokens[i]} {counts[i]:,}") for i in top.tolist()) + "</p>"


def _examples(blocks: Sequence[Block], tokenizer: Tokenizer | None) -> str:
    chosen = [blocks[i] for i in np.unique(np.linspace(0, len(blocks) - 1, _EXAMPLES).astype(int)).tolist()]
    lines = [line for block in chosen for line in [*describe(block, 0, 0, tokenizer), ""]]
    return (
        "<p>Predictions: {what the encoder sees &lt;- the true token}, {= token} is left as it is.</p>"
        + f"<pre>{html.escape(chr(10).join(lines))}</pre>"
    )


def _figure(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.2, 3.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e8ec")
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure, name: str) -> str:
    """The figure as SVG text: words stay words, and the same figure has the same bytes."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _lengths(lengths: Mapping[str, Any]) -> str:
    figure, axes = _figure("Length of an example", "tokens", "examples")
    width, counts = lengths["bin_width"], lengths["examples"]
    axes.bar(np.arange(len(counts)) * width, counts, width=0.9 * width, align="edge", color=_COLOUR)
    return _svg(figure, "lengths")


def _frequencies(blocks: Sequence[Block], vocab_size: int) -> str:
    counts = np.bincount(np.concatenate([block.input_ids for block in blocks]), minlength=vocab_size)
    ordered = np.sort(counts[counts > 0])[::-1]
    used = f"{len(ordered):,} of {vocab_size:,} entries occur in the sample"
    figure, axes = _figure(f"Token frequency by rank: {used}", "rank", "times in the sample")
    axes.loglog(np.arange(1, len(ordered) + 1), ordered, color=_COLOUR)
    return _svg(figure, "frequencies")


def _masks(masking: Mapping[str, Any]) -> str:
    title = f"Predictions: {masking['share_of_tokens']:.2%} of the tokens in each of {masking['sets']} sets"
    figure, axes = _figure(title, "what the encoder sees", "share")
    values = [masking["masked_share"], masking["random_share"], masking["kept_share"]]
    axes.bar_label(axes.bar(["mask", "random token", "itself"], values, color=_COLOUR), fmt="{:.3f}")
    return _svg(figure, "masks")


def _dropped(dropped: Mapping[str, int]) -> str:
    figure, axes = _figure("Dropped documents by reason", "documents", "")
    bars = axes.barh(list(dropped), list(dropped.values()), color=_COLOUR)
    axes.bar_label(bars, fmt="{:,.0f}")
    return _svg(figure, "dropped")
