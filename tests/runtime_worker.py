"""One rank of the runtime's multi-rank tests: several scenarios in one process group, because importing DeepSpeed takes
seconds. Run by tests/test_pretrain_resume.py with RANK, WORLD_SIZE, ... set:

    python tests/runtime_worker.py SCENARIOS DATA_DIR OUTPUT_DIR

Each scenario returns plain values; rank 0 writes them to OUTPUT_DIR/results.json.
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad
from runtime_common import STAGES, StopAt, make_config, records, weights_of, zero
from runtime_elastic import agreement, elastic, halves, phased, spiked
from runtime_saving import asynchronous, refusing_disk, signalled_save
from runtime_time import second_config, straggling, timed
from torch import nn

from cluster.world import World, current_world
from data_pipeline.loader import build_loader
from data_pipeline.records import Batch
from pretrain import collectives, engine
from pretrain.checkpoint import list_steps, read_state, step_of
from pretrain.config import TrainConfig
from pretrain.encoder import BertForPreTraining
from pretrain.engine import TrainEngine
from pretrain.parameter_groups import parameter_groups
from pretrain.run_data import RunData
from pretrain.stops import StopRequest, TrainingFault
from pretrain.trainer import train


def gathered_gradients(trainer: TrainEngine) -> dict[str, torch.Tensor]:
    """Every gradient of the finished accumulation, whole, as the optimizer will see it before clipping."""
    found = {}
    for name, parameter in trainer._engine.module.named_parameters():
        gradient = safe_get_full_grad(parameter) if trainer.stage else parameter.grad
        found[name.removeprefix("model.")] = gradient.detach().clone()
    return found


def joint_step(model: nn.Module, batches: list[Batch]) -> float:
    """Plain torch: gradients of one joint batch; returns its loss."""
    predictions = sum(len(batch.mask_labels_P) for batch in batches)
    pairs = sum(batch.examples for batch in batches)
    total = torch.zeros(())
    for batch in batches:
        out = model(batch)
        total = total + out.mlm_loss_sum / predictions + out.nsp_loss_sum / pairs
    total.backward()
    return float(total.detach())


def equals_plain_torch(world: World, data: Path, out: Path) -> dict[str, Any]:
    """R21: loss, gradients and weights of a few steps against plain torch AdamW, for each ZeRO stage."""
    results = {}
    for stage in STAGES:
        config = make_config(
            data,
            out,
            model={"hidden_dropout": 0.0, "attention_dropout": 0.0},
            deepspeed=zero(stage),
            optimizer={"eps": 1e-3},
        )
        config = RunData(config).model_config()
        torch.manual_seed(1)
        plain = BertForPreTraining(config.model)
        torch.manual_seed(1)
        model = BertForPreTraining(config.model)
        trainer = TrainEngine(
            model, parameter_groups(model, 0.01), config=config, world=world, device=torch.device("cpu")
        )
        optimizer = torch.optim.AdamW(
            [{k: g[k] for k in ("params", "weight_decay")} for g in parameter_groups(plain, 0.01)],
            lr=1.0,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
        )
        seen: dict[str, torch.Tensor] = {}
        update = trainer._update
        trainer._update = lambda seen=seen, update=update, t=trainer: (seen.update(gathered_gradients(t)), update())[1]
        mine = build_loader(
            data / "train", global_batch=16, micro_batch=4, rank=world.rank, world_size=world.size, seed=3
        )
        whole = build_loader(data / "train", global_batch=16, micro_batch=4, seed=3)
        worst = {"loss": 0.0, "gradient": 0.0, "norm": 0.0}
        for step in range(1, 5):
            rate = 0.01 * step
            result = trainer.step(next(mine), number=step, lr=rate)
            loss = float(collectives.all_sum(result.sums[:2].clone()).sum())
            reference = joint_step(plain, next(whole))
            worst["loss"] = max(worst["loss"], abs(loss - reference))
            for name, parameter in plain.named_parameters():
                worst["gradient"] = max(worst["gradient"], float((parameter.grad - seen[name]).abs().max()))
            norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
            worst["norm"] = max(worst["norm"], abs(norm - result.grad_norm) / norm)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        mine.close()
        whole.close()
        weights = trainer.full_weights()
        if world.rank == 0:
            named = dict(plain.named_parameters())
            assert weights.keys() == named.keys()
            worst["weight"] = max(float((weights[name] - named[name]).detach().abs().max()) for name in named)
        results[str(stage)] = worst
    return results


class SumOfLabels(nn.Module):
    """A real one-parameter model whose loss sum is w times the sum of the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch: Batch) -> SimpleNamespace:
        """Sums with the names of PretrainingLosses."""
        loss = self.weight.squeeze() * batch.mask_labels_P.sum()
        zero = torch.zeros((), dtype=torch.int64)
        return SimpleNamespace(mlm_loss_sum=loss, nsp_loss_sum=loss * 0, mlm_correct=zero, nsp_correct=zero)


