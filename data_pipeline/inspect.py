"""`python -m data_pipeline.inspect SHARD_OR_INDEX`: examples as a person reads them.

The name is that of a module of the standard library. That is harmless as long as this folder itself is not on `sys.path`,
which `python -m` and an installed package never do; nothing here is run as a script by its path.
"""  # noqa: A005

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data_pipeline.block_codec import ShardError, decode_block
from data_pipeline.records import Block
from data_pipeline.shard_index import ShardIndex
from data_pipeline.shards import iter_members
from data_pipeline.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from data_pipeline.verify import local_file

_PAIR = {0: "B follows A", 1: "B is from another document", -1: "no sentence objective"}
_LEGEND = "predictions: {what the encoder sees <- the true token}; {= token} is left as it is"


def iter_blocks(path: str | Path, start: int) -> Iterator[tuple[str, int, Block]]:
    """(where it is, number of its first example, block) from the block that holds example `start` on.

    Raises:
        ShardError: as `decode_block`, `iter_members` and `ShardIndex.open`; or there is no example `start`.
    """
    path, first = str(path), 0
    if path.endswith(".tar"):
        with local_file(path) as file:
            for key, _, payload in iter_members(file):
                block = decode_block(payload, where=f"{file}: key {key!r}", deep=True)
                if first + block.examples > start:
                    yield f"{file.name} {key}", first, block
                first += block.examples
    else:
        index = ShardIndex.open(path)
        ends = np.cumsum(index.blocks["examples"], dtype=np.int64)
        first = int(ends[-1])
        for row in range(int(np.searchsorted(ends, start, side="right")), len(ends)):
            where = index.where(row)
            block = decode_block(index.read_block(row), where=where, deep=True)
            shard, _, rest = where.rpartition(": key ")
            yield f"{Path(shard).name} {rest.split()[0].strip(chr(39))}", int(ends[row]) - block.examples, block
        index.close()
    if start >= first:
        raise ShardError(f"{path}: holds {first} examples, so there is no example {start}")


def describe(block: Block, number: int, mask_set: int, tokenizer: Tokenizer | None) -> list[str]:
    """One example as lines of text: its lengths and pair label, then its parts with predictions marked.

    Args:
        block: holds the example.
        number: which example of the block.
        mask_set: which masks to show; nothing is marked where the block has none.
        tokenizer: turns ids into words; None shows the ids.
    """
    start = int(block.lengths[:number].sum(dtype=np.int64))
    length, a_length = int(block.lengths[number]), int(block.segment_a_lengths[number])
    ids = block.input_ids[start : start + length].tolist()
    masks = _masks(block, number, mask_set)
    words = [_word(ids[at], masks.get(at), tokenizer) for at in range(length)]
    glued = [tokenizer is not None and at > 0 and not tokenizer.word_starts[ids[at]] for at in range(length)]
    parts = {"A": range(a_length), "B": range(a_length, length)}
    sizes = f"{length} tokens (A {a_length}, B {length - a_length}), {len(masks)} predictions"
    lines = [f"{sizes}, {_PAIR[int(block.nsp_labels[number])]}"]
    for name, places in parts.items():
        if places:
            text = "".join(("" if glued[at] else " ") + words[at] for at in places)
            lines.append(f"  {name}:{text}")
    return lines


def _masks(block: Block, number: int, mask_set: int) -> dict[int, int]:
    """Predicted position -> what the encoder sees there."""
    if not len(block.mask_counts):
        return {}
    before = block.mask_counts.ravel()[: mask_set * block.examples + number]
    start = int(before.sum(dtype=np.int64))
    here = slice(start, start + int(block.mask_counts[mask_set, number]))
    return dict(zip(block.mask_positions[here].tolist(), block.mask_inputs[here].tolist(), strict=True))


def _word(token: int, seen: int | None, tokenizer: Tokenizer | None) -> str:
    def show(one: int) -> str:
        return str(one) if tokenizer is None else tokenizer.tokens[one].removeprefix("##").removeprefix("▁")

    if seen is None:
        return show(token)
    return f"{{= {show(token)}}}" if seen == token else f"{{{show(seen)} <- {show(token)}}}"


def find_tokenizer(path: str | Path, given: Path | None) -> Tokenizer | None:
    """The tokenizer that is named, else the one beside the data set (where that is local), else None.

    Raises:
        TokenizerError: it cannot be read.
        ShardError: it is not the one that the data set was built with.
    """
    path = str(path)
    folder = path.rpartition("/")[0] or "." if path.endswith(".tar") else path
    directory = given or Path(folder).parent / "tokenizer"
    if given is None and not directory.is_dir():
        return None
    tokenizer = load_tokenizer(directory)
    if not path.endswith(".tar") or Path(folder, "index.json").is_file():
        index = ShardIndex.open(folder)
        if index.info.tokenizer != tokenizer.fingerprint:
            raise ShardError(
                f"{directory}: not the tokenizer of {folder} (fingerprints differ); name it by --tokenizer"
            )
    return tokenizer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data_pipeline.inspect",
        description="Show examples of a shard or data set as a person reads them.",
    )
    parser.add_argument(
        "path", help="a shard (.tar), a folder with index.json, or index.json itself; also an fsspec URL"
    )
    parser.add_argument("--start", type=int, default=0, help="first example, counted from 0")
    parser.add_argument("--count", type=int, default=5, help="how many examples")
    parser.add_argument("--mask-set", type=int, default=0, help="which precomputed masks")
    parser.add_argument("--tokenizer", type=Path, help="its folder; default: `tokenizer` beside the data set's folder")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code is 2 where what was asked for is not there or cannot be read."""
    options = _parser().parse_args(arguments)
    path = options.path.rstrip("/").removesuffix("/index.json")
    try:
        if options.start < 0 or options.count < 1 or options.mask_set < 0:
            raise ShardError("--start and --mask-set count from 0, --count from 1")
        if "://" not in path and not Path(path).exists():
            raise ShardError(f"{path}: not there; name a shard (.tar) or a folder with index.json")
        _show(path, options.start, options.count, options.mask_set, find_tokenizer(path, options.tokenizer))
    except (ShardError, TokenizerError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _show(path: str, start: int, count: int, mask_set: int, tokenizer: Tokenizer | None) -> None:
    print(_LEGEND if tokenizer else f"{_LEGEND}\nno tokenizer beside it: ids are shown, name one by --tokenizer")
    for where, first, block in iter_blocks(path, start):
        if len(block.mask_counts) and mask_set >= len(block.mask_counts):
            raise ShardError(f"{path}: --mask-set {mask_set}: there are {len(block.mask_counts)} mask sets")
        for number in range(max(0, start - first), min(block.examples, start + count - first)):
            head, *lines = describe(block, number, mask_set, tokenizer)
            print(f"\nexample {first + number} ({where}, {number}): {head}", *lines, sep="\n")
        if first + block.examples >= start + count:
            return


if __name__ == "__main__":
    sys.exit(main())
