"""Weak scaling from one rank to two on this machine, each rank on one core of its own, with the same examples a rank.

One rank alone would have the machine's memory and clock for itself, and two ranks would be blamed for sharing them. So the peer is
two runs of one rank each, side by side, on the same two cores: the work and the load are equal, and what differs is that the two
ranks of one run wait for each other and exchange gradients (ZeRO 1, gloo over loopback). The median step of each run counts, the two take
turns, and of each the fastest round counts.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import traceback
from pathlib import Path

import measure
from kill_resume import write_data
from runtime import make_config
from runtime_tracking import free_port

from cluster.world import World
from pretrain.config import TrainConfig
from pretrain.run_data import RunData
from pretrain.stops import StopRequest
from pretrain.trainer import train

GOAL = 0.9


def main() -> None:
    """Print a step of two single ranks side by side and of two ranks of one run, and the efficiency as a JSON line."""
    quick = measure.quick_argument(__doc__ or "").quick
    rounds, steps, batch = (1, 6, 64) if quick else (3, 30, 256)
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("weak scaling needs two cores")
    alone, together = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data" / "train", blocks=40)
        for number in range(rounds):
            runs = [run_config(folder, f"alone-{number}-{core}", steps, batch) for core in cores]
            start([(config, World(), core) for config, core in zip(runs, cores, strict=True)])
            alone.append(statistics.mean(median_step(config) for config in runs))
            both = run_config(folder, f"together-{number}", steps, 2 * batch)
            port = free_port()
            ranks = [World(rank=r, size=2, local_rank=r, local_size=2, master_port=port) for r in range(2)]
            start([(both, rank, core) for rank, core in zip(ranks, cores, strict=True)])
            together.append(median_step(both))
            print(f"alone {alone[-1] * 1000:.1f} ms a step, together {together[-1] * 1000:.1f} ms", flush=True)
    examples = 2 * batch / min(together)
    measure.report("weak_scaling", examples, "examples/s of two ranks", 2 * batch / min(alone), GOAL)


def run_config(folder: Path, name: str, steps: int, batch: int) -> TrainConfig:
    """The benchmark's small BERT with this global batch, a line of metrics every few steps."""
    config = make_config(folder, folder / name, steps)
    sizes = {"global_batch": batch, "log_every": max(steps // 6, 1)}
    run = config.run.model_copy(update={"threads": 1})
    return config.model_copy(update={"train": config.train.model_copy(update=sizes), "run": run})


def start(ranks: list[tuple[TrainConfig, World, int]]) -> None:
    """Run each on its core, all at once, in processes of their own that find everything imported.

    Raises:
        RuntimeError: one failed.
    """
    children = [os.fork() or be_rank(*rank) for rank in ranks]
    if any(os.waitpid(child, 0)[1] for child in children):
        raise RuntimeError("a rank failed; its traceback is above")


def be_rank(config: TrainConfig, world: World, core: int) -> int:
    """What a child does; it never returns."""
    code = 1
    try:
        os.sched_setaffinity(0, {core})
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        data = RunData(config)
        code = train(data.model_config(), world, data, StopRequest())
    except Exception:  # noqa: BLE001 - shown; the parent sees the exit code
        traceback.print_exc()
    finally:
        os._exit(code)


def median_step(config: TrainConfig) -> float:
    """Seconds: the median over the run's lines, without the first, of each line's median step."""
    lines = [json.loads(line) for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["step_seconds_p50"] for line in lines[1:])


if __name__ == "__main__":
    main()
