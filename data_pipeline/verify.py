"""`python -m data_pipeline.verify INDEX`: read a whole data set, check every hash, count and rule, name what is wrong."""

from __future__ import annotations

import argparse
import posixpath
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from fsspec.core import url_to_fs

from data_pipeline.block_codec import ShardError, decode_block
from data_pipeline.records import Block
from data_pipeline.shard_index import DatasetInfo, ShardIndex
from data_pipeline.shards import BlockRow, file_sha256, iter_members


@contextmanager
def local_file(path: str) -> Iterator[Path]:
    """A file of a local path or fsspec URL; what is remote is copied to the temporary folder for as long as the block runs.

    Raises:
        ShardError: it cannot be read. One that is raised inside names the file as `path` does.
    """
    if "://" not in path:
        yield Path(path)
        return
    system, remote = url_to_fs(path)
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / posixpath.basename(remote)
        try:
            system.get_file(remote, str(local))
            yield local
        except ShardError as error:
            raise ShardError(str(error).replace(str(local), path)) from error
        except OSError as error:
            raise ShardError(f"{path}: cannot read it: {error}") from error


def find_faults(directory: str | Path) -> Iterator[str]:
    """Every fault of a data set as one line each, in the order of its shards; nothing where it is whole.

    A damaged shard gives one line, for its first fault, and the others are still read.

    Args:
        directory: local folder or fsspec URL with `index.json`.
    """
    directory = str(directory).rstrip("/")
    try:
        index = ShardIndex.open(directory)
    except ShardError as error:
        yield str(error)
        return
    owners: dict[str, str] = {}
    firsts = np.searchsorted(index.blocks["shard"], np.arange(len(index.shards) + 1))
    for number, shard in enumerate(index.shards):
        path = f"{directory}/{shard.name}"
        table = index.blocks[firsts[number] : firsts[number + 1]]
        try:
            with local_file(path) as file:
                rows = list(_read_shard(file, index.info))
                _compare(file, rows, table, (shard.blocks, shard.examples, shard.tokens))
                same = file_sha256(file) == shard.sha256
        except (ShardError, OSError) as error:
            yield str(error)
            continue
        if not same:
            yield f"{path}: sha256 differs from index.json: its bytes are not those that were written"
        for row in rows:
            if row.key in owners:
                yield f"{path}: key {row.key!r} is in {owners[row.key]} too; keys are unique in a data set"
            owners[row.key] = shard.name
    index.close()
    known = {shard.name for shard in index.shards}
    system, root = url_to_fs(directory)
    for name in sorted(posixpath.basename(path) for path in system.ls(root, detail=False)):
        if name.endswith(".tar") and name not in known:
            yield f"{directory}/{name}: not in index.json: left by an earlier build; remove it"
        elif name.endswith(".tmp"):
            yield f"{directory}/{name}: unfinished file of a build that was stopped; remove it"


def _read_shard(path: Path, info: DatasetInfo) -> Iterator[BlockRow]:
    for key, offset, payload in iter_members(path):
        where = f"{path}: key {key!r}"
        block = decode_block(payload, where=where, deep=True)
        check_content(block, info, where)
        yield BlockRow(key=key, offset=offset, length=len(payload), examples=block.examples, tokens=block.tokens)


def check_content(block: Block, info: DatasetInfo, where: str) -> None:
    """Check what a block may hold in this data set.

    Raises:
        ShardError: names the rule.
    """
    special = info.special_ids
    starts = np.cumsum(block.lengths, dtype=np.int64) - block.lengths
    counts = block.mask_counts.ravel()
    labels = block.input_ids[np.repeat(np.tile(starts, len(block.mask_counts)), counts) + block.mask_positions]
    structural = [special[name] for name in ("pad", "cls", "sep", "mask")]
    rules = {
        f"{len(block.mask_counts)} mask sets, index.json says {info.mask_sets}": len(block.mask_counts)
        == info.mask_sets,
        f"an id of {info.vocab_size} or more, the size of the vocabulary": int(block.input_ids.max()) < info.vocab_size
        and int(block.mask_inputs.max(initial=0)) < info.vocab_size,
        f"an example longer than {info.max_seq_length} tokens": int(block.lengths.max()) <= info.max_seq_length,
        "an example that does not begin with [CLS]": bool((block.input_ids[starts] == special["cls"]).all()),
        "an example that does not end with [SEP]": bool(
            (block.input_ids[starts + block.lengths - 1] == special["sep"]).all()
        ),
        "[PAD] or [MASK] in the text": not np.isin(block.input_ids, [special["pad"], special["mask"]]).any(),
        "a special token is to be predicted": not np.isin(labels, structural).any(),
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise ShardError(f"{where}: {'; '.join(broken)}")


def _compare(path: Path, rows: list[BlockRow], table: np.ndarray, counts: tuple[int, int, int]) -> None:
    found = [(row.offset, row.length, row.examples) for row in rows]
    listed = list(zip(*(table[name].tolist() for name in ("offset", "length", "examples")), strict=True))
    for row, is_, should in zip(rows, found, listed, strict=False):
        if is_ != should:
            raise ShardError(
                f"{path}: key {row.key!r}: offset, length and examples are {is_}, blocks.npy says {should}: "
                "the shard was reordered or is of another build"
            )
    totals = (len(rows), sum(row.examples for row in rows), sum(row.tokens for row in rows))
    if len(found) != len(listed) or totals != counts:
        raise ShardError(
            f"{path}: blocks, examples and tokens are {totals}, index.json says {counts} and blocks.npy lists "
            f"{len(listed)} blocks: the shard is of another build"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code is 0 for a whole data set, 1 for faults, 2 for a path that is none."""
    parser = argparse.ArgumentParser(prog="python -m data_pipeline.verify", description=__doc__)
    parser.add_argument("index", help="folder or fsspec URL with index.json, or index.json itself")
    path = parser.parse_args(arguments).index.rstrip("/").removesuffix("/index.json")
    if "://" not in path and not Path(path).is_dir():
        print(f"{path}: no such folder", file=sys.stderr)
        return 2
    faults = 0
    for fault in find_faults(path):
        print(fault, file=sys.stderr)
        faults += 1
    if faults:
        print(f"{path}: {faults} {'fault' if faults == 1 else 'faults'}", file=sys.stderr)
        return 1
    index = ShardIndex.open(path)
    print(
        f"{path}: whole: {len(index.shards)} shards, {len(index.blocks)} blocks, {index.examples} examples, "
        f"{index.tokens} tokens, fingerprint {index.fingerprint[:16]}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
