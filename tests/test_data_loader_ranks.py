"""Ranks as real processes: what four of them read together, with other hash seeds, and in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.order import ExampleOrder
from data_pipeline.shard_index import ShardIndex
from data_pipeline.shards import decode_block

ROOT = Path(__file__).resolve().parent.parent
SEED = 7
EPOCHS = 4
RANKS = 4

RANK = """
import json, sys, zlib
from data_pipeline import build_loader

def digests(batch):
    ids = batch.input_ids_T.clone()
    ids[batch.mask_positions_P] = batch.mask_labels_P
    ends = batch.cu_seqlens.tolist()
    return [zlib.crc32(ids[a:b].numpy().astype("<u2").tobytes()) for a, b in zip(ends, ends[1:])]

seen = {}
for folder, first, epochs in json.loads(sys.argv[1]):
    loader = build_loader(folder, global_batch=8, micro_batch=2, rank=int(sys.argv[2]), world_size=int(sys.argv[3]),
                          seed=int(sys.argv[4]))
    loader.load_state_dict({**loader.state_dict(), "position": first * loader.examples})
    steps = epochs * loader.examples // 8
    seen[folder] = [[digest for batch in next(loader) for digest in digests(batch)] for _ in range(steps)]
    loader.close()
print(json.dumps(seen))
"""


def start(work: list[tuple[str, int, int]], rank: int, world_size: int, hash_seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RANK, json.dumps(work), str(rank), str(world_size), str(SEED)]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, list[list[int]]]:
    shown, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return json.loads(shown)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, write_dataset: Callable[..., ShardIndex]) -> dict[str, Any]:
    """16 shards, and 2 shards, read by 4 ranks for 4 epochs; then epoch 1 again by one fresh process."""
    folders = {shards: tmp_path_factory.mktemp("ranks") / f"{shards}" for shards in (16, 2)}
    for shards, folder in folders.items():
        write_dataset(folder, shards=shards, blocks=2, examples=8, seed=shards)
    work = [(str(folder), 0, EPOCHS) for folder in folders.values()]
    started = [start(work, rank, RANKS, hash_seed=rank) for rank in range(RANKS)]
    started.append(start([(str(folders[16]), 1, 1)], 0, 1, hash_seed=99))
    *ranks, fresh = [finish(process) for process in started]
    return {
        "folders": folders,
        "ranks": {shards: [rank[str(folder)] for rank in ranks] for shards, folder in folders.items()},
        "fresh": fresh[str(folders[16])],
    }


def written(folder: Path) -> list[int]:
    """A digest of every example in the order of the index."""
    index = ShardIndex.open(folder)
    digests = []
    for row in range(len(index.blocks)):
        block = decode_block(index.read_block(row), where="x")
        for ids in np.split(block.input_ids, np.cumsum(block.lengths)[:-1]):
            digests.append(zlib.crc32(ids.tobytes()))
    assert len(set(digests)) == len(digests) == index.examples
    return digests


def joined(parts: list[list[list[int]]]) -> list[int]:
    """The global stream: of each step, rank 0's examples, then rank 1's, and so on."""
    return [digest for step in zip(*parts, strict=True) for part in step for digest in part]


@pytest.mark.multiproc
def test_r18_fewer_shards_than_ranks_splits_by_sample(run: dict[str, Any]) -> None:
    parts = run["ranks"][2]
    index = ShardIndex.open(run["folders"][2])
    assert len(index.shards) < RANKS
    assert {len(part) for part in parts} == {EPOCHS * index.examples // 8}, "every rank makes the same steps"
    for epoch in range(EPOCHS):
        stream = joined(parts)[epoch * index.examples : (epoch + 1) * index.examples]
        assert sorted(stream) == sorted(written(run["folders"][2]))


@pytest.mark.multiproc
def test_r19_ranks_read_every_example_once_an_epoch_in_an_order_of_seed_and_epoch(run: dict[str, Any]) -> None:
    digests = written(run["folders"][16])
    stream = joined(run["ranks"][16])
    index = ShardIndex.open(run["folders"][16])
    assert len(index.shards) == 16
    assert len(stream) == EPOCHS * index.examples
    order = ExampleOrder(index.blocks["examples"], SEED)
    for epoch in range(EPOCHS):
        here = slice(epoch * index.examples, (epoch + 1) * index.examples)
        assert sorted(stream[here]) == sorted(digests)
        assert stream[here] == [digests[i] for i in order.example_ids(here.start, here.stop)]
    owned = [{digest for step in part[: index.examples // 8] for digest in step} for part in run["ranks"][16]]
    assert sum(map(len, owned)) == len(set.union(*owned)) == len(digests), "no two ranks share an example"


@pytest.mark.multiproc
def test_r20_epochs_differ_and_a_fresh_process_reproduces_one(run: dict[str, Any]) -> None:
    stream = joined(run["ranks"][16])
    size = len(stream) // EPOCHS
    epochs = [tuple(stream[epoch * size : (epoch + 1) * size]) for epoch in range(EPOCHS)]
    assert len(set(epochs)) == EPOCHS
    assert joined([run["fresh"]]) == list(epochs[1])
