"""`python -m eval.similarity --model DIR --data DIR`: sentence similarity of an encoder as it is, without any training.

The cosine of the two sentences' mean-pooled hidden states against human scores (STS-B's test set with its gold scores by
default): what a sentence encoder is published with, and a check that imported weights compute what they should.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.metrics import compute
from eval.readers import ReadError, read_split
from eval.tasks import TaskError, select_tasks


def similarity_scores(model: Path, data: Path, task_name: str, split: str, max_length: int) -> dict[str, Any]:
    """Pearson and Spearman correlation of cosines with the gold scores, and the number of pairs.

    Raises:
        TaskError: the model cannot be read, or the task is no regression on pairs.
        ReadError: the split is missing or has no scores.
    """
    from eval.source import ModelSource

    (task, *_) = select_tasks([task_name])
    if task.head != "regression":
        raise TaskError(f"task {task.name} has no scores of pairs; try STS-B or SICK-R")
    examples = read_split(data, task, split)
    if examples.labels is None or examples.texts_b is None:
        raise ReadError(f"task {task.name}: {split} has no gold scores")
    source = ModelSource(model)
    length = min(max_length, source.max_positions)
    first, second = (embed(source, texts, length) for texts in (examples.texts_a, examples.texts_b))
    cosines = (first * second).sum(1)
    scores = compute(("spearman", "pearson"), examples.labels, cosines.astype(np.float64))
    return {name: score.value for name, score in scores.items()} | {
        "pairs": len(examples),
        "task": task.name,
        "split": split,
        "model": source.fingerprint,
    }


def embed(source: Any, texts: Sequence[str], max_length: int) -> np.ndarray:
    """(texts, hidden) float32: the mean of each text's hidden states, special tokens included, at length 1."""
    import torch

    from eval.packing import build_batch, encode_examples, token_budget_batches

    encoder = source.encoder().eval()
    encoded = encode_examples(source.tokenizer, texts, None, max_length)
    out = np.empty((len(texts), encoder.config.hidden), dtype=np.float32)
    with torch.inference_mode():
        for rows in token_budget_batches(encoded.lengths, 8192):
            batch = build_batch(encoded, rows)
            states_TD = encoder(
                batch.input_ids_T, batch.segment_ids_T, batch.position_ids_T, batch.cu_seqlens, batch.max_seqlen
            )
            sums = np.add.reduceat(states_TD.numpy(), batch.cu_seqlens[:-1].numpy(), axis=0)
            out[rows] = sums / encoded.lengths[rows][:, None]
    return out / np.linalg.norm(out, axis=1, keepdims=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m eval.similarity", description=__doc__)
    parser.add_argument("--model", required=True, type=Path, help="Hugging Face folder of an encoder")
    parser.add_argument("--data", type=Path, default=os.environ.get("CLOZEWORKS_DATA"), help="as for eval.run")
    parser.add_argument("--task", default="STS-B", help="a regression task on pairs (default STS-B)")
    parser.add_argument("--split", default="test_gold", help="default: STS-B's test set from its original release")
    parser.add_argument("--max-length", type=int, default=256, help="tokens of a sentence (default 256)")
    options = parser.parse_args(arguments)
    try:
        if options.data is None:
            raise TaskError("no data folder: pass --data or set CLOZEWORKS_DATA")
        scores = similarity_scores(options.model, Path(options.data), options.task, options.split, options.max_length)
    except (TaskError, ReadError) as error:
        print(f"eval.similarity: {error}", file=sys.stderr)
        return 2
    print(json.dumps(scores, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
