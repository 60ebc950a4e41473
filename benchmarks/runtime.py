"""What the loop costs beside DeepSpeed's own step, and what saving and resuming cost; one rank on this machine.

The peer is a bare loop over the same engine and batches that were read before: forward, backward, step, nothing else. Ours is
the whole trainer: loader, agreement on stops, sums, metrics, watchdog. The two alternate and each keeps its best time a step.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import measure
import torch
from kill_resume import write_data

from cluster.world import World
from pretrain import engine
from pretrain import job as job_module
from pretrain.config import TrainConfig
from pretrain.encoder import BertForPreTraining
from pretrain.engine import TrainEngine
from pretrain.job import Job
from pretrain.parameter_groups import parameter_groups
from pretrain.run_data import RunData
from pretrain.saving import Saver
from pretrain.stops import StopRequest
from pretrain.trainer import train

GOAL = 1.03


def main() -> None:
    """Print both times a step, the data-wait share, the seconds of a save and of a resume at step 100,000."""
    quick = measure.quick_argument(__doc__ or "").quick
    steps, rounds = (6, 1) if quick else (40, 4)
    world = World()
    device = engine.start_ranks(world)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data" / "train", blocks=40)
        bare, ours, waits = [], [], []
        for number in range(rounds):
            config = make_config(folder, folder / f"run-{number}", steps)
            bare.append(bare_step_seconds(config, world, device))
            data = RunData(config)
            train(data.model_config(), world, data, StopRequest())
            lines = [json.loads(line) for line in (folder / f"run-{number}" / "metrics.jsonl").read_text().splitlines()]
            ours.append(min(line["step_seconds"] for line in lines[1:]))
            waits.append(min(line["data_wait_share"] for line in lines[1:]))
        save, begin, resume = save_and_resume_seconds(folder, config, world, device)
        stalls = {background: save_stall_seconds(folder, world, background, quick) for background in (False, True)}
    print(f"waiting for data: {min(waits):.2%} of a step")
    print(
        f"save: {save * 1000:.0f} ms; load and first batch at step 100,000: {resume * 1000:.0f} ms, at 1: {begin * 1000:.0f}"
    )
    for background, (stall, step) in stalls.items():
        name = "in the background" if background else "that waits"
        print(f"save {name}: training stands still for {stall * 1000:.1f} ms, then steps take {step * 1000:.0f} ms")
    measure.report("save_stall", stalls[True][0] * 1000, "ms", stalls[False][0] * 1000, 0.05, higher_is_better=False)
    measure.report("resume_at_100000", resume * 1000, "ms", begin * 1000, 1.5, higher_is_better=False)
    wait = min(waits) * min(ours) * 1000
    measure.report("data_wait", wait, "ms a step", min(ours) * 1000, 0.02, higher_is_better=False)
    measure.report("loop_step", min(ours) * 1000, "ms", min(bare) * 1000, GOAL, higher_is_better=False)
    engine.stop_ranks()


def make_config(folder: Path, run: Path, steps: int) -> TrainConfig:
    """A small BERT whose step takes tens of milliseconds: the loop's cost shows more than in a real run."""
    tree = {
        "seed": 3,
        "data": {"dir": str(folder / "data")},
        "run": {"dir": str(run)},
        "model": {"layers": 2 if steps < 10 else 4, "hidden": 256, "heads": 4, "intermediate": 1024},
        "train": {"steps": steps, "global_batch": 64, "micro_batch": 32, "log_every": max(steps // 4, 1)},
        "optimizer": {"lr": 1e-4},
        "validation": {"every": 0},
        "tracking": {"enabled": False},
        "deepspeed": {"zero_optimization": {"stage": 1}},
    }
    config = TrainConfig.model_validate(tree)
    return RunData(config).model_config()


def new_engine(config: TrainConfig, world: World, device: torch.device) -> TrainEngine:
    """An engine over a fresh model."""
    model = BertForPreTraining(config.model)
    return TrainEngine(model, parameter_groups(model, 0.01), config=config, world=world, device=device)


def bare_step_seconds(config: TrainConfig, world: World, device: torch.device) -> float:
    """DeepSpeed's step alone, on batches that are in memory; the best mean over a quarter of the steps."""
    trainer = new_engine(config, world, device)
    deepspeed, weights = trainer._engine, torch.ones(2, device=device)
    with RunData(config).loader(world) as loader:
        batches = [next(loader) for _ in range(config.train.steps)]
    deepspeed.train()
    for group in deepspeed.optimizer.param_groups:
        group["lr"] = 1e-6
    quarter, best = config.train.log_every, float("inf")
    for begin in range(0, len(batches) - quarter + 1, quarter):
        started = time.perf_counter()
        for step in batches[begin : begin + quarter]:
            for batch in step:
                loss, _ = deepspeed(batch.to(device), weights)
                deepspeed.backward(loss / config.train.global_batch)
                deepspeed.step()
        best = min(best, (time.perf_counter() - started) / quarter) if begin else best
    return best


def save_stall_seconds(folder: Path, world: World, background: bool, quick: bool) -> tuple[float, float]:
    """Seconds that the loop spends in one save, all its stages together, and seconds of the steps between two saves.

    Medians over the saves of a run, without the first, which has to find its memory, and the last, which is waited for. A
    save that is not through when the next begins would be waited for as well, and counted.
    """
    every, saves = (4, 4) if quick else (6, 6)  # three stages, each agreed on after a step
    tree = make_config(folder, folder / f"saves-{background}", every * saves).as_tree()
    tree["model"] |= {"layers": 2 if quick else 4, "hidden": 768, "heads": 12, "intermediate": 3072}
    tree["checkpoint"] |= {"every": every, "keep": 2, "asynchronous": background}
    tree["train"] |= {"log_every": 1, "global_batch": 16, "micro_batch": 16}
    data = RunData(config := TrainConfig.model_validate(tree))
    seconds: list[float] = []

    class Timed(Saver):
        """A saver that notes what each call takes; a new entry with each save."""

        def save(self, job: Job) -> None:
            started = time.perf_counter()
            super().save(job)
            seconds.append(time.perf_counter() - started)

        def look(self, job: Job) -> None:
            started, begun = time.perf_counter(), bool(seconds)
            super().look(job)
            if begun and background:  # where saves wait it is called from within `save`
                seconds[-1] += time.perf_counter() - started

    kept, job_module.Saver = job_module.Saver, Timed  # type: ignore[misc]
    try:
        train(data.model_config(), world, data, StopRequest())
    finally:
        job_module.Saver = kept  # type: ignore[misc]
    lines = [json.loads(line) for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(seconds[1:-1]), statistics.median(line["step_seconds"] for line in lines[every:-1])


def save_and_resume_seconds(
    folder: Path, config: TrainConfig, world: World, device: torch.device
) -> tuple[float, float, float]:
    """Seconds of DeepSpeed's files plus our weights; from there to the first batch at step 1, and at step 100,000."""
    trainer = new_engine(config, world, device)
    with RunData(config).loader(world) as loader:
        trainer.step(next(loader), number=1, lr=1e-4)
        near = loader.state_dict()
    far = {**near, "position": 100_000 * config.train.global_batch}
    (folder / "saved" / "deepspeed").mkdir(parents=True)
    times = [time.perf_counter()]
    trainer.save(folder / "saved", "deepspeed")()
    trainer.full_weights()
    times.append(time.perf_counter())
    for state in (near, near, far):  # the first load finds its memory
        trainer.load(folder / "saved", "deepspeed")
        with RunData(config).loader(world, state) as loader:
            next(loader)
        times.append(time.perf_counter())
    return times[1] - times[0], times[3] - times[2], times[4] - times[3]


if __name__ == "__main__":
    main()
