"""The fine-tuning loop: one for every kind of head, on flat packed tokens."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data_pipeline.order import permutation
from eval.feature_model import FeatureModel
from eval.frozen_states import FrozenStates
from eval.model import TaskModel
from eval.packing import build_batch
from eval.problems import Problem
from eval.tasks import Recipe
from eval.word_rows import RowsInUse
from pretrain.config import ScheduleConfig
from pretrain.encoder import Encoder
from pretrain.parameter_groups import parameter_groups
from pretrain.schedule import learning_rate


@dataclass(kw_only=True)
class Finetuned:
    """A trained model and how it came about.

    Attributes:
        model: in evaluation mode.
        losses: mean loss of every optimizer step.
        seconds: of the loop alone.
        examples_per_second, tokens_per_second: of the loop alone; feature-based: words count, not tokens.
        frozen_seconds: before it, for the states of a frozen encoder that were not there yet.
        diverged_at: the step with the first non-finite loss, where training stopped; None if there was none.
    """

    model: TaskModel | FeatureModel
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    examples_per_second: float = 0.0
    tokens_per_second: float = 0.0
    frozen_seconds: float = 0.0
    diverged_at: int | None = None


def total_steps(examples: int, recipe: Recipe) -> int:
    """Optimizer steps of a recipe; the last batch of an epoch may be smaller."""
    return math.ceil(examples / recipe.batch_size) * recipe.epochs


def epoch_batches(examples: int, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The units of each batch of an epoch: a pure function of its arguments."""
    order = permutation(examples, seed, epoch)
    return [order[first : first + batch_size] for first in range(0, examples, batch_size)]


def finetune(
    encoder: Encoder,
    problem: Problem,
    recipe: Recipe,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    label: str = "fine-tuning",
    features: str = "",
    frozen: FrozenStates | None = None,
    max_steps: int | None = None,
) -> Finetuned:
    """Train an encoder and a new head on a problem.

    AdamW with linear warm-up and decay; biases and layer norms do not decay; gradients are clipped by their global
    norm. The order of examples, the head's first weights and dropout depend on the seed alone.

    Args:
        encoder: changed in place.
        problem: with labels.
        recipe: batch size, rate, epochs and so on.
        seed: any non-negative number.
        device: where to compute.
        label: in front of the progress bar, which is shown on a terminal only.
        features: train a BiLSTM on these states of the frozen encoder instead, see `FeatureModel`.
        frozen: where such states are kept; by default with the model.
        max_steps: stop after as many, with the schedule of the whole recipe.

    Raises:
        TaskError: features that the encoder does not have.
    """
    start = time.perf_counter()
    model, problem, build, words = _start(encoder, problem, seed, device, features, frozen)
    result = Finetuned(model=model, frozen_seconds=time.perf_counter() - start if features else 0.0)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, recipe.weight_decay), lr=recipe.learning_rate, eps=1e-6, fused=True
    )
    steps = total_steps(len(problem), recipe)
    schedule = ScheduleConfig(shape="linear", warmup_steps=int(steps * recipe.warmup))
    tokens, examples, decay, start = 0, 0, 1.0, time.perf_counter()
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task(label, total=steps)
        for epoch in range(recipe.epochs):
            for units in epoch_batches(len(problem), recipe.batch_size, seed, epoch):
                rate = learning_rate(
                    len(result.losses) + 1, peak=recipe.learning_rate, total_steps=steps, schedule=schedule
                )
                batch = build(problem.rows(units)).to(device)
                result.losses.append(_step(model, optimizer, problem, units, batch, rate, recipe.clip))
                decay *= 1.0 - rate * recipe.weight_decay
                tokens, examples = tokens + batch.tokens, examples + len(units)
                progress.update(bar, advance=1, description=f"{label}  loss {result.losses[-1]:.3f}")
                if not math.isfinite(result.losses[-1]):
                    result.diverged_at = len(result.losses)
                if result.diverged_at or len(result.losses) == max_steps:
                    break
            if result.diverged_at or len(result.losses) == max_steps:
                break
    result.seconds = time.perf_counter() - start
    result.examples_per_second, result.tokens_per_second = examples / result.seconds, tokens / result.seconds
    if words is not None:
        words.put_back(decay)
    model.eval()
    return result


def _start(
    encoder: Encoder,
    problem: Problem,
    seed: int,
    device: torch.device | str,
    features: str,
    frozen: FrozenStates | None,
) -> tuple[TaskModel | FeatureModel, Problem, Callable[[np.ndarray], Any], RowsInUse | None]:
    """The model on its device, what it trains on, what builds a batch of rows, and the word rows in use."""
    words = None if features else RowsInUse(encoder, problem.encoded)
    torch.manual_seed(seed)
    if not features:
        model = TaskModel(encoder, problem.outputs, per_token=problem.per_token).to(device).train()
        return model, problem, partial(build_batch, words.encoded if words else problem.encoded), words
    feature_model = FeatureModel(encoder, problem.outputs, features, frozen).to(device).train()
    states = feature_model.words(problem)
    return feature_model, states, states.batch, None


def _step(model, optimizer, problem: Problem, units, batch, rate: float, clip: float) -> float:
    """One optimizer step; the loss before it. A non-finite loss changes nothing."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = problem.loss(model(batch), units)
    value = float(loss.detach())
    if math.isfinite(value):
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip, error_if_nonfinite=False)
        optimizer.step()
    return value
