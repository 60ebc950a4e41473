"""kill -9 at random moments, saves included: is the run afterwards bit-equal to one that nothing ever stopped?

Two ranks, dropout on, fp32. One rank is killed, the other ends by itself or is killed too, and the same command goes on. Every
second kill waits for a save to begin. A second run is killed in the same way while it saves in the background
(`checkpoint.asynchronous`). Ranks are forked from a process that has imported everything, so that a start costs seconds less;
nothing else differs from the command.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import measure
import numpy as np
import torch
import torch._dynamo
import torch._inductor.compile_fx  # both: what the first optimizer would import, in every rank anew

from data_pipeline.records import Block
from data_pipeline.shard_index import DatasetInfo, write_index
from data_pipeline.shards import ShardWriter
from pretrain import run, trainer  # noqa: F401 - the forked ranks find it imported
from pretrain.checkpoint import load_model_weights, resolve

RANKS = 2
CONFIG = """
seed = 3
[data]
dir = "{folder}/data"
[run]
dir = "{run}"
threads = 1
[model]
layers = 2
hidden = 64
heads = 2
intermediate = 128
[train]
steps = {steps}
global_batch = 16
micro_batch = 4
log_every = 1
[optimizer]
lr = 1e-3
[schedule]
warmup_steps = 5
[checkpoint]
every = 2
keep = 2
asynchronous = {asynchronous}
[validation]
every = 0
[tracking]
enabled = false
[deepspeed]
zero_optimization = {{ stage = 1 }}
"""


def main() -> None:
    """Print the number of kills, how many struck a save, and 1 if everything was equal."""
    quick = measure.quick_argument(__doc__ or "").quick
    steps, plans = (24, {"waiting": 2, "background": 2}) if quick else (400, {"waiting": 20, "background": 10})
    rng, equal, struck = random.Random(20), True, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data" / "train")
        straight = _config(folder, "straight", steps, background=False)
        code = _finish(_start(straight))
        assert code == 0, f"the run without kills ended with {code}"
        for plan, kills in plans.items():
            config = _config(folder, plan, steps, background=plan == "background")
            struck[plan] = [_kill(config, folder / plan, rng, in_save=number % 2 == 1) for number in range(kills)]
            code = _finish(_start(config))
            assert code == 0, f"the killed run ended with {code}"
            equal = _same(folder / "straight", folder / plan) and equal
    for plan, in_saves in struck.items():
        print(f"{plan}: {len(in_saves)} kills, {sum(in_saves)} of them during a save; {steps} steps")
    print(f"bit-equal losses and weights: {equal}")
    measure.report("kill_resume", float(equal), "equal", 1.0, 1.0)
    sys.exit(0 if equal else 1)


def _kill(config: Path, run: Path, rng: random.Random, *, in_save: bool) -> bool:
    """Start, kill one rank after some steps or early in a save, end the other; whether a save was under way."""
    ranks, root = _start(config), run / "checkpoints"
    _wait_for_step(ranks, run, _last_step(run) + rng.randint(0, 4))
    if in_save:
        while not list(root.glob("step-*.incomplete")):
            _require_alive(ranks)
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03))
    else:
        time.sleep(rng.uniform(0, 0.4))  # anywhere in a step, a save or the start
    struck = bool(list(root.glob("*.incomplete")))
    os.kill(rng.choice(ranks), signal.SIGKILL)
    _finish(ranks, limit=10.0)
    print(f"killed{' in a save' if struck else ''}: after step {_last_step(run)}", flush=True)
    return struck


def _config(folder: Path, name: str, steps: int, *, background: bool) -> Path:
    path = folder / f"{name}.toml"
    text = CONFIG.format(folder=folder, run=folder / name, steps=steps, asynchronous=str(background).lower())
    path.write_text(text)
    return path


def write_data(directory: Path, blocks: int = 12) -> None:
    """Random examples of 6 to 24 ids."""
    rng = np.random.default_rng(0)
    directory.mkdir(parents=True)
    with ShardWriter(directory, "shard-00000.tar") as writer:
        for number in range(blocks):
            lengths = rng.integers(6, 25, 16)
            ids = rng.integers(5, 200, lengths.sum()).astype(np.uint16)
            ends = np.cumsum(lengths)
            ids[ends - lengths], ids[ends - 1], ids[ends - lengths + 2] = 2, 3, 3
            places = np.stack([rng.permutation(np.arange(3, 5))[:1] for _ in lengths]).ravel()
            block = Block(
                input_ids=ids,
                lengths=lengths.astype(np.uint16),
                segment_a_lengths=np.full(16, 3, np.uint16),
                nsp_labels=rng.integers(0, 2, 16).astype(np.int8),
                mask_counts=np.ones((1, 16), np.uint16),
                mask_positions=places.astype(np.uint16),
                mask_inputs=np.full(16, 4, np.uint16),
            )
            writer.add(f"{number:06d}", block)
    assert writer.record is not None
    special = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    info = DatasetInfo(
        settings={}, tokenizer="0" * 64, vocab_size=200, special_ids=special, max_seq_length=24, mask_sets=1
    )
    write_index(directory, [writer.record], info)


def _start(config: Path) -> list[int]:
    """Fork the ranks; their process ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            _be_rank(config, rank, port)
        ranks.append(pid)
    return ranks


def _be_rank(config: Path, rank: int, port: int) -> None:
    code = 1
    try:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_SIZE": RANKS, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in world.items()}, MASTER_ADDR="127.0.0.1")
        log = os.open(config.with_suffix(f".{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = run.main(["--config", str(config)])
    finally:
        os._exit(code)


def _wait_for_step(ranks: list[int], folder: Path, step: int) -> None:
    """Until the run has logged this step.

    Raises:
        RuntimeError: a rank ended before.
    """
    while _last_step(folder) < step:
        _require_alive(ranks)
        time.sleep(0.01)


def _require_alive(ranks: list[int]) -> None:
    if any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in ranks):
        raise RuntimeError("a rank ended by itself, or the run was complete before its last kill")


def _finish(ranks: list[int], limit: float = 600.0) -> int:
    """Wait for all ranks, killing those that take longer; the worst exit code."""
    deadline, codes = time.monotonic() + limit, []
    for pid in ranks:
        while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return max(codes, key=abs)


def _records(folder: Path) -> list[tuple[int, float, float]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("}")]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in whole]


def _last_step(folder: Path) -> int:
    return max((record[0] for record in _records(folder)), default=0)


def _same(one: Path, other: Path) -> bool:
    first, second = (load_model_weights(resolve(folder)) for folder in (one, other))
    weights = first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    return weights and _records(one) == _records(other)


if __name__ == "__main__":
    main()
