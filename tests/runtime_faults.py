"""Scenarios of tests/runtime_worker.py: gradients and weights that are not finite, and what is kept of the checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from runtime_common import STAGES, make_config, records, zero

from cluster.world import World
from data_pipeline.config import ConfigError
from data_pipeline.records import Batch
from pretrain import collectives, engine
from pretrain.checkpoint import list_steps, step_of
from pretrain.config import TrainConfig
from pretrain.engine import TrainEngine
from pretrain.run_data import RunData
from pretrain.stops import StopRequest, TrainingFault
from pretrain.trainer import train


def overflow(world: World, data: Path, out: Path) -> dict[str, Any]:
    """R22: an infinite gradient at step 3 changes nothing; the next step goes on at the same rate."""
    results = {}
    # DeepSpeed refuses fp16 on a CPU without fast fp16 instructions; torch's kernels do the arithmetic all the same.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    halves: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        # at its floor from the start: DeepSpeed's scaler would raise there instead of skipping the step
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 12, "min_loss_scale": 4096, "hysteresis": 1}},
    }
    for precision, half in halves.items():
        for stage in STAGES:
            config = make_config(
                data,
                out / f"overflow-{precision}-{stage}",
                deepspeed=zero(stage, **half),
                train={"steps": 6},
                model={"layers": 1},
                schedule={"warmup_steps": 2},
                validation={"every": 0},
            )
            try:
                results[f"{precision}-{stage}"] = _overflow_run(world, config)
            except Exception as error:  # noqa: BLE001 - reported by the test
                results[f"{precision}-{stage}"] = {"error": f"{type(error).__name__}: {error}"[:500]}
    return results


def _overflow_run(world: World, config: TrainConfig) -> dict[str, Any]:
    weights: list[dict[str, torch.Tensor]] = []
    with broken_gradients({3}, after=lambda trainer: weights.append(trainer.full_weights())):
        code = train(RunData(config).model_config(), world, RunData(config), StopRequest())
    lines = records(Path(config.run.dir))
    same = all(torch.equal(weights[1][name], weights[2][name]) for name in weights[1])
    moved = any(not torch.equal(weights[2][name], weights[3][name]) for name in weights[2])
    return {
        "code": code,
        "rates": [line["lr"] for line in lines],
        "skipped": [line["skipped_steps"] for line in lines],
        "norm": [line["grad_norm"] for line in lines],
        "moved_at_2": sum(float((weights[1][name] - weights[0][name]).abs().sum()) for name in weights[0]),
        "unchanged_at_3": same,
        "moved_at_4": moved,
    }


class broken_gradients:
    """While active, rank 0's loss has an infinite gradient at these steps; `after(engine)` runs after every step."""

    def __init__(self, steps: Any, after: Any = lambda trainer: None) -> None:
        self.steps, self.after = steps, after

    def __enter__(self) -> None:
        self.step, objective = TrainEngine.step, engine._Objective.forward
        self.objective, active = objective, [False]
        outer = self

        def step(trainer: TrainEngine, batches: Any, *, number: int, **more: Any) -> Any:
            active[0] = number in outer.steps and trainer.world.rank == 0
            result = outer.step(trainer, batches, number=number, **more)
            active[0] = False
            outer.after(trainer)
            return result

        def forward(module: Any, batch: Batch, weights: torch.Tensor) -> Any:
            loss, sums = objective(module, batch, weights)
            if active[0]:
                loss.register_hook(lambda gradient: gradient * math.inf)
            return loss, sums

        TrainEngine.step, engine._Objective.forward = step, forward

    def __exit__(self, *_: object) -> None:
        TrainEngine.step, engine._Objective.forward = self.step, self.objective


def faults(world: World, data: Path, out: Path) -> dict[str, Any]:
    """R22 and R27: endless overflow ends the job; non-finite weights are not saved; retention; a damaged checkpoint."""
    results: dict[str, Any] = {}
    config = make_config(
        data,
        out / "endless",
        train={"steps": 20},
        faults={"max_skipped_in_a_row": 3},
        checkpoint={"every": 2, "keep": 2},
    )
    opened = RunData(config)
    with broken_gradients(range(5, 99)):
        try:
            train(opened.model_config(), world, opened, StopRequest())
        except TrainingFault as fault:
            results["endless"] = str(fault)
    results["endless_steps"] = [step_of(folder) for folder in list_steps(out / "endless/checkpoints")]

    def poison(trainer: TrainEngine) -> None:
        with torch.no_grad():
            next(trainer._engine.module.parameters()).fill_(math.nan)

    config = make_config(data, out / "poisoned", checkpoint={"every": 2})
    opened = RunData(config)
    with broken_gradients((), after=poison):
        try:
            train(opened.model_config(), world, opened, StopRequest())
        except TrainingFault as fault:
            results["poisoned"] = str(fault)
    results["poisoned_left"] = sorted(path.name for path in (out / "poisoned/checkpoints").iterdir())

    config = make_config(
        data,
        out / "kept",
        train={"steps": 8},
        checkpoint={"every": 2, "keep": 2, "keep_best": False, "pinned": [3]},
    )
    opened = RunData(config)
    train(opened.model_config(), world, opened, StopRequest())
    results["kept"] = [step_of(folder) for folder in list_steps(out / "kept/checkpoints")]
    if world.rank == 0:
        newest = list_steps(out / "kept/checkpoints")[-1] / "model.safetensors"
        newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    collectives.barrier()
    train(opened.model_config(), world, opened, StopRequest())
    results["after_damage"] = [start["step"] for start in json.loads((out / "kept/run.json").read_text())["starts"]]
    config = make_config(data, out / "kept", train={"steps": 5})
    try:
        train(opened.model_config().model_copy(update={"train": config.train}), world, opened, StopRequest())
    except ConfigError as error:
        results["shortened"] = str(error)
    return results
