"""What the loop costs beside DeepSpeed's own step, and what saving and resuming cost; one rank on this machine.

The peer is the bare step of another engine over the same model: forward, backward, step on a batch that was read before. Ours
is the whole trainer: loader, agreement on stops, sums, a line of metrics each step, watchdog. After each of our steps comes a
bare one on the same batch, so that a machine that has other work slows both alike; medians over the steps count.

python benchmarks/runtime.py [--quick] [--clock wall|cpu]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
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
from pretrain.watchdog import Watchdog

GOAL = 1.03
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    """Print both times a step, the data-wait share, the seconds of a save and of a resume at step 100,000."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: proves that the script runs")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="of loop_step; cpu: seconds of all our threads, on busy machines",
    )
    options = parser.parse_args()
    quick, clock = options.quick, CLOCKS[options.clock]
    steps = 6 if quick else 60
    world = World()
    device = engine.start_ranks(world)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data" / "train", blocks=40)
        config = make_config(folder, folder / "run", steps)
        ours, bare = step_seconds(config, make_config(folder, folder / "paired", steps), world, device, clock)
        data = RunData(config)
        train(data.model_config(), world, data, StopRequest())
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        wait = statistics.median(line["data_wait_share"] for line in lines[2:])
        save, begin, resume = save_and_resume_seconds(folder, config, world, device)
        stalls = {background: save_stall_seconds(folder, world, background, quick) for background in (False, True)}
    print(f"loop_step by the {options.clock} clock")
    print(f"waiting for data: {wait:.2%} of a step")
    print(
        f"save: {save * 1000:.0f} ms; load and first batch at step 100,000: {resume * 1000:.0f} ms, at 1: {begin * 1000:.0f}"
    )
    for background, (stall, step) in stalls.items():
        name = "in the background" if background else "that waits"
        print(f"save {name}: training stands still for {stall * 1000:.1f} ms, then steps take {step * 1000:.0f} ms")
    measure.report("save_stall", stalls[True][0] * 1000, "ms", stalls[False][0] * 1000, 0.05, higher_is_better=False)
    measure.report("resume_at_100000", resume * 1000, "ms", begin * 1000, 1.5, higher_is_better=False)
    measure.report("data_wait", wait * ours * 1000, "ms a step", ours * 1000, 0.02, higher_is_better=False)
    measure.report("loop_step", ours * 1000, "ms", bare * 1000, GOAL, higher_is_better=False)
    engine.stop_ranks()


def make_config(folder: Path, run: Path, steps: int) -> TrainConfig:
    """A small BERT whose step takes tens of milliseconds: the loop's cost shows more than in a real run."""
    tree = {
        "seed": 3,
        "data": {"dir": str(folder / "data")},
        "run": {"dir": str(run)},
        "model": {"layers": 2 if steps < 10 else 4, "hidden": 256, "heads": 4, "intermediate": 1024},
        "train": {"steps": steps, "global_batch": 64, "micro_batch": 32, "log_every": 1},
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


def step_seconds(
    config: TrainConfig, paired: TrainConfig, world: World, device: torch.device, clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds of our step and of DeepSpeed's alone, which take turns on the same batches in the run of `paired`.

    The bare one's median, and to ours is added the median of what each pair differs by.
    """
    other = new_engine(config, world, device)._engine
    weights = torch.ones(2, device=device)
    with RunData(config).loader(world) as loader:
        batches = [next(loader) for _ in range(config.train.steps)]
    other.train()
    for group in other.optimizer.param_groups:
        group["lr"] = 1e-6
    ours: list[float] = []
    bare: list[float] = []
    began = clock()

    def bare_step() -> None:
        nonlocal began
        now = clock()
        if bare:
            ours.append(now - began)
        for batch in batches[len(bare)]:
            loss, _ = other(batch.to(device), weights)
            other.backward(loss / config.train.global_batch)
            other.step()
        began = clock()
        bare.append(began - now)

    with before_each_step(bare_step):
        data = RunData(paired)
        train(data.model_config(), world, data, StopRequest())
    pairs = list(zip(ours, bare, strict=False))[2:]
    alone = statistics.median(bare for _, bare in pairs)
    return alone + statistics.median(ours - bare for ours, bare in pairs), alone


@contextlib.contextmanager
def before_each_step(action: Callable[[], None]) -> Iterator[None]:
    """Within, `train` calls `action` whenever it is about to read the next step's examples."""

    class Calling(Watchdog):
        """A watchdog that is called between steps, as every one is."""

        def beat(self, activity: str) -> None:
            super().beat(activity)
            if activity.startswith("reading the examples"):
                action()

    kept, job_module.Watchdog = job_module.Watchdog, Calling  # type: ignore[misc]
    try:
        yield
    finally:
        job_module.Watchdog = kept  # type: ignore[misc]


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