def labels_batch(labels: list[int]) -> Batch:
    """A batch of one example whose predictions have these labels."""
    count = len(labels)
    return Batch(
        input_ids_T=torch.zeros(count, dtype=torch.int64),
        segment_ids_T=torch.zeros(count, dtype=torch.int64),
        position_ids_T=torch.arange(count),
        cu_seqlens=torch.tensor([0, count], dtype=torch.int32),
        max_seqlen=count,
        mask_positions_P=torch.arange(count),
        mask_labels_P=torch.tensor(labels),
        cls_positions_E=torch.zeros(1, dtype=torch.int64),
        nsp_labels_E=torch.tensor([-1]),
    )


def worked_example(world: World, data: Path, out: Path) -> dict[str, Any]:
    """R21's numbers: sums 2.0 over 2 and 24.0 over 8 predictions give 2.6, by accumulation and over ranks."""
    small, large = labels_batch([1, 1]), labels_batch([3] * 8)
    results = {}
    for name, accumulation in (("over_ranks", 1), ("accumulated", 2)):
        config = make_config(
            data,
            out,
            train={"global_batch": accumulation * world.size, "micro_batch": 1},
            optimizer={"grad_clip": 0.0},
        )
        model = SumOfLabels()
        trainer = TrainEngine(
            model,
            [{"params": list(model.parameters()), "weight_decay": 0.0}],
            config=config,
            world=world,
            device=torch.device("cpu"),
        )
        mine = [small, large] if accumulation == 2 else [(small, large)[world.rank % 2]]
        result = trainer.step(mine, number=1, lr=0.0)
        results[name] = [float(collectives.all_sum(result.sums[:1].clone())), result.grad_norm]
    return results


def overflow(world: World, data: Path, out: Path) -> dict[str, Any]:
    """R22: an infinite gradient at step 3 changes nothing; the next step goes on at the same rate."""
    results = {}
    # DeepSpeed refuses fp16 on a CPU without fast fp16 instructions; torch's kernels do the arithmetic all the same.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    halves: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
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


def resumed(world: World, data: Path, out: Path) -> dict[str, Any]:
    """R25: stop after step 2 (in warm-up) and after step 6, go on; compare with a run without a stop, dropout on."""
    results = {}
    for stage in STAGES:
        straight, stopped = out / f"straight-{stage}", out / f"stopped-{stage}"
        config = make_config(data, straight, deepspeed=zero(stage))
        opened = RunData(config)
        codes = [train(opened.model_config(), world, opened, StopRequest())]
        config = make_config(data, stopped, deepspeed=zero(stage))
        opened = RunData(config)
        codes.append(train(opened.model_config(), world, opened, StopAt(2)))
        if world.rank == 0:
            with open(stopped / "metrics.jsonl", "a") as handle:
                handle.write('{"kind": "train", "step": 3, "lr": 9.0}\n{"kind": "tr')
        codes.append(train(opened.model_config(), world, opened, StopAt(4)))
        codes.append(train(opened.model_config(), world, opened, StopRequest()))
        if world.rank == 0:
            first, second = weights_of(straight), weights_of(stopped)
            results[str(stage)] = {
                "codes": codes,
                "same_weights": first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first),
                "straight": [[line[key] for key in ("step", "lr", "loss", "grad_norm")] for line in records(straight)],
                "stopped": [[line[key] for key in ("step", "lr", "loss", "grad_norm")] for line in records(stopped)],
                "steps": [step_of(folder) for folder in list_steps(stopped / "checkpoints")],
                "state": read_state(list_steps(stopped / "checkpoints")[-1]).loader,
                "starts": [start["step"] for start in json.loads((stopped / "run.json").read_text())["starts"]],
            }
    return results


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
    return results


SCENARIOS = {
    function.__name__: function
    for function in (
        equals_plain_torch,
        worked_example,
        overflow,
        resumed,
        faults,
        halves,
        elastic,
        agreement,
        phased,
        spiked,
        asynchronous,
        refusing_disk,
        signalled_save,
        timed,
        straggling,
        second_config,
    )
}


def main() -> None:
    """Run the named scenarios one after another on this rank."""
    names, data, out = sys.argv[1].split(","), Path(sys.argv[2]), Path(sys.argv[3])
    world = current_world()
    engine.start_ranks(world, threads=1)
    results: dict[str, Any] = {}
    for name in names:
        begin = time.process_time()
        try:
            results[name] = SCENARIOS[name](world, data, out)
            print(f"scenario {name}: {time.process_time() - begin:.1f} s of this rank's CPU time", flush=True)
        except Exception:  # noqa: BLE001 - the test shows it; the other ranks may hang, and the test has a limit
            traceback.print_exc()
            sys.exit(f"scenario {name} failed on rank {world.rank}")
    if world.rank == 0:
        (out / "results.json").write_text(json.dumps(results, default=str))
    engine.stop_ranks()


if __name__ == "__main__":
    main()
