"""The deterministic loader: byte ranges of shards to the `Batch`es of each optimizer step.

Which examples a rank takes is arithmetic (order.py), so resuming is exact and immediate, and the order is the same for
any number of ranks. A thread prepares the next steps; faults reach the consumer with shard and key named.

    loader = build_loader("data/train", global_batch=256, micro_batch=32, rank=rank, world_size=world_size, seed=1)
    for micro_batches in loader:  # endless: ends when the caller does
        ...
        state = loader.state_dict()
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch

from data_pipeline.block_reader import BlockReader, FlatExamples, MaskFunction, dynamic_masks
from data_pipeline.order import ExampleOrder, check_batch_sizes, rank_slice
from data_pipeline.records import Batch
from data_pipeline.shard_index import ShardIndex

__all__ = ["Loader", "build_loader", "dynamic_masks", "iter_validation"]

_STATE_KEYS = ("dataset_examples", "position", "seed")


def build_loader(
    index_dir: str | Path,
    *,
    global_batch: int,
    micro_batch: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    state: Mapping[str, int] | None = None,
    mask_fn: MaskFunction | None = None,
    prefetch: int = 4,
    pin_memory: bool = False,
) -> Loader:
    """Open a data set for training.

    Args:
        index_dir: folder or fsspec URL with `index.json`.
        global_batch: examples of an optimizer step over all ranks.
        micro_batch: examples of one `Batch`.
        rank: this process, from 0.
        world_size: number of processes; it may differ from that of an earlier run.
        seed: of the order.
        state: what an earlier loader's `state_dict()` gave.
        mask_fn: draws masks at load time; only for data sets built with `mask_sets = 0`.
        prefetch: steps prepared ahead by a thread; 0 prepares each when it is asked for.
        pin_memory: put tensors in page-locked memory, for `Batch.to(device, non_blocking=True)`.

    Raises:
        ShardError: the data set cannot be used.
        ValueError: sizes that do not divide, a rank outside the world, or a state of other data or another seed.
    """
    index = ShardIndex.open(index_dir)
    loader = Loader(
        index,
        sizes=_Sizes(global_batch=global_batch, micro_batch=micro_batch, rank=rank, world_size=world_size),
        seed=seed,
        mask_fn=mask_fn,
        prefetch=prefetch,
        pin_memory=pin_memory,
    )
    if state is not None:
        loader.load_state_dict(state)
    return loader


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    global_batch: int
    micro_batch: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        check_batch_sizes(self.global_batch, self.micro_batch, self.world_size)
        _check_rank(self.rank, self.world_size)


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank}: expected 0 to {world_size - 1}, as world_size is {world_size}")


class Loader:
    """Endless iterator over optimizer steps; each is a list of this rank's micro-batches. Made by `build_loader`.

    Attributes:
        index: the opened data set.
        position: examples of the global stream consumed by the steps handed out so far.
    """

    def __init__(
        self,
        index: ShardIndex,
        *,
        sizes: _Sizes,
        seed: int,
        mask_fn: MaskFunction | None,
        prefetch: int,
        pin_memory: bool,
    ) -> None:
        self.index = index
        self.position = 0
        self._sizes = sizes
        self._order = ExampleOrder(index.blocks["examples"], seed)
        self._mask_fn = mask_fn
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._steps: Iterator[tuple[int, list[Batch]]] | None = None
        self._finish: weakref.finalize | None = None
        self._closed = False
        BlockReader(index, mask_fn).close()  # refuses masks that do not fit now, not in the first step

    @property
    def examples(self) -> int:
        """Examples of one epoch."""
        return self._order.examples

    @property
    def epoch(self) -> float:
        """Epochs consumed, with the fraction of the current one."""
        return self.position / self._order.examples

    @property
    def global_batch(self) -> int:
        """Examples of the next optimizer step over all ranks."""
        return self._sizes.global_batch

    def set_global_batch(self, global_batch: int) -> None:
        """Use another global batch from the next step on (batch-size warm-up); the stream goes on where it is.

        Raises:
            ValueError: it cannot be cut into equal shares.
        """
        self._sizes = replace(self._sizes, global_batch=global_batch)
        self._stop()

    def state_dict(self) -> dict[str, int]:
        """Where the stream is after the steps handed out: `seed`, `position`, `dataset_examples`."""
        return {"seed": self._order.seed, "position": self.position, "dataset_examples": self._order.examples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a `state_dict()`, written at any world size and batch size.

        Raises:
            ValueError: keys missing, a negative position, another data set or another seed.
        """
        if sorted(state) != list(_STATE_KEYS) or any(type(value) is not int for value in state.values()):
            raise ValueError(f"loader state {dict(state)!r}: expected whole numbers for {', '.join(_STATE_KEYS)}")
        if state["dataset_examples"] != self._order.examples:
            raise ValueError(
                f"{self.index.directory} holds {self._order.examples} examples, the loader state was written with "
                f"{state['dataset_examples']}: name the data set of that run, or start a new run"
            )
        if state["seed"] != self._order.seed:
            raise ValueError(
                f"seed {self._order.seed} differs from {state['seed']} of the loader state: examples would be "
                "repeated and missed; use the same seed, or start a new run"
            )
        if state["position"] < 0:
            raise ValueError(f"loader state: position {state['position']} is negative")
        self._stop()
        self.position = state["position"]

    def example_ids(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,) int64: the examples at positions of the global stream, counted over the index's blocks.

        A rank's part of the step that begins at position p is `start = p + rank * global_batch / world_size` on.
        """
        return self._order.example_ids(start, stop)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Batch]:
        """This rank's micro-batches of the next optimizer step.

        Raises:
            ShardError: a block that cannot be used. Asking again tries the same step again.
        """
        if self._closed:
            raise ValueError("the loader is closed")
        if self._steps is None:
            self._start()
        assert self._steps is not None
        try:
            self.position, batches = next(self._steps)
        except BaseException:
            self._stop()
            raise
        return batches

    def _start(self) -> None:
        reader = BlockReader(self.index, self._mask_fn)
        made = _make_steps(reader, self._order, self._sizes, self.position, self._prefetch, self._pin_memory)
        if not self._prefetch:
            self._steps = made
            self._finish = weakref.finalize(self, reader.close)
            return
        ready: queue.Queue[tuple[int, list[Batch]] | Exception] = queue.Queue(self._prefetch)
        stop = threading.Event()
        # The thread knows its parts and not the loader, so a loader that is dropped without close() ends it too.
        thread = threading.Thread(target=_produce, args=(made, ready, stop), name="loader", daemon=True)
        self._steps = _consume(ready)
        self._finish = weakref.finalize(self, _end_thread, thread, stop, reader)
        thread.start()

    def _stop(self) -> None:
        """Throw away what was prepared; the next step is made from `position`."""
        if self._finish is not None:
            self._finish()
        self._finish = self._steps = None

    def close(self) -> None:
        """End the thread and close the files."""
        self._stop()
        self._closed = True
        self.index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _make_steps(
    reader: BlockReader, order: ExampleOrder, sizes: _Sizes, position: int, ahead: int, pin_memory: bool
) -> Iterator[tuple[int, list[Batch]]]:
    """(position after the step, micro-batches of this rank) for every step from `position` on."""
    announced = position
    while True:
        while reader.index.remote and announced <= position + ahead * sizes.global_batch:
            start, stop = rank_slice(announced, sizes.global_batch, sizes.rank, sizes.world_size)
            reader.announce(piece.row for piece in order.pieces(start, stop))
            announced += sizes.global_batch
        start, stop = rank_slice(position, sizes.global_batch, sizes.rank, sizes.world_size)
        flat = reader.gather(order.pieces(start, stop))
        position += sizes.global_batch
        yield position, _cut(flat, sizes.micro_batch, pin_memory)


def _produce(
    made: Iterator[tuple[int, list[Batch]]],
    ready: queue.Queue[tuple[int, list[Batch]] | Exception],
    stop: threading.Event,
) -> None:
    """Body of the thread: prepare steps until told to stop; a fault is handed over in place of a step."""
    while not stop.is_set():
        item: tuple[int, list[Batch]] | Exception
        try:
            item = next(made)
        except Exception as error:  # noqa: BLE001 (handed to the consumer, whatever it is)
            item = error
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                break
            except queue.Full:
                continue
        if isinstance(item, Exception):
            return


def _consume(
    ready: queue.Queue[tuple[int, list[Batch]] | Exception],
) -> Iterator[tuple[int, list[Batch]]]:
    while True:
        item = ready.get()
        if isinstance(item, Exception):
            raise item
        yield item


def _end_thread(thread: threading.Thread, stop: threading.Event, reader: BlockReader) -> None:
    stop.set()
    if thread is not threading.current_thread():  # the garbage collector may run in the thread itself
        thread.join()
    reader.close()


def _cut(flat: FlatExamples, micro_batch: int, pin_memory: bool = False) -> list[Batch]:
    """Micro-batches of `micro_batch` examples; the last has the rest. Tensors are views of the gathered columns.

    Each column becomes a tensor once and is split there: a tensor for every micro-batch and column costs as much as gathering.
    """
    firsts = np.arange(0, len(flat.nsp_labels_E), micro_batch)
    borders = np.append(firsts, len(flat.nsp_labels_E))
    token_borders, mask_borders = flat.ends[borders], flat.mask_ends[borders]
    examples, tokens, predictions = (np.diff(each).tolist() for each in (borders, token_borders, mask_borders))
    longest = np.maximum.reduceat(np.diff(flat.ends), firsts).tolist()
    # Places count from the start of a micro-batch.
    masks_P = flat.mask_positions_P - np.repeat(token_borders[:-1], predictions)
    cls_E = flat.ends[:-1] - np.repeat(token_borders[:-1], examples)
    # One more end than examples in each micro-batch: the last of one is the first of the next.
    with_end = [count + 1 for count in examples]
    number = np.repeat(np.arange(len(firsts)), with_end)
    ends = flat.ends[np.arange(len(number)) - number] - token_borders[number]
    columns = zip(
        _split(flat.input_ids_T, tokens),
        _split(flat.segment_ids_T, tokens),
        _split(flat.position_ids_T, tokens),
        _split(masks_P, predictions),
        _split(flat.mask_labels_P, predictions),
        _split(cls_E, examples),
        _split(flat.nsp_labels_E, examples),
        strict=True,
    )
    batches = [
        Batch(
            input_ids_T=input_ids,
            segment_ids_T=segment_ids,
            position_ids_T=position_ids,
            cu_seqlens=ends_of,
            max_seqlen=most,
            mask_positions_P=mask_positions,
            mask_labels_P=mask_labels,
            cls_positions_E=cls,
            nsp_labels_E=nsp_labels,
        )
        for (input_ids, segment_ids, position_ids, mask_positions, mask_labels, cls, nsp_labels), ends_of, most in zip(
            columns, _split(ends.astype(np.int32), with_end), longest, strict=True
        )
    ]
    return [_pinned(batch) for batch in batches] if pin_memory else batches


def _split(column: np.ndarray, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    return torch.split_with_sizes(torch.from_numpy(column), sizes)  # Tensor.split is Python, and twice as slow


def _pinned(batch: Batch) -> Batch:
    names = [field.name for field in fields(batch) if field.name != "max_seqlen"]
    return replace(batch, **{name: getattr(batch, name).pin_memory() for name in names})


def iter_validation(
    index_dir: str | Path,
    *,
    micro_batch: int,
    rank: int = 0,
    world_size: int = 1,
    examples: int | None = None,
    mask_fn: MaskFunction | None = None,
) -> Iterator[Batch]:
    """Every example exactly once over all ranks, in the order of the index, always with mask set 0.

    Ranks take contiguous parts whose sizes differ by at most one, so some may get fewer batches than others, or none:
    sum over ranks, do not average.

    Args:
        index_dir: folder or fsspec URL with `index.json`.
        micro_batch: examples of one `Batch`; the last of a rank may have fewer.
        rank: this process, from 0.
        world_size: number of processes.
        examples: use only this many, from the first on; None: all.
        mask_fn: draws masks at load time (as epoch 0); only for data sets built with `mask_sets = 0`.

    Raises:
        ShardError: the data set cannot be used.
        ValueError: a size below 1 or a rank outside the world.
    """
    if micro_batch < 1 or (examples is not None and examples < 1):
        raise ValueError(f"micro_batch {micro_batch}, examples {examples}: expected at least 1")
    _check_rank(rank, world_size)
    index = ShardIndex.open(index_dir)
    return _validation_batches(index, BlockReader(index, mask_fn), micro_batch, rank, world_size, examples)


def _validation_batches(
    index: ShardIndex, reader: BlockReader, micro_batch: int, rank: int, world_size: int, examples: int | None
) -> Iterator[Batch]:
    order = ExampleOrder(index.blocks["examples"], 0)
    total = min(order.examples, examples or order.examples)
    stop = total * (rank + 1) // world_size
    try:
        for start in range(total * rank // world_size, stop, micro_batch):
            yield from _cut(reader.gather(order.natural_pieces(start, min(start + micro_batch, stop))), micro_batch)
    finally:
        reader.close()
        index.close()
