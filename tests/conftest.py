"""Fixtures that every room shares."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.records import Block
from data_pipeline.shard_index import DatasetInfo, ShardIndex, write_index
from data_pipeline.shards import ShardWriter

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with the public data sets (`CLOZEWORKS_DATA`, default `../shared/data`); skips where it is absent."""
    path = Path(os.environ.get("CLOZEWORKS_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no data sets at {path}; set CLOZEWORKS_DATA")
    return path


Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def slurm_script() -> Iterator[Script]:
    """Runs `tests/testcluster.sh WORDS`: `exec` for the login node of a real Slurm cluster of three nodes with 8 cores and 6
    devices each. One cluster serves all tests. Skips without Slurm's daemons or root; where both are there, a cluster
    that does not come up is a failure.
    """
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [name for name in ("slurmctld", "slurmd", "munged", "srun") if not shutil.which(name, path=path)]:
        pytest.skip(f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge")
    if os.getuid() != 0:
        pytest.skip("a test cluster needs root")
    # Sockets live in there: their paths are limited to about 100 characters.
    folder = Path(tempfile.mkdtemp(prefix="cw-slurm-", dir="/tmp"))
    own = {"CLUSTER_DIR": str(folder), "NODE_CPUS": "8", "NODE_GPUS": "6", "OMP_NUM_THREADS": "1"}
    environ = os.environ | own | {"PYTHONPATH": str(ROOT)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"):
        environ.pop(name, None)

    def script(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(ROOT / "tests" / "testcluster.sh"), *words]
        return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)

    try:
        started = script("up", "3")
        assert started.returncode == 0, f"the test cluster did not come up: {started.stdout}{started.stderr}"
        yield script
    finally:
        script("down")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def write_dataset() -> Callable[..., ShardIndex]:
    """A function that writes a small data set of random examples, see `_write_dataset`."""
    return _write_dataset


@pytest.fixture(scope="session")
def make_block() -> Callable[..., Block]:
    """A function that makes a block of random examples, see `random_block`."""
    return random_block


def _write_dataset(
    directory: Path,
    *,
    shards: int = 2,
    blocks: int = 3,
    examples: int = 5,
    mask_sets: int = 2,
    seed: int = 0,
    tokenizer: str = "0" * 64,
) -> ShardIndex:
    """Shards of blocks of examples; block sizes differ by one now and then, so that no size divides anything."""
    rng = np.random.default_rng(seed)
    directory.mkdir(parents=True, exist_ok=True)
    records = []
    for shard in range(shards):
        with ShardWriter(directory, f"shard-{shard:05d}.tar") as writer:
            for block in range(blocks):
                writer.add(f"{shard:05d}-{block:06d}", random_block(rng, examples + (block % 2), mask_sets))
        assert writer.record is not None
        records.append(writer.record)
    info = DatasetInfo(
        settings={"max_seq_length": 24},
        tokenizer=tokenizer,
        vocab_size=100,
        special_ids={"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4},
        max_seq_length=24,
        mask_sets=mask_sets,
    )
    return write_index(directory, records, info)


def random_block(rng: np.random.Generator, examples: int, mask_sets: int) -> Block:
    """Examples `[CLS] A [SEP] B [SEP]` of 6 to 24 ids below 100, each with 1 to 3 predictions in each mask set."""
    lengths = rng.integers(6, 25, examples)
    a_lengths = rng.integers(3, lengths - 1)
    counts = rng.integers(1, 4, (mask_sets, examples))
    ids = rng.integers(5, 100, lengths.sum()).astype(np.uint16)
    ends = np.cumsum(lengths)
    ids[ends - lengths] = 2
    ids[ends - 1] = ids[ends - lengths + a_lengths - 1] = 3
    positions = [
        np.sort(rng.choice(np.delete(np.arange(1, lengths[i] - 1), a_lengths[i] - 2), counts[s, i], replace=False))
        for s in range(mask_sets)
        for i in range(examples)
    ]
    flat_positions = np.concatenate([np.zeros(0, np.int64), *positions])
    return Block(
        input_ids=ids,
        lengths=lengths.astype(np.uint16),
        segment_a_lengths=a_lengths.astype(np.uint16),
        nsp_labels=rng.integers(0, 2, examples).astype(np.int8),
        mask_counts=counts.astype(np.uint16),
        mask_positions=flat_positions.astype(np.uint16),
        mask_inputs=rng.integers(4, 100, len(flat_positions)).astype(np.uint16),
    )


@pytest.fixture(scope="session")
def write_bert() -> Callable[..., Path]:
    """A function that writes a Hugging Face folder with a random BERT, see `_write_bert`."""
    return _write_bert


def _write_bert(folder: Path, words: list[str], **changes: object) -> Path:
    """Two layers of 32, dropout off, and a WordPiece vocabulary of these words behind the special tokens."""
    import torch
    from transformers import BertConfig, BertModel

    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    settings = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.1,
    }
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(tokens), **settings | changes)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return folder
