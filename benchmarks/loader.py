"""How fast the loader makes batches beside bare reading of the same bytes, and how long a resume takes.

    python benchmarks/loader.py [--quick]

Examples of BERT's length 128 with 4 mask sets, blocks of 256, one process, steps prepared by the loader's thread. Rates
are per second of processor time of the whole process, so that other work on the machine does not blur them. The data
sits in the page cache for both: this measures the program, not the disk.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from measure import quick_argument, report

from data_pipeline.loader import build_loader
from data_pipeline.masking import default_limit, prediction_counts
from data_pipeline.records import Block
from data_pipeline.shard_index import DatasetInfo, ShardIndex, write_index
from data_pipeline.shards import ShardWriter

LENGTH = 128
MASK_SETS = 4
BLOCK_EXAMPLES = 256
VOCABULARY = 30522
RESUME_EXAMPLES = 100_000_000
NEEDED_PER_SECOND = 100_000
GLOBAL_BATCH, MICRO_BATCH = 256, 32


def make_block(rng: np.random.Generator) -> Block:
    """Nine in ten examples are full, as in BERT's data; ids and places of masks are uniform."""
    lengths = np.where(rng.random(BLOCK_EXAMPLES) < 0.1, rng.integers(12, LENGTH, BLOCK_EXAMPLES), LENGTH)
    counts = np.tile(prediction_counts(lengths, 0.15, default_limit(LENGTH, 0.15)), (MASK_SETS, 1))
    positions = [np.sort(rng.permutation(int(lengths[i]))[: row[i]]) for row in counts for i in range(BLOCK_EXAMPLES)]
    return Block(
        input_ids=rng.integers(0, VOCABULARY, lengths.sum()).astype(np.uint16),
        lengths=lengths.astype(np.uint16),
        segment_a_lengths=(lengths // 2).astype(np.uint16),
        nsp_labels=rng.integers(0, 2, BLOCK_EXAMPLES).astype(np.int8),
        mask_counts=counts.astype(np.uint16),
        mask_positions=np.concatenate(positions).astype(np.uint16),
        mask_inputs=rng.integers(0, VOCABULARY, counts.sum()).astype(np.uint16),
    )


def write_data(folder: Path, blocks: int) -> ShardIndex:
    """`blocks` blocks in shards of 50; 20 different ones in turn, as making them takes longer than reading them."""
    rng = np.random.default_rng(0)
    kinds = [make_block(rng) for _ in range(20)]
    records = []
    for shard, first in enumerate(range(0, blocks, 50)):
        with ShardWriter(folder, f"shard-{shard:05d}.tar") as writer:
            for number in range(first, min(first + 50, blocks)):
                writer.add(f"{number:07d}", kinds[number % len(kinds)])
        records.append(writer.close())
    info = DatasetInfo(
        settings={},
        tokenizer="0" * 64,
        vocab_size=VOCABULARY,
        special_ids={"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103},
        max_seq_length=LENGTH,
        mask_sets=MASK_SETS,
    )
    return write_index(folder, records, info)


def per_cpu_second(examples: int, work: Callable[[], object]) -> float:
    """Examples per second of processor time."""
    before = time.process_time()
    work()
    return examples / (time.process_time() - before)


def load(folder: Path, steps: int) -> float:
    """Examples a CPU second of the loader."""
    with build_loader(folder, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH) as loader:
        next(loader)
        return per_cpu_second(steps * GLOBAL_BATCH, lambda: [next(loader) for _ in range(steps)])


def read_bare(index: ShardIndex) -> float:
    """Examples a CPU second of reading every block's bytes and nothing else."""
    return per_cpu_second(index.examples, lambda: [index.read_block(row) for row in range(len(index.blocks))])


def resume_seconds(folder: Path, info: DatasetInfo) -> float:
    """Seconds from nothing to the first step in the middle of epoch 70 of an index of 100 million examples.

    The index is synthetic: its rows point, over and over, at the blocks of one real shard.
    """
    with ShardWriter(folder, "shard-00000.tar") as writer:
        for number in range(50):
            writer.add(f"{number:07d}", make_block(np.random.default_rng(number)))
    record = writer.close()
    rows = tuple(
        replace(record.rows[number % len(record.rows)], key=str(number))
        for number in range(-(-RESUME_EXAMPLES // BLOCK_EXAMPLES))
    )
    large = write_index(folder, [replace(record, rows=rows)], info)
    state = {"seed": 0, "position": 70 * large.examples + 12_345_678, "dataset_examples": large.examples}
    before = time.perf_counter()
    with build_loader(folder, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, state=state) as loader:
        next(loader)
        return time.perf_counter() - before


def main() -> None:
    """Print both measurements and the closing line."""
    arguments = quick_argument(__doc__ or "")
    torch.set_num_threads(1)
    blocks, repeats = (100, 3) if arguments.quick else (800, 5)
    with tempfile.TemporaryDirectory() as name:
        data, large = Path(name, "data"), Path(name, "large")
        data.mkdir()
        large.mkdir()
        index = write_data(data, blocks)
        read_bare(index)
        rates = [(load(data, blocks - 1), read_bare(index)) for _ in range(repeats)]
        loader, bare = (statistics.median(column) for column in zip(*rates, strict=True))
        print(f"loader        {loader:12,.0f} examples per CPU second")
        print(f"bare reading  {bare:12,.0f} examples per CPU second of the same bytes")
        seconds = resume_seconds(large, index.info)
        print(
            f"resume        {seconds:12.3f} s to the first step in epoch 70 of {RESUME_EXAMPLES:,} examples (goal: 1 s)"
        )
        index.close()
    report("loader", loader, "examples per CPU second", bare, needed=NEEDED_PER_SECOND)


if __name__ == "__main__":
    main()
