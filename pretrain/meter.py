"""Sums between two lines of metrics: kept on the device, brought together over ranks once a line."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pretrain.collectives import all_sum
from pretrain.engine import SUMS, StepResult, TrainEngine
from pretrain.stopwatch import Stopwatch
from pretrain.telemetry import Peak, memory_megabytes, training_flops

_QUANTILES = {"p50": 0.5, "p95": 0.95, "max": 1.0}


class Meter:
    """Collects the steps of one logging interval.

    Args:
        engine: whose ranks take part.
        peak: FLOP/s that one rank could do.
    """

    def __init__(self, engine: TrainEngine, peak: Peak) -> None:
        self._engine, self._peak = engine, peak
        self._reset()

    def _reset(self) -> None:
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self._engine.device)
        self._attempted = torch.zeros(2, dtype=torch.float64, device=self._engine.device)
        self._steps = self._applied = 0
        self._waited = self._excluded = 0.0
        self._last: StepResult | None = None
        self._begin = self._step_began = time.perf_counter()
        self._durations: list[float] = []
        self._forwards: list[Stopwatch] = []

    def add(self, result: StepResult, *, waited: float) -> None:
        """Count one step; `waited` seconds of it passed until its data was there."""
        self._steps += 1
        now = time.perf_counter()
        self._durations.append(now - self._step_began)
        self._step_began = now
        self._waited += waited
        self._attempted += result.sums[-2:]
        self._forwards.append(result.forward)
        self._last = result
        if result.applied:
            self._applied += 1
            self._sums += result.sums

    def exclude(self, seconds: float) -> None:
        """This much of the interval was validation or saving, not training."""
        self._excluded += seconds
        self._step_began = time.perf_counter()

    def record(self, *, step: int, lr: float, skipped_steps: int) -> dict[str, Any]:
        """A "train" line of metrics.jsonl, see docs/design.md; the next interval begins. Every rank calls this.

        Losses are means over the interval's applied steps of the loss that was optimised. This is the interval's one wait for
        the device, and its one exchange with other ranks beside training itself.
        """
        assert self._last is not None
        seconds = max(time.perf_counter() - self._begin - self._excluded, 1e-9)
        own = [self._waited / seconds, *self._by_rank()]
        extra = torch.tensor(own, dtype=torch.float64, device=self._engine.device)
        shared = all_sum(torch.cat([self._sums, self._attempted, extra])).tolist()
        total = dict(zip(SUMS, shared, strict=False))
        tokens, examples, waited, *by_rank = shared[len(SUMS) :]
        mean = {name: total[name] / self._applied if self._applied else math.nan for name in SUMS[:3]}
        pairs = total["pairs"]
        ranks = self._engine.world.size
        predictions = total["predictions"] * self._steps / max(self._applied, 1)
        flops = training_flops(self._engine.config.model, tokens=tokens, predictions=predictions, examples=examples)
        record = {
            "kind": "train",
            "step": step,
            "time": time.time(),
            "loss": sum(mean.values()),
            "mlm_loss": mean["mlm_loss"],
            "nsp_loss": mean["nsp_loss"] if pairs else None,
            "mlm_accuracy": total["mlm_correct"] / max(total["predictions"], 1),
            "nsp_accuracy": total["nsp_correct"] / pairs if pairs else None,
            "lr": lr,
            "grad_norm": self._last.grad_norm,
            "tokens": int(tokens),
            "examples": int(examples),
            "tokens_per_second": tokens / seconds,
            "examples_per_second": examples / seconds,
            "step_seconds": seconds / self._steps,
            **{f"step_seconds_{name}": float(np.quantile(self._durations, q)) for name, q in _QUANTILES.items()},
            **straggler(by_rank),
            "data_wait_share": waited / ranks,
            "mfu": flops / seconds / (self._peak.flops * ranks),
            "memory_mb": memory_megabytes(self._engine.device),
            "skipped_steps": skipped_steps,
        }
        if self._engine.config.distillation is not None:
            record["distillation_loss"] = mean["extra_loss"]
        self._reset()
        return record

    def _by_rank(self) -> list[float]:
        """Seconds a step that this rank needs for itself, in its place among all ranks: waiting for data, forward passes.

        All ranks leave a step together, so their whole steps are equally long; these parts wait for no other rank.
        """
        own = [0.0] * self._engine.world.size
        forward = sum(stopwatch.seconds() for stopwatch in self._forwards)
        own[self._engine.world.rank] = (self._waited + forward) / self._steps
        return own


def straggler(seconds: Sequence[float]) -> dict[str, float | int | None]:
    """Which rank the others wait for: the one that needs most time for itself, and how many times the median that is.

    Args:
        seconds: of each rank. One rank alone has nobody to wait for it.
    """
    if len(seconds) < 2:
        return {"straggler_rank": None, "straggler_ratio": None}
    slowest = int(np.argmax(seconds))
    return {"straggler_rank": slowest, "straggler_ratio": seconds[slowest] / max(float(np.median(seconds)), 1e-9)}
