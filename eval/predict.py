"""Exact prediction: every example once, whatever the number of ranks (R33)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eval.feature_model import FeatureModel
from eval.model import TaskModel
from eval.packing import TOKENS_PER_BATCH, Encoded, build_batch, ranges, token_budget_batches
from eval.problems import Problem


@torch.inference_mode()
def predict(model: TaskModel | FeatureModel, problem: Problem, *, tokens: int | None = None) -> np.ndarray:
    """Logits of every row of the problem, in its order.

    Where a process group is up, each rank computes its share of the rows and all get the whole.

    Args:
        model, problem: that fit each other.
        tokens: ids of one batch; None: as `TOKENS_PER_BATCH` has it.

    Returns:
        float32, (E, K), or (N, K) for a head on every token; of a `FeatureModel` zeros beside the words' first pieces.
    """
    if isinstance(model, FeatureModel):
        words = model.words(problem)
        out = np.zeros((len(problem.encoded.ids), model.outputs), dtype=np.float32)
        out[words.first_pieces] = _logits(model, words.encoded, words.batch, tokens)
        return out
    return _logits(model, problem.encoded, partial(build_batch, problem.encoded), tokens)


def _logits(
    model: TaskModel | FeatureModel, encoded: Encoded, build: Callable[[np.ndarray], Any], tokens: int | None
) -> np.ndarray:
    device = next(model.parameters()).device
    batches = list(token_budget_batches(encoded.lengths, tokens or TOKENS_PER_BATCH.get(device.type, 8192)))
    grouped = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    was_training = model.training
    model.eval()
    parts = [(rows, model(build(rows).to(device)).cpu().numpy()) for rows in batches[rank::world]]
    model.train(was_training)
    if grouped:
        gathered: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(world)]
        dist.all_gather_object(gathered, parts)
        parts = [part for share in gathered for part in share]
    out = np.empty((len(encoded.ids) if model.per_token else len(encoded), model.outputs), dtype=np.float32)
    filled = 0
    for rows, logits in parts:
        out[ranges(encoded.offsets[rows], encoded.lengths[rows]) if model.per_token else rows] = logits
        filled += len(rows)
    if filled != len(encoded):
        raise RuntimeError(f"{filled} predictions for {len(encoded)} examples; expected each once")
    return out
