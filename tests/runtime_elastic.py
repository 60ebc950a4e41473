"""Scenarios of tests/runtime_worker.py: going on with other ranks and ZeRO stages, ranks that differ, a time budget."""

from __future__ import annotations

import json
import shutil
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from runtime_common import STAGES, StopAt, make_config, records, weights_of, zero

from cluster.world import World
from data_pipeline.config import ConfigError
from pretrain import collectives, engine
from pretrain.checkpoint import CheckpointError, list_steps, read_state, step_of
from pretrain.config import TrainConfig
from pretrain.run_data import RunData
from pretrain.snapshot import why_not
from pretrain.stops import StopRequest
from pretrain.trainer import train

ELASTIC = ((0, 0), (1, 1), (2, 2), (3, 3), (1, 2), (2, 1))
ON_FOUR = ((1, 2), (2, 1), (3, 3))
ON_EIGHT = ((1, 1),)
REFUSED = ((0, 1), (3, 1), (1, 3))


def _elastic_config(data: Path, run: Path, stage: int) -> TrainConfig:
    """A run without dropout, which depends on ranks, and with an epsilon that keeps rounding small."""
    return make_config(
        data,
        run,
        model={"hidden_dropout": 0.0, "attention_dropout": 0.0, "layers": 1},
        optimizer={"eps": 1e-3},
        train={"steps": 6, "global_batch": 32, "micro_batch": 4, "sample_log": True},
        validation={"every": 0},
        deepspeed=zero(stage),
    )


def halves(world: World, data: Path, out: Path) -> dict[str, Any]:
    """First halves of runs, for `elastic` on another number of ranks; on one rank a whole one to compare with."""
    opened, codes = RunData(_elastic_config(data, out / "whole", 1)), []
    if world.size == 1:
        codes = [train(opened.model_config(), world, opened, StopRequest())]
    later = {1: [(stage, stage) for stage in STAGES], 2: ON_FOUR, 4: ON_EIGHT}[world.size]
    for stage in {old for old, _ in later}:
        config = _elastic_config(data, out / f"half-{stage}", stage)
        codes.append(train(RunData(config).model_config(), world, opened, StopAt(3)))
    return {"codes": codes, "ranks": world.size}


def elastic(world: World, data: Path, out: Path) -> dict[str, Any]:
    """R26: runs begun by `halves` on half as many ranks go on here, at the same and at another ZeRO stage."""
    results: dict[str, Any] = {}
    whole_run = out.parent / "one-rank" / "whole"
    begun = out.parent / {2: "one-rank", 4: "two-ranks", 8: "four-ranks"}[world.size]
    for old, new in {2: (*ELASTIC, *REFUSED), 4: ON_FOUR, 8: ON_EIGHT}[world.size]:
        run = out / f"elastic-{old}-{new}"
        if world.rank == 0:
            shutil.copytree(begun / f"half-{old}", run)
            killed = run / "checkpoints" / "universal-step-000000003.incomplete" / "deepspeed" / "zero"
            killed.mkdir(parents=True)  # what a kill in the middle of a conversion leaves
            (killed / "half").touch()
        collectives.barrier()
        config = _elastic_config(data, run, new)
        opened = RunData(config)
        try:
            train(opened.model_config(), world, opened, StopRequest())
        except ConfigError as error:
            results[f"{old}-{new}"] = {
                "refused": str(error),
                "steps": [step_of(f) for f in list_steps(run / "checkpoints")],
            }
            continue
        if world.rank == 0:
            whole, here = weights_of(whole_run), weights_of(run)
            lines = zip(records(whole_run), records(run), strict=True)
            results[f"{old}-{new}"] = {
                "weight": max(float((whole[name] - here[name]).abs().max()) for name in whole),
                "loss": max(abs(a["loss"] - b["loss"]) for a, b in lines),
                "left": sorted(path.name for path in (run / "checkpoints").iterdir()),
                "position": read_state(list_steps(run / "checkpoints")[-1]).loader["position"],
            }
    state = read_state(list_steps(begun / "half-1" / "checkpoints")[-1])
    results["reasons"] = {
        f"{old}-{new}": why_not(replace(state, zero_stage=old), stage=new, precision="fp32", optimizer="adamw")
        for old in STAGES
        for new in STAGES
    }
    return results


