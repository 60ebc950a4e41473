"""The README of an exported model: what it is, what it was made from, how well it does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.hf_config import InterchangeError, model_class
from pretrain.model_config import EncoderConfig


def model_card(config: EncoderConfig, facts: Mapping[str, Any], card: Mapping[str, Any]) -> str:
    """Markdown with the front matter that model hubs read.

    Args:
        config: the encoder.
        facts: fingerprints, step, number of weights and the parity result.
        card: `validation` (an entry of metrics.jsonl), `scores` (of `read_scores`), `config` (the merged one of the run),
            `git`; each may be missing.
    """
    name = model_class(config)
    rows = {
        "class": f"`transformers.{name}`",
        "parameters": f"{facts['parameters']:,}",
        "layers x width x heads": f"{config.layers} x {config.hidden} x {config.heads}",
        "vocabulary": f"{config.vocab_size:,} entries",
        "longest input": f"{config.max_positions} tokens",
        "activation": config.activation,
        "sentence objective": config.sentence_objective,
        "optimizer steps": facts.get("step"),
        "run": facts.get("run_id"),
        "code": card.get("git"),
        "data fingerprint": facts.get("data"),
        "tokenizer fingerprint": facts.get("tokenizer"),
        "largest logit difference to transformers": f"{facts['largest_logit_difference']:.1e}",
    }
    lines = ["---", "library_name: transformers", "pipeline_tag: fill-mask", "tags: [bert, clozeworks]", "---", ""]
    lines += ["# Encoder pre-trained with Clozeworks", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in rows.items() if value not in (None, "")]
    scores = {
        key: value
        for key, value in (card.get("validation") or {}).items()
        if key not in ("kind", "time") and value is not None
    }
    if scores:
        lines += ["", "## Held-out scores", "", "| | |", "|---|---|"]
        lines += [
            f"| {key} | {value:.4f} |" if isinstance(value, float) else f"| {key} | {value} |"
            for key, value in scores.items()
        ]
    lines += _score_lines(card.get("scores") or [])
    lines += ["", "## Use", "", "```python", "from transformers import AutoTokenizer, " + name, ""]
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("DIR")\nmodel = {name}.from_pretrained("DIR")', "```"]
    if card.get("config"):
        lines += ["", "## Configuration of the run", "", "```json", json.dumps(card["config"], indent=1), "```"]
    return "\n".join(lines) + "\n"


def read_scores(folder: Path, fingerprint: str) -> list[dict[str, Any]]:
    """What an evaluation found for one model: the entries of `results.json` that name it.

    Args:
        folder: the output folder of `python -m eval.run`.
        fingerprint: `folder_fingerprint` of the model.

    Raises:
        InterchangeError: no results there, or none of this model.
    """
    path = folder / "results.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["results"]
        found = [entry for entry in entries if entry["model"] == fingerprint]
    except OSError as error:
        raise InterchangeError(f"{path}: cannot be read ({error.strerror}); expected what eval.run writes") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InterchangeError(f"{path}: not the results of eval.run ({error})") from error
    if not found:
        raise InterchangeError(f"{path}: holds {len(entries)} results, none of this model; evaluate this export first")
    return found


def _score_lines(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of task scores: the metric a task is ranked by, mean and standard deviation over seeds, never a maximum."""
    if not entries:
        return []
    rows = ["", "## Task scores", "", "| task | metric | split | mean | sd | seeds | fine-tuned with |"]
    rows.append("|---|---|---|---|---|---|---|")
    for entry in sorted(entries, key=lambda entry: entry["task"]):
        split, metric = entry["headline"]["split"], entry["headline"]["metric"]
        score = entry["splits"][split]["metrics"][metric]
        mean, deviation = (("-" if score[key] is None else f"{score[key]:.4f}") for key in ("mean", "sd"))
        recipe = entry["recipe"]
        notes = [f"{key} {recipe[key]:g}" for key in ("learning_rate", "batch_size", "epochs") if key in recipe]
        notes += [f"{entry['train_examples']:,} examples"] if "train_examples" in entry else []
        notes += [f"BiLSTM of {entry['bilstm']} on top"] if entry.get("bilstm") else []
        notes += [f"first on {entry['start']['task']}"] if entry.get("start") else []
        notes += [f"best of {entry['best_of_grid']} settings on this split"] if entry.get("best_of_grid") else []
        rows.append(
            f"| {entry['task']} | {metric} | {split} | {mean} | {deviation} | {score['n']} | {', '.join(notes)} |"
        )
    return rows
