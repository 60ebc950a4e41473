"""A debugging switch, `train.sample_log`: every rank notes what it trains on, and the notes prove each example once an epoch.

    python -m pretrain.sample_log RUN_DIR

The order of examples is arithmetic, so that no run needs a list of what it has seen. This is the check of that, on what was
really read: a line of `samples/rank-N.jsonl` holds the place of a rank's first example of a step in the stream and a checksum
of each one's tokens; the command compares them with the checksums of the data.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from cluster.world import World
from data_pipeline.block_codec import ShardError, decode_block
from data_pipeline.records import Batch
from data_pipeline.shard_index import ShardIndex
from pretrain.tracking import MetricsFile

_FOLDER = "samples"


class SampleLog:
    """This rank's file.

    Args:
        run: the run folder.
        world: this rank's place.
        data: the training set's folder.
        after_step: the run goes on after this step; later lines of all ranks, also of ranks that are no more, are dropped.
    """

    def __init__(self, run: Path, *, world: World, data: str, after_step: int) -> None:
        folder = run / _FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._data, self._world = data, world
        gone = [path for path in folder.glob("rank-*.jsonl") if int(path.stem.removeprefix("rank-")) >= world.size]
        for path in gone if world.rank == 0 else ():
            MetricsFile(path, after_step=after_step).close()
        self._file = MetricsFile(folder / f"rank-{world.rank}.jsonl", after_step=after_step)

    def write(self, step: int, position: int, batches: Sequence[Batch]) -> None:
        """Note a step.

        Args:
            step: its number.
            position: of the stream, after it.
            batches: this rank's micro-batches, on the CPU.
        """
        digests = [digest for batch in batches for digest in _digests(batch)]
        first = position - len(digests) * (self._world.size - self._world.rank)
        self._file.write({"step": step, "data": self._data, "first": first, "digests": digests})

    def close(self) -> None:
        """Sync and close."""
        self._file.close()


def _digests(batch: Batch) -> Iterator[int]:
    """crc32 of each example's tokens as they lie in the shards, predictions put back."""
    ids = batch.input_ids_T.clone()
    ids[batch.mask_positions_P] = batch.mask_labels_P
    ends = batch.cu_seqlens.tolist()
    for begin, end in itertools.pairwise(ends):
        yield zlib.crc32(ids[begin:end].numpy().astype("<u4").tobytes())


def check(run: Path) -> list[str]:
    """What the notes of a run say, one line for each data set; all ranks' files together.

    Raises:
        ValueError: no notes, an example that was read twice or left out within an epoch, or one that the data do not hold.
        ShardError: the data cannot be read.
    """
    stream: dict[str, dict[int, int]] = {}
    for path in sorted((run / _FOLDER).glob("rank-*.jsonl")):
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            seen = stream.setdefault(line["data"], {})
            for place, digest in enumerate(line["digests"], start=line["first"]):
                if place in seen:
                    raise ValueError(f"{path}: step {line['step']} reads place {place} of the stream a second time")
                seen[place] = digest
    if not stream:
        raise ValueError(f"{run / _FOLDER}: no notes; they are written with train.sample_log=true")
    return [_check_stream(data, seen) for data, seen in stream.items()]


def _check_stream(data: str, seen: dict[int, int]) -> str:
    written = Counter(_written(data))
    examples, whole = written.total(), 0
    for epoch in range(max(seen) // examples + 1):
        begin = epoch * examples
        read = Counter(seen[place] for place in range(begin, begin + examples) if place in seen)
        wrong = read - written
        if wrong:
            raise ValueError(f"{data}: epoch {epoch} holds {wrong.total()} examples twice, or that are not in the data")
        noted = range(max(begin, min(seen)), min(begin + examples, max(seen) + 1))
        missing = [place for place in noted if place not in seen]
        if missing:
            raise ValueError(f"{data}: epoch {epoch}: {len(missing)} places were left out, {missing[0]} is the first")
        whole += read == written
    return f"{data}: {len(seen)} examples noted, {whole} whole epochs of {examples}, every example once in each"


def _written(data: str) -> Iterator[int]:
    index = ShardIndex.open(data)
    try:
        for row in range(len(index.blocks)):
            block = decode_block(index.read_block(row), where=f"{data}, block {row}")
            for ids in np.split(block.input_ids, np.cumsum(block.lengths.astype(np.int64))[:-1]):
                yield zlib.crc32(ids.astype("<u4").tobytes())
    finally:
        index.close()


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 where the notes disagree with the data."""
    parser = argparse.ArgumentParser(prog="python -m pretrain.sample_log", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="run folder")
    try:
        for line in check(parser.parse_args(arguments).run):
            print(line)
    except (OSError, ValueError, ShardError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