def phased(world: World, data: Path, out: Path) -> dict[str, Any]:
    """Three phases: a small batch, a larger one on the same stream, other data with a schedule of its own."""
    other = data.parent / "other-data"
    if not other.exists():
        for part in ("train", "validation"):
            shutil.copytree(data / ("validation" if part == "train" else "train"), other / part)
    parts = [
        {"steps": 2, "global_batch": 8},
        {"steps": 3},
        {"steps": 3, "data_dir": str(other), "lr": 1e-3, "schedule": {"warmup_steps": 2}},
    ]
    results: dict[str, Any] = {}
    build, models, results["alive"] = engine.TrainEngine.__init__, [], []

    def counted(trainer: Any, model: Any, *arguments: Any, **more: Any) -> None:
        results["alive"].append(sum(earlier() is not None for earlier in models))
        models.append(weakref.ref(model))
        build(trainer, model, *arguments, **more)

    engine.TrainEngine.__init__ = counted  # type: ignore[method-assign]
    for name, stops in (("straight", ()), ("stopped", (1, 2, 4))):
        config = make_config(data, out / name, deepspeed=zero(1), train={"steps": 8}, schedule={"warmup_steps": 1})
        config = TrainConfig.model_validate({**config.as_tree(), "phases": parts, "optimizer": {"lr": 1e-2}})
        opened = RunData(config)
        codes = [train(opened.model_config(), world, opened, StopAt(step)) for step in stops]
        codes.append(train(opened.model_config(), world, opened, StopRequest()))
        states = [read_state(folder) for folder in list_steps(out / name / "checkpoints")]
        results[name] = {
            "codes": codes,
            "lines": [[line[key] for key in ("step", "lr", "loss", "examples")] for line in records(out / name)],
            "position": states[-1].loader["position"],
            "starts": [begun["step"] for begun in json.loads((out / name / "run.json").read_text())["starts"]],
        }
    engine.TrainEngine.__init__ = build  # type: ignore[method-assign]
    one, two = (weights_of(out / name) for name in ("straight", "stopped"))
    results["same_weights"] = all(torch.equal(one[name], two[name]) for name in one)
    return results


def spiked(world: World, data: Path, out: Path) -> dict[str, Any]:
    """The loss of step 8 is ten times too high, once: back to the checkpoint of step 6, and past the examples of 7 and 8."""
    config = make_config(
        data,
        out / "spiked",
        train={"steps": 12},
        checkpoint={"every": 3, "keep": 9},
        validation={"every": 0},
        faults={"spike_ratio": 3.0},
    )
    step, forward, hit = engine.TrainEngine.step, engine._Objective.forward, [False, False]

    def counted(trainer: engine.TrainEngine, batches: Any, *, number: int, **more: Any) -> Any:
        hit[0] = number == 8 and not hit[1]
        result = step(trainer, batches, number=number, **more)
        hit[1] = hit[1] or hit[0]
        return result

    def scaled(module: Any, *arguments: Any) -> Any:
        loss, sums = forward(module, *arguments)
        return (loss, sums * 10) if hit[0] else (loss, sums)

    engine.TrainEngine.step, engine._Objective.forward = counted, scaled  # type: ignore[method-assign]
    try:
        opened = RunData(config)
        code = train(opened.model_config(), world, opened, StopRequest())
    finally:
        engine.TrainEngine.step, engine._Objective.forward = step, forward  # type: ignore[method-assign]
    record = json.loads((out / "spiked" / "run.json").read_text())
    return {
        "code": code,
        "steps": [line["step"] for line in records(out / "spiked")],
        "starts": [begun["step"] for begun in record["starts"]],
        "rollbacks": record["rollbacks"],
        "position": read_state(list_steps(out / "spiked" / "checkpoints")[-1]).loader["position"],
    }


def agreement(world: World, data: Path, out: Path) -> dict[str, Any]:
    """R41: rank 1 has another learning rate; then a stop because the time is used up."""
    rate = 1e-3 if world.rank == 0 else 2e-3
    config = make_config(data, out / "differing", optimizer={"lr": rate})
    opened = RunData(config)
    results: dict[str, Any] = {}
    try:
        train(opened.model_config(), world, opened, StopRequest())
    except ConfigError as error:
        results["differing"] = str(error)
    found = collectives.gather_objects(results.get("differing"))
    results["same_everywhere"] = found[0] is not None and len(set(found)) == 1
    results["nothing_written"] = not (out / "differing").exists()
    (out / "a-file").touch()
    opened = RunData(make_config(data, out / "a-file" / "run"))
    try:
        train(opened.model_config(), world, opened, StopRequest())
    except ConfigError as error:
        results["no_folder"] = str(error)
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=1000)  # type: ignore[assignment]
    opened = RunData(make_config(data, out / "no-room"))
    try:
        train(opened.model_config(), world, opened, StopRequest())
    except CheckpointError as error:
        results["no_room"] = str(error)
    shutil.disk_usage = usage
    config = make_config(data, out / "budget", checkpoint={"every": 100}, train={"log_every": 5})
    opened = RunData(config)
    results["budget"] = train(opened.model_config(), world, opened, StopRequest(1e-9 if world.rank == 1 else 0.0))
    results["budget_steps"] = [step_of(folder) for folder in list_steps(out / "budget/checkpoints")]
    collectives.barrier()
    results["budget_lines"] = [line["step"] for line in records(out / "budget")]
    return results


def hung(world: World, data: Path, out: Path) -> dict[str, Any]:
    """R41: rank 1 never comes back from its first step, and no other rank can go on without it."""
    step = engine.TrainEngine.step

    def waits_for_nothing(trainer: Any, batches: Any, **more: Any) -> Any:
        threading.Event().wait()

    engine.TrainEngine.step = waits_for_nothing if world.rank == 1 else step  # type: ignore[method-assign]
    config = make_config(data, out / "hung", faults={"hang_seconds": 5.0})
    opened = RunData(config)
    return {"code": train(opened.model_config(), world, opened, StopRequest())}
