"""The ranks of the runtime's multi-rank tests. Run by tests/test_pretrain_resume.py:

    python tests/runtime_worker.py DATA_DIR OUTPUT_DIR NAME:RANKS:SCENARIO,SCENARIO,...[:fails] ...

One launch after another, each of that many ranks, which run the scenarios in one process group; with `fails` none of them may
come to an end that is good. Each scenario returns plain values; rank 0 writes them to OUTPUT_DIR/NAME/results.json. Importing
DeepSpeed takes most of a rank's time: one process does it for all and forks them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch._dynamo
import torch._inductor.compile_fx  # both: what the first optimizer would import, in every rank anew
from deepspeed.utils import safe_get_full_grad
from runtime_common import STAGES, StopAt, make_config, records, weights_of, zero
from runtime_elastic import agreement, elastic, halves, hung, phased, spiked
from runtime_faults import faults, overflow
from runtime_saving import asynchronous, refusing_disk, signalled_save
from runtime_time import second_config, straggling, timed, tracked, validated
from torch import nn

from cluster.world import World, current_world
from data_pipeline.loader import build_loader
from data_pipeline.records import Batch
from pretrain import collectives, engine
from pretrain.checkpoint import list_steps, read_state, step_of
from pretrain.encoder import BertForPreTraining
from pretrain.engine import TrainEngine
from pretrain.parameter_groups import parameter_groups
from pretrain.run_data import RunData
from pretrain.stops import StopRequest
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


def resumed(world: World, data: Path, out: Path) -> dict[str, Any]:
    """R25: stop after step 2 (in warm-up) and after step 6, go on; compare with a run without a stop, dropout on."""
    results = {}
    for stage in STAGES:
        straight, stopped = out / f"straight-{stage}", out / f"stopped-{stage}"
        config = make_config(data, straight, deepspeed=zero(stage), train={"sample_log": stage == 1})
        opened = RunData(config)
        codes = [train(opened.model_config(), world, opened, StopRequest())]
        config = make_config(data, stopped, deepspeed=zero(stage), train={"sample_log": stage == 1})
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
        hung,
        asynchronous,
        refusing_disk,
        signalled_save,
        timed,
        straggling,
        second_config,
        validated,
        tracked,
    )
}


def run_scenarios(names: list[str], data: Path, out: Path) -> None:
    """Run the named scenarios one after another on this rank."""
    world = current_world()
    engine.start_ranks(world, threads=1)
    results: dict[str, Any] = {}
    for name in names:
        begin = time.process_time()
        results[name] = SCENARIOS[name](world, data, out)
        print(f"scenario {name}: {time.process_time() - begin:.1f} s of this rank's CPU time", flush=True)
    if world.rank == 0:
        (out / "results.json").write_text(json.dumps(results, default=str))
    engine.stop_ranks()


def be_rank(rank: int, ranks: int, port: int, names: list[str], data: Path, out: Path) -> NoReturn:
    """What a forked process does: its output goes to a file, it never returns."""
    log = os.open(out / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in world.items()}, MASTER_ADDR="127.0.0.1")
    code = 1
    try:
        run_scenarios(names, data, out)
        code = 0
    except BaseException:  # noqa: BLE001 - shown by the test; the other ranks may hang, and the test has a limit
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def launch(ranks: int, names: list[str], data: Path, out: Path, *, fails: bool) -> bool:
    """Fork the ranks and wait for them; one that does not end as expected ends the others. Whether all did."""
    out.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = set()
    for rank in range(ranks):
        pid = os.fork() or be_rank(rank, ranks, port, names, data, out)
        running.add(pid)
    good = True
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if bool(status) != fails and good:
            good = False
            for other in running:
                os.kill(other, signal.SIGKILL)
    return good


def main() -> None:
    """All launches; ends with the first that fails."""
    data, out = Path(sys.argv[1]), Path(sys.argv[2])
    for plan in sys.argv[3:]:
        name, ranks, scenarios, *fails = plan.split(":")
        if not launch(int(ranks), scenarios.split(","), data, out / name, fails=bool(fails)):
            sys.exit(f"launch {name} did not end as expected")


if __name__ == "__main__":
    main()
