"""Scenarios of tests/runtime_worker.py: the rate follows a clock, and which rank the others wait for."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import torch
from runtime_common import StopAt, make_config, records, weights_of, zero

from cluster.world import World
from pretrain.checkpoint import list_steps, read_state, step_of
from pretrain.encoder import BertForPreTraining
from pretrain.engine import TrainEngine
from pretrain.meter import Meter
from pretrain.parameter_groups import parameter_groups
from pretrain.run import _finished
from pretrain.run_data import RunData
from pretrain.stops import StopRequest
from pretrain.stopwatch import Stopwatch, TrainingClock
from pretrain.telemetry import Peak
from pretrain.trainer import train

BUDGET = 9
"""Seconds of the time budget; rank 0's clock shows one more at every look, so that is also the number of steps."""


def timed(world: World, data: Path, out: Path) -> dict[str, Any]:
    """A run with a time budget, without a stop and stopped after step 5; rank 1's clocks show other times."""
    results: dict[str, Any] = {}
    now = TrainingClock.now
    for name, stops, elsewhere in (("straight", (), 1e9), ("stopped", (5,), 0.5)):
        config = make_config(
            data,
            out / f"timed-{name}",
            train={"steps": 30},
            model={"layers": 1},
            validation={"every": 0},
            deepspeed=zero(1),
            schedule={"warmup_steps": 0, "budget_hours": BUDGET / 3600, "warmup_share": 1 / 3},
        )
        opened = RunData(config)
        codes = []
        for stop in (*(StopAt(step) for step in stops), StopRequest()):
            seconds = itertools.count() if world.rank == 0 else itertools.repeat(elsewhere)
            TrainingClock.now = staticmethod(lambda seconds=seconds: float(next(seconds)))  # type: ignore[method-assign]
            codes.append(train(opened.model_config(), world, opened, stop))
        newest = list_steps(out / f"timed-{name}" / "checkpoints")[-1]
        results[name] = {
            "codes": codes,
            "lines": [
                [line[key] for key in ("step", "lr", "budget_seconds_left", "loss")]
                for line in records(out / f"timed-{name}")
            ],
            "saved": [step_of(newest), read_state(newest).seconds_used],
            "finished": str(_finished(config)) == str(newest),
            "slowest": [line["straggler_rank"] for line in records(out / f"timed-{name}")],
        }
    TrainingClock.now = now  # type: ignore[method-assign]
    one, two = (weights_of(out / f"timed-{name}") for name in ("straight", "stopped"))
    results["same_weights"] = all(torch.equal(one[name], two[name]) for name in one)
    return results


def straggling(world: World, data: Path, out: Path) -> dict[str, Any]:
    """Lines of metrics over steps in which rank 1 waits half a second longer for its data, then rank 0 computes longer."""
    config = RunData(make_config(data, out / "straggling", model={"layers": 1})).model_config()
    model = BertForPreTraining(config.model)
    trainer = TrainEngine(model, parameter_groups(model, 0.01), config=config, world=world, device=torch.device("cpu"))
    meter = Meter(trainer, Peak(1e9, "a test"))
    found = []
    with RunData(config).loader(world) as loader:
        for waited, computing in (([0.25, 0.75], [0.5, 0.5]), ([0.25, 0.25], [1.75, 0.75])):
            for number in (1, 2):
                result = trainer.step(next(loader), number=number, lr=1e-3)
                assert 0 < result.forward.seconds() < 60
                forward = Stopwatch(torch.device("cpu"))
                forward._host = computing[world.rank]
                meter.add(dataclasses.replace(result, forward=forward), waited=waited[world.rank])
            found.append(meter.record(step=2, lr=1e-3, skipped_steps=0))
    return {"lines": found}
