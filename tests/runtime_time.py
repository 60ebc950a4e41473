"""Scenarios of tests/runtime_worker.py: the rate follows a clock, which rank the others wait for, a run after a run, the
held-out loss.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from runtime_common import StopAt, make_config, records, weights_of, zero

from cluster.world import World
from data_pipeline.config import ConfigError
from pretrain import collectives, continuation
from pretrain.checkpoint import list_steps, read_state, step_name, step_of
from pretrain.config import TrainConfig
from pretrain.encoder import BertForPreTraining
from pretrain.engine import TrainEngine
from pretrain.meter import Meter
from pretrain.parameter_groups import parameter_groups
from pretrain.run import _finished
from pretrain.run_data import RunData
from pretrain.run_tracking import send_rest
from pretrain.stops import StopRequest
from pretrain.stopwatch import Stopwatch, TrainingClock
from pretrain.telemetry import Peak
from pretrain.trainer import train
from pretrain.validation import label_counts, validate_model

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


def second_config(world: World, data: Path, out: Path) -> dict[str, Any]:
    """The last phase of `phased` (steps 6 to 8 on other data, with a schedule of its own) as a run of its own after the rest."""
    first = out / "first"
    (first / "checkpoints").mkdir(parents=True)
    shutil.copy(out / "straight" / "run.json", first)
    shutil.copytree(out / "straight" / "checkpoints" / step_name(5), first / "checkpoints" / step_name(5))
    other = data.parent / "other-data"

    def config_of(name: str, start: int = 5, steps: int = 8, begun: Path = first, **model: int) -> TrainConfig:
        config = make_config(
            other,
            out / name,
            deepspeed=zero(1),
            model=model,
            train={"steps": steps},
            optimizer={"lr": 1e-3},
            schedule={"warmup_steps": 2 if steps > 7 else 0, "start_step": start},
        )
        tree = config.as_tree()
        return TrainConfig.model_validate({**tree, "run": {**tree["run"], "continues": str(begun)}})

    refused = {}
    for name, config in {
        "start": config_of("refused-1", start=4),
        "steps": config_of("refused-2", start=0, steps=5),
        "model": config_of("refused-3", intermediate=128),
        "nothing": config_of("refused-4", begun=out),
    }.items():
        try:
            opened = RunData(config)
            train(opened.model_config(), world, opened, StopRequest())
        except ConfigError as error:
            refused[name] = str(error)
    try:
        continuation.earlier_run(config_of("straight", begun=out / "straight"))
    except ConfigError as error:
        refused["itself"] = str(error)
    refused["left"] = [path.name for path in out.glob("refused-*")]
    config = config_of("second")
    opened = RunData(config)
    codes = [train(opened.model_config(), world, opened, stop) for stop in (StopAt(1), StopRequest())]
    one, two = weights_of(out / "straight"), weights_of(out / "second")
    record = json.loads((out / "second" / "run.json").read_text())
    return {
        "codes": codes,
        "lines": [[line[key] for key in ("step", "lr", "loss", "examples")] for line in records(out / "second")],
        "same_weights": all(torch.equal(one[name], two[name]) for name in one),
        "starts": [begun["step"] for begun in record["starts"]],
        "continues": record["continues"]["step"],
        "position": read_state(list_steps(out / "second" / "checkpoints")[-1]).loader["position"],
        "refused": refused,
    }


def validated(world: World, data: Path, out: Path) -> dict[str, Any]:
    """The held-out loss of all ranks, beside that of one plain model over the whole set, and which examples each rank saw."""
    results = {}
    for stage in (1, 3):
        opened = RunData(make_config(data, out / "validated", model={"layers": 1}, deepspeed=zero(stage)))
        config = opened.model_config()
        torch.manual_seed(7)
        model = BertForPreTraining(config.model)
        common = int(label_counts(opened.held_out_batches(World()), config.model.vocab_size).argmax())
        model.mlm_head.bias.data[common] += 5  # some answers are right
        plain = copy.deepcopy(model).eval()
        trainer = TrainEngine(
            model, parameter_groups(model, 0.01), config=config, world=world, device=torch.device("cpu")
        )
        mine = list(opened.held_out_batches(world))
        found = validate_model(trainer, mine)
        with torch.no_grad():
            whole = [plain(batch) for batch in opened.held_out_batches(World())]
        predictions, pairs = (sum(getattr(part, f"{kind}_count") for part in whole) for kind in ("mlm", "nsp"))
        ids = [
            tuple(example.tolist())
            for batch in mine
            for example in batch.input_ids_T.tensor_split(batch.cu_seqlens[1:-1].long())
        ]
        seen = [example for part in collectives.gather_objects(ids) for example in part]
        results[str(stage)] = {
            "found": found,
            "mlm_loss": sum(float(part.mlm_loss_sum) for part in whole) / predictions,
            "mlm_accuracy": sum(int(part.mlm_correct) for part in whole) / predictions,
            "nsp_loss": sum(float(part.nsp_loss_sum) for part in whole) / pairs,
            "nsp_accuracy": sum(int(part.nsp_correct) for part in whole) / pairs,
            "predictions": predictions,
            "seen": [len(seen), len(set(seen))],
        }
    return results


def tracked(world: World, data: Path, out: Path) -> dict[str, Any]:
    """R30: one job of several ranks on an empty store; what the store has afterwards."""
    store = f"sqlite:///{out / 'mlflow.db'}"
    config = make_config(
        data,
        out / "tracked",
        model={"layers": 1},
        train={"steps": 2, "micro_batch": 1},
        schedule={"warmup_steps": 1},
        validation={"every": 2},
        tracking={"enabled": True, "uri": store, "experiment": "ranks"},
    )
    opened = RunData(config)
    train(opened.model_config(), world, opened, StopRequest())
    if world.rank:
        return {}
    import mlflow

    for _ in range(10):  # a slow machine may need more time than the end of a job leaves
        if not send_rest(config):
            break
    client = mlflow.MlflowClient(tracking_uri=store)
    experiments = client.search_experiments()
    runs = client.search_runs([experiment.experiment_id for experiment in experiments])
    return {
        "metrics": [run.data.metrics for run in runs],
        "params": [run.data.params for run in runs],
        "tags": [run.data.tags for run in runs],
        "datasets": [entry.dataset.digest for run in runs for entry in run.inputs.dataset_inputs],
        "artifacts": [entry.path for run in runs for entry in client.list_artifacts(run.info.run_id)],
        "record": json.loads((out / "tracked" / "run.json").read_text()),
    }
