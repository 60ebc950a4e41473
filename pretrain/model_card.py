"""The README of an exported model: what it is, what it was made from, how well it does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pretrain.hf_config import model_class
from pretrain.model_config import EncoderConfig


def model_card(config: EncoderConfig, parameters: int, facts: Mapping[str, Any], card: Mapping[str, Any]) -> str:
    """Markdown with the front matter that model hubs read.

    Args:
        config: the encoder.
        parameters: number of weights written.
        facts: fingerprints, step and the parity result.
        card: `validation` (an entry of metrics.jsonl), `config` (the merged one of the run), `git`; each may be missing.
    """
    name = model_class(config)
    rows = {
        "class": f"`transformers.{name}`",
        "parameters": f"{parameters:,}",
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
    lines += ["", "## Use", "", "```python", "from transformers import AutoTokenizer, " + name, ""]
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("DIR")\nmodel = {name}.from_pretrained("DIR")', "```"]
    if card.get("config"):
        lines += ["", "## Configuration of the run", "", "```json", json.dumps(card["config"], indent=1), "```"]
    return "\n".join(lines) + "\n"
