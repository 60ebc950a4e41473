"""The held-out loss: exact over ranks, every example once, and what guessing by frequency alone would cost.

Legend: `V` vocabulary, `P` predictions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from data_pipeline.records import Batch
from pretrain.collectives import all_sum
from pretrain.engine import SUMS, TrainEngine


def validate_model(engine: TrainEngine, batches: Iterable[Batch]) -> dict[str, Any]:
    """Losses and accuracies over all ranks' batches; every rank calls this with its share.

    Sums are reduced once at the end, so ranks may hold different numbers of batches.

    Returns:
        the keys of a validation record in metrics.jsonl, see docs/design.md, without step and time.
    """
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=engine.device)
    for batch, counts in _in_lockstep(engine, batches):
        sums += engine.evaluate(batch) * counts
    total = dict(zip(SUMS, all_sum(sums).tolist(), strict=True))
    mlm_loss = total["mlm_loss"] / total["predictions"] if total["predictions"] else math.nan
    pairs = total["pairs"]
    return {
        "mlm_loss": mlm_loss,
        "mlm_accuracy": total["mlm_correct"] / max(total["predictions"], 1),
        "perplexity": math.exp(mlm_loss) if mlm_loss < 700 else math.inf,  # exp(710) overflows a double
        "nsp_loss": total["nsp_loss"] / pairs if pairs else None,
        "nsp_accuracy": total["nsp_correct"] / pairs if pairs else None,
        "examples": int(total["examples"]),
        "predictions": int(total["predictions"]),
    }


def _in_lockstep(engine: TrainEngine, batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Each batch, and whether it counts.

    ZeRO-3 gathers weights from all ranks in every forward pass: a rank that has run out repeats its last batch, which
    does not count, until all have.

    Raises:
        ValueError: ZeRO-3 and a rank without a single batch.
    """
    if engine.stage < 3:
        yield from ((batch, True) for batch in batches)
        return
    source, last = iter(batches), None
    while True:
        batch = next(source, None)
        left = torch.tensor([float(batch is not None), float(batch is None and last is None)], device=engine.device)
        if not all_sum(left)[0]:
            return
        if left[1]:
            raise ValueError("ZeRO-3 validation needs at least one held-out example on every rank; hold out more")
        last = batch or last
        assert last is not None
        yield last, batch is not None


def label_counts(batches: Iterable[Batch], vocab_size: int) -> np.ndarray:
    """How often each id is the label of a prediction: (V,) int64."""
    counts = np.zeros(vocab_size, np.int64)
    for batch in batches:
        counts += np.bincount(batch.mask_labels_P.numpy(), minlength=vocab_size)
    return counts


def token_counts(batches: Iterable[Batch], vocab_size: int, *, special_ids: Iterable[int], limit: int) -> np.ndarray:
    """How often each ordinary id occurs in the clean text of the batches: (V,) int64.

    Args:
        batches: from the training stream; masked positions count as their label.
        vocab_size: V.
        special_ids: structural ids, which are never predicted and get no share.
        limit: stop after this many tokens.
    """
    counts = np.zeros(vocab_size, np.int64)
    for batch in batches:
        ids = batch.input_ids_T.clone()
        ids[batch.mask_positions_P] = batch.mask_labels_P
        counts += np.bincount(ids.numpy(), minlength=vocab_size)
        if counts.sum() >= limit:
            break
    counts[list(special_ids)] = 0
    return counts


def unigram_loss(training_counts: np.ndarray, held_out_labels: np.ndarray) -> float:
    """Mean cross entropy in nats of held-out labels under the training text's frequencies.

    What a model scores that knows how common each token is and never looks at the context. One is added to every count
    so that a token unseen in training has a finite cost.

    Args:
        training_counts: (V,) occurrences in the training text.
        held_out_labels: (V,) occurrences among held-out predictions.
    """
    smoothed = training_counts.astype(np.float64) + 1
    log_share = np.log(smoothed) - math.log(smoothed.sum())
    return float(-(held_out_labels * log_share).sum() / held_out_labels.sum())
