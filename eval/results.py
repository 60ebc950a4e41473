"""Result files: one for each (task, recipe, seed), and the summary over seeds. Written atomically, never overwritten by
another experiment: the file's name carries a hash of everything that a score depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from data_pipeline.artefacts import write_text
from eval.metrics import Score, summarise

SCHEMA = 1
IDENTITY = (
    *("task", "task_version", "recipe", "seed", "train_examples_limit", "data_sha256", "model", "tokenizer"),
    *("start", "bilstm", "precision"),
)
"""Keys of a result that decide its score; `start` only where another task was trained on first, `bilstm` only where a new
BiLSTM is on top of the encoder, `precision` only where it is not fp32."""


def identity_hash(result: Mapping[str, Any]) -> str:
    """Twelve hex digits over the keys in `IDENTITY`."""
    text = json.dumps({key: result[key] for key in IDENTITY if key in result}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def result_path(output: Path, result: Mapping[str, Any]) -> Path:
    """Where the result of an experiment lies."""
    return output / result["task"] / f"seed-{result['seed']}-{identity_hash(result)}.json"


def write_result(output: Path, result: Mapping[str, Any]) -> Path:
    """Write one result atomically."""
    path = result_path(output, result)
    write_text(path, json.dumps(result, indent=1, sort_keys=True, allow_nan=False) + "\n")
    return path


def read_result(path: Path) -> dict[str, Any] | None:
    """A finished result, or None where there is none of this schema."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and result.get("schema") == SCHEMA else None


def scores_as_json(scores: Mapping[str, Score]) -> dict[str, dict[str, Any]]:
    """Scores as plain values; an undefined one is null with its reason."""
    return {name: {"value": score.value, "undefined": score.undefined} for name, score in scores.items()}


def write_summary(output: Path) -> Path:
    """Write `results.json`: mean, standard deviation and n over the seeds of each experiment in the folder."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(output.glob("*/seed-*.json")):
        result = read_result(path)
        if result is not None:
            groups.setdefault(_identity(result, "seed"), []).append(result)
    path = output / "results.json"
    summaries = [_summary(group) for group in groups.values()]
    _mark_grids(summaries)
    tree = {"schema": SCHEMA, "results": summaries}
    write_text(path, json.dumps(tree, indent=1, sort_keys=True, allow_nan=False) + "\n")
    return path


def _identity(result: Mapping[str, Any], *without: str) -> str:
    return json.dumps({key: result[key] for key in IDENTITY if key in result and key not in without}, sort_keys=True)


def _mark_grids(summaries: list[dict[str, Any]]) -> None:
    """Where one task was run with several settings, the best mean on dev is marked with the number of settings it is
    the best of: it was chosen on the very examples that it is scored on."""
    grids: dict[str, list[dict[str, Any]]] = {}
    for summary in summaries:
        grids.setdefault(_identity(summary, "seed", "recipe"), []).append(summary)
    for grid in grids.values():
        means = [_headline_mean(summary) for summary in grid]
        if len(grid) > 1 and max(means) > float("-inf"):
            grid[means.index(max(means))]["best_of_grid"] = len(grid)


def _headline_mean(summary: Mapping[str, Any]) -> float:
    headline = summary["headline"]
    mean = summary["splits"][headline["split"]]["metrics"][headline["metric"]]["mean"]
    return float("-inf") if mean is None else mean


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    results = sorted(results, key=lambda result: result["seed"])
    first = results[0]
    wanted = (*IDENTITY, "model_folder", "headline", "train_examples")
    kept = {key: first[key] for key in wanted if key != "seed" and key in first}
    return {
        **kept,
        "seeds": [result["seed"] for result in results],
        "seconds": sum(result["seconds"] for result in results),
        "splits": {split: _split_summary(split, results) for split in first["splits"]},
        "warnings": sorted({warning for result in results for warning in result["warnings"]}),
    }


def _split_summary(split: str, results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    splits = [result["splits"][split] for result in results]
    metrics = {}
    for name in splits[0]["metrics"]:
        entries = [part["metrics"][name] for part in splits]
        summary = summarise([entry["value"] for entry in entries])
        metrics[name] = {
            "mean": summary.mean,
            "sd": summary.sd,
            "n": summary.n,
            "left_out": summary.left_out,
            "reasons": sorted({entry["undefined"] for entry in entries if entry["undefined"]}),
        }
    return {"n": splits[0]["n"], "metrics": metrics, "baseline": splits[0]["baseline"]}
