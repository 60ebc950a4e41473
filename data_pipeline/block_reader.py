"""From places in the stream to flat columns: reads and decodes blocks, picks examples, applies masks. NumPy only.

Legend: `E` examples, `T` tokens, `P` predictions of what is gathered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from data_pipeline.block_codec import ShardError, decode_block
from data_pipeline.masking import MaskingRule, MaskSet, draw_masks, mask_rng
from data_pipeline.order import Piece
from data_pipeline.records import Block
from data_pipeline.shard_index import ShardIndex

MaskFunction = Callable[[Block, int, int], MaskSet]
"""(block, epoch, row) -> its masks: a pure function, for data sets whose masks are drawn at load time."""

_LOAD_TIME = 4  # apart from the streams of building, which have smaller numbers here (assemble_stage.py)
_CACHED_BLOCKS = 4  # neighbours in the stream share a block; one that is left behind does not come back in this epoch
_REMOTE_READS = 8  # byte ranges under way at once: an object store answers in tens of milliseconds


def dynamic_masks(rule: MaskingRule, seed: int) -> MaskFunction:
    """Masks drawn at load time by (seed, epoch, block): other ones each epoch, the same again after a resume."""

    def draw(block: Block, epoch: int, row: int) -> MaskSet:
        return draw_masks(block.input_ids, block.lengths, rule, mask_rng(seed, _LOAD_TIME, epoch, row))

    return draw


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatExamples:
    """Picked examples end to end, masks applied.

    Attributes:
        input_ids_T: int64, as the encoder sees them.
        segment_ids_T: int64.
        position_ids_T: int64.
        ends: (E+1,) int64, where each example begins in T, and the end.
        nsp_labels_E: int64.
        mask_ends: (E+1,) int64, where the predictions of each example begin in P, and the end.
        mask_positions_P: int64, indices into T.
        mask_labels_P: int64.
    """

    input_ids_T: np.ndarray
    segment_ids_T: np.ndarray
    position_ids_T: np.ndarray
    ends: np.ndarray
    nsp_labels_E: np.ndarray
    mask_ends: np.ndarray
    mask_positions_P: np.ndarray
    mask_labels_P: np.ndarray


class _Decoded:
    """A block with the masks of one epoch, and where each example begins in its columns."""

    __slots__ = ("block", "lengths", "mask_counts", "mask_inputs", "mask_positions", "mask_starts", "starts")

    def __init__(self, block: Block, masks: MaskSet) -> None:
        self.block = block
        self.lengths = block.lengths.astype(np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.mask_counts = masks.counts.astype(np.int64)
        self.mask_starts = np.cumsum(self.mask_counts) - self.mask_counts
        self.mask_positions = masks.positions
        self.mask_inputs = masks.inputs


class BlockReader:
    """Gathers examples of an index; keeps the last few decoded blocks. For one thread."""

    def __init__(self, index: ShardIndex, mask_fn: MaskFunction | None = None) -> None:
        """Raises ValueError where masks and index do not fit: a data set without mask sets needs `mask_fn`."""
        if index.info.mask_sets == 0 and mask_fn is None:
            raise ValueError(
                f"{index.directory}: built with data.mask_sets = 0, so masks are drawn at load time: "
                "pass mask_fn=dynamic_masks(rule, seed), or build with mask_sets"
            )
        self.index = index
        self._mask_fn = mask_fn if index.info.mask_sets == 0 else None
        self._cache: OrderedDict[tuple[int, int], _Decoded] = OrderedDict()
        self._pool = ThreadPoolExecutor(_REMOTE_READS, "shard-read") if index.remote else None
        self._pending: dict[int, Future[bytes]] = {}

    def announce(self, rows: Iterable[int]) -> None:
        """Begin to read blocks that `gather` will ask for soon; local files need no notice."""
        if self._pool is not None:
            for row in rows:
                if row not in self._pending and all(row != cached for _, cached in self._cache):
                    self._pending[row] = self._pool.submit(self.index.read_block, row)

    def close(self) -> None:
        """End the reading threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _decoded(self, epoch: int, row: int) -> _Decoded:
        key = (epoch, row)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        pending = self._pending.pop(row, None)
        data = pending.result() if pending is not None else self.index.read_block(row)
        try:
            block = decode_block(data, where="block")
        except ShardError:
            # Only now find out the key: on the way without faults that would be one more read a block.
            decode_block(data, where=self.index.where(row))
            raise
        self._check(block, row)
        masks = self._mask_fn(block, epoch, row) if self._mask_fn else _stored_masks(block, epoch)
        decoded = self._cache[key] = _Decoded(block, masks)
        if len(self._cache) > _CACHED_BLOCKS:
            self._cache.popitem(last=False)
        return decoded

    def _check(self, block: Block, row: int) -> None:
        info = self.index.info
        expected = int(self.index.blocks[row]["examples"])
        faults = []
        if block.examples != expected:
            faults.append(f"{block.examples} examples, blocks.npy says {expected}")
        if len(block.mask_counts) != info.mask_sets:
            faults.append(f"{len(block.mask_counts)} mask sets, index.json says {info.mask_sets}")
        if max(int(block.input_ids.max()), int(block.mask_inputs.max(initial=0))) >= info.vocab_size:
            faults.append(f"an id of {info.vocab_size} or more, the size of the vocabulary")
        if int(block.lengths.max()) > info.max_seq_length:
            faults.append(f"an example longer than {info.max_seq_length} tokens")
        if faults:
            raise ShardError(f"{self.index.where(row)}: {'; '.join(faults)}: not of this build, build the set again")

    def gather(self, pieces: Iterable[Piece]) -> FlatExamples:
        """The examples of all pieces in order.

        Raises:
            ShardError: a block that cannot be read or breaks a rule; shard and key are named.
        """
        parts = [(self._decoded(piece.epoch, piece.row), piece) for piece in pieces]
        lengths = np.concatenate([part.lengths[piece.examples] for part, piece in parts])
        counts = np.concatenate([part.mask_counts[piece.examples] for part, piece in parts])
        ends, mask_ends = _ends(lengths), _ends(counts)
        positions_T = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
        order_P = np.arange(mask_ends[-1]) - np.repeat(mask_ends[:-1], counts)
        ids_T = np.empty(len(positions_T), np.int64)
        masked_P = np.empty(len(order_P), np.int64)
        inputs_P = np.empty(len(order_P), np.int64)
        segment_a, labels = [], []
        done = 0
        for part, piece in parts:
            here = slice(done, done + len(piece.examples))
            done = here.stop
            tokens = slice(ends[here.start], ends[here.stop])
            source = np.repeat(part.starts[piece.examples], lengths[here])
            source += positions_T[tokens]
            ids_T[tokens] = part.block.input_ids[source]
            predictions = slice(mask_ends[here.start], mask_ends[here.stop])
            source = np.repeat(part.mask_starts[piece.examples], counts[here])
            source += order_P[predictions]
            masked_P[predictions] = part.mask_positions[source]
            inputs_P[predictions] = part.mask_inputs[source]
            if (masked_P[predictions] >= np.repeat(lengths[here], counts[here])).any():
                raise ShardError(
                    f"{self.index.where(piece.row)}: a mask position lies outside its example; build again"
                )
            segment_a.append(part.block.segment_a_lengths[piece.examples])
            labels.append(part.block.nsp_labels[piece.examples])
        segments_T = _segments(np.concatenate(segment_a), lengths)
        masked_P += np.repeat(ends[:-1], counts)
        labels_P = ids_T[masked_P]
        ids_T[masked_P] = inputs_P
        return FlatExamples(
            input_ids_T=ids_T,
            segment_ids_T=segments_T,
            position_ids_T=positions_T,
            ends=ends,
            nsp_labels_E=np.concatenate(labels).astype(np.int64),
            mask_ends=mask_ends,
            mask_positions_P=masked_P,
            mask_labels_P=labels_P,
        )


def _segments(a_lengths: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(T,) int64: 0 in the first `a_lengths` tokens of an example, 1 in the others."""
    runs = np.empty((len(lengths), 2), np.int64)
    runs[:, 0] = a_lengths
    runs[:, 1] = lengths - runs[:, 0]
    return np.repeat(np.arange(2 * len(lengths)) & 1, runs.ravel())


def _ends(lengths: np.ndarray) -> np.ndarray:
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


def _stored_masks(block: Block, epoch: int) -> MaskSet:
    """Mask set `epoch mod M` of a block with M of them."""
    number = epoch % len(block.mask_counts)
    start = int(block.mask_counts[:number].sum(dtype=np.int64))
    counts = block.mask_counts[number]
    here = slice(start, start + int(counts.sum(dtype=np.int64)))
    return MaskSet(counts=counts, positions=block.mask_positions[here], inputs=block.mask_inputs[here])
