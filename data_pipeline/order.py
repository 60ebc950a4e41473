"""The order of examples is arithmetic: a pure function of (block sizes, seed, epoch), whatever the number of ranks.

For epoch e the blocks are permuted, and the examples inside each block likewise. The stream of examples is the
concatenation of the epochs without end: no tail is dropped, a batch may span two epochs. A *position* counts examples
of that stream, so resuming is arithmetic too.

Worked example: blocks of 2, 3 and 2 examples hold example ids 0-1, 2-4 and 5-6. If epoch 0 permutes the blocks to
(1, 2, 0) and their insides to (4, 2, 3), (5, 6), (1, 0), positions 0 to 6 are ids 4 2 3 5 6 1 0 and position 7 is the
first of epoch 1. With a global batch of 4 on 2 ranks, rank 1 takes ids 3 5 in step 0 and, in step 1, id 0 and the
first of epoch 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_BLOCKS, _INSIDE = 0, 1  # keep the two families of random streams apart


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Consecutive positions that lie in one block.

    Attributes:
        epoch: which pass over the data.
        row: the block, a row of the index.
        examples: (number of positions,) int64, examples of the block in the order of the stream.
    """

    epoch: int
    row: int
    examples: np.ndarray


def permutation(size: int, seed: int, *place: int) -> np.ndarray:
    """(size,) int64, a permutation that depends on nothing but its arguments.

    It sorts raw 64-bit draws, because NumPy keeps the streams of its bit generators for good but not those of
    `Generator.permutation` (NEP 19). Two equal draws among 4 million have a probability of 4e-7 and stay in order.

    Args:
        size: number of things.
        seed: any non-negative number.
        place: which permutation of this seed.
    """
    draws = np.random.PCG64DXSM(np.random.SeedSequence(seed, spawn_key=place)).random_raw(size)
    return np.argsort(draws, kind="stable")


class ExampleOrder:
    """Where each position of the endless stream lies.

    Attributes:
        seed: of the order.
        examples: examples of one epoch.
    """

    def __init__(self, block_examples: np.ndarray, seed: int) -> None:
        """Take the examples of each block (blocks,) and a seed; ValueError for no examples or a negative seed."""
        self._sizes = np.asarray(block_examples, np.int64)
        self._firsts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._sizes)])
        self.examples = int(self._firsts[-1])
        self.seed = seed
        if not len(self._sizes) or int(self._sizes.min()) < 1:
            raise ValueError("every block needs at least one example, and there must be a block")
        if seed < 0:
            raise ValueError(f"seed {seed}: expected a number from 0")
        # Two epochs: a batch may span a border. One epoch of 4 million blocks is 64 MB.
        self._epoch = lru_cache(maxsize=2)(self._permute_blocks)

    def _permute_blocks(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows in the order of the epoch, and the first position in the epoch of each (one more: the end)."""
        rows = permutation(len(self._sizes), self.seed, _BLOCKS, epoch)
        return rows, np.concatenate([np.zeros(1, np.int64), np.cumsum(self._sizes[rows])])

    def locate(self, position: int) -> tuple[int, int, int]:
        """(epoch, row of the block, example inside the block) of a position."""
        piece = next(self.pieces(position, position + 1))
        return piece.epoch, piece.row, int(piece.examples[0])

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The positions `start` up to `stop`, cut at block borders.

        Raises:
            ValueError: a negative start.
        """
        if start < 0:
            raise ValueError(f"position {start}: expected a number from 0")
        while start < stop:
            epoch, inside = divmod(start, self.examples)
            rows, firsts = self._epoch(epoch)
            place = int(np.searchsorted(firsts, inside, side="right")) - 1
            epoch_stop = min(self.examples, inside + stop - start)
            while inside < epoch_stop:
                row, first = int(rows[place]), int(firsts[place])
                end = min(epoch_stop, int(firsts[place + 1]))
                shuffled = permutation(int(self._sizes[row]), self.seed, _INSIDE, epoch, row)
                yield Piece(epoch=epoch, row=row, examples=shuffled[inside - first : end - first])
                start += end - inside
                inside, place = end, place + 1

    def natural_pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Examples `start` up to `stop` in the order of the index, unshuffled, epoch 0; cut at block borders."""
        place = int(np.searchsorted(self._firsts, start, side="right")) - 1
        while start < stop:
            first = int(self._firsts[place])
            end = min(stop, int(self._firsts[place + 1]))
            yield Piece(epoch=0, row=place, examples=np.arange(start - first, end - first))
            start, place = end, place + 1

    def example_ids(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,) int64: which examples the positions hold, counted over the blocks of the index."""
        ids = [self._firsts[piece.row] + piece.examples for piece in self.pieces(start, stop)]
        return np.concatenate(ids) if ids else np.zeros(0, np.int64)


def rank_slice(position: int, global_batch: int, rank: int, world_size: int) -> tuple[int, int]:
    """The positions [start, stop) of a rank in the global batch that begins at `position`."""
    share = global_batch // world_size
    start = position + rank * share
    return start, start + share


def check_batch_sizes(global_batch: int, micro_batch: int, world_size: int) -> None:
    """Every rank takes the same number of whole micro-batches, or nothing starts.

    Raises:
        ValueError: names the sizes and the nearest ones that would do.
    """
    if min(global_batch, micro_batch, world_size) < 1:
        raise ValueError(
            f"global_batch {global_batch}, micro_batch {micro_batch}, world_size {world_size}: all must be at least 1"
        )
    unit = micro_batch * world_size
    if global_batch % unit == 0:
        return
    batches = _around(global_batch, [unit * max(1, global_batch // unit), unit * (global_batch // unit + 1)])
    hints = [f"global batches of {batches}"]
    if global_batch % micro_batch == 0:
        ranks = _divisors(global_batch // micro_batch)
        hints.append(f"{_around(world_size, ranks)} ranks")
    if global_batch % world_size == 0:
        micro = _divisors(global_batch // world_size)
        hints.append(f"micro-batches of {_around(micro_batch, micro)}")
    raise ValueError(
        f"a global batch of {global_batch} cannot be cut into equal shares of {world_size} ranks "
        f"in micro-batches of {micro_batch}; nearest that can: {', or '.join(hints)}"
    )


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _around(value: int, valid: list[int]) -> str:
    """The nearest valid number below and above a value, in words."""
    below = [max([number for number in valid if number < value], default=None)]
    above = [min([number for number in valid if number > value], default=None)]
    return " or ".join(str(number) for number in [*below, *above] if number is not None)
