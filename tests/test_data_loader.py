"""The loader: every example as it was written, in the right order, on the right rank, after any interruption."""

from __future__ import annotations

import gc
import io
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from data_pipeline import build_loader
from data_pipeline.loader import dynamic_masks, iter_validation
from data_pipeline.masking import MaskingRule
from data_pipeline.records import Batch, Block
from data_pipeline.shard_index import DatasetInfo, ShardIndex, write_index
from data_pipeline.shards import ShardError, ShardWriter, scan_shard

WriteDataset = Callable[..., ShardIndex]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_dataset: WriteDataset) -> Path:
    """2 shards x 3 blocks of 5, 6 and 5 examples, 2 mask sets."""
    path = tmp_path_factory.mktemp("loader") / "data"
    assert write_dataset(path).examples == 32
    return path


@pytest.fixture
def unmasked(tmp_path: Path, write_dataset: WriteDataset) -> Path:
    """The same without mask sets."""
    write_dataset(tmp_path / "unmasked", mask_sets=0)
    return tmp_path / "unmasked"


def read_plainly(folder: Path) -> list[dict[str, list]]:
    """Every example of a data set in the order of the index, by `numpy.load` and plain loops."""
    examples = []
    index = ShardIndex.open(folder)
    for row in range(len(index.blocks)):
        with np.load(io.BytesIO(index.read_block(row))) as arrays:
            block = {name: arrays[name].tolist() for name in arrays.files}
        masks: list[list[list[tuple[int, int]]]] = []
        pairs = iter(zip(block["mask_positions"], block["mask_inputs"], strict=True))
        for counts in block["mask_counts"]:
            masks.append([[next(pairs) for _ in range(count)] for count in counts])
        at = 0
        for i, length in enumerate(block["lengths"]):
            ids = block["input_ids"][at : at + length]
            at += length
            a = block["segment_a_lengths"][i]
            sets = [mask_set[i] for mask_set in masks]
            examples.append({"ids": ids, "a": a, "label": block["nsp_labels"][i], "masks": sets})
    return examples


def split(batch: Batch) -> list[dict[str, list]]:
    """A batch taken apart into its examples, in plain lists; checks what holds for every batch on the way."""
    assert batch.cu_seqlens.dtype == torch.int32
    assert all(
        getattr(batch, field.name).dtype == torch.int64
        for field in fields(batch)
        if field.name not in ("cu_seqlens", "max_seqlen")
    )
    ends = batch.cu_seqlens.tolist()
    assert (ends[0], ends[-1]) == (0, batch.tokens)
    assert batch.max_seqlen == max(np.diff(ends))
    assert batch.cls_positions_E.tolist() == ends[:-1]
    masked = batch.mask_positions_P.tolist()
    assert masked == sorted(set(masked))
    labels = dict(zip(masked, batch.mask_labels_P.tolist(), strict=True))
    examples = []
    for i, (start, stop) in enumerate(itertools.pairwise(ends)):
        assert batch.position_ids_T[start:stop].tolist() == list(range(stop - start))
        examples.append(
            {
                "inputs": batch.input_ids_T[start:stop].tolist(),
                "ids": [labels.get(at, int(batch.input_ids_T[at])) for at in range(start, stop)],
                "segments": batch.segment_ids_T[start:stop].tolist(),
                "label": int(batch.nsp_labels_E[i]),
                "masked": [at - start for at in masked if start <= at < stop],
            }
        )
    return examples


def expected(example: dict, epoch: int) -> dict[str, list]:
    masks = example["masks"][epoch % len(example["masks"])]
    inputs = list(example["ids"])
    for position, token in masks:
        inputs[position] = token
    return {
        "inputs": inputs,
        "ids": example["ids"],
        "segments": [int(at >= example["a"]) for at in range(len(inputs))],
        "label": example["label"],
        "masked": [position for position, _ in masks],
    }


def taken(steps: Iterable[list[Batch]], count: int) -> list[list[list[dict]]]:
    """`count` steps as step -> micro-batch -> example."""
    iterator = iter(steps)
    return [[split(batch) for batch in next(iterator)] for _ in range(count)]


def flat(steps: list[list[list[dict]]]) -> list[dict]:
    return [example for step in steps for batch in step for example in batch]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_batches_hold_what_was_written_in_the_order_of_the_ids(folder: Path, prefetch: int) -> None:
    examples = read_plainly(folder)
    assert any(example["masks"][0] != example["masks"][1] for example in examples)
    with build_loader(folder, global_batch=12, micro_batch=4, seed=5, prefetch=prefetch) as loader:
        assert (loader.examples, loader.position) == (32, 0)
        steps = taken(loader, 8)  # three epochs of 32, batches span both borders
        assert loader.position == 96
        assert loader.epoch == 3.0
        ids = loader.example_ids(0, 96).tolist()
    assert [[len(batch) for batch in step] for step in steps] == [[4, 4, 4]] * 8
    for epoch in range(3):
        assert sorted(ids[32 * epoch : 32 * epoch + 32]) == list(range(32))
    assert flat(steps) == [expected(examples[i], place // 32) for place, i in enumerate(ids)]


def test_ranks_share_each_global_batch_in_order(folder: Path) -> None:
    with build_loader(folder, global_batch=12, micro_batch=3, seed=5) as alone:
        joint = taken(alone, 8)
    for world_size in (2, 4):
        loaders = [
            build_loader(folder, global_batch=12, micro_batch=3, rank=rank, world_size=world_size, seed=5)
            for rank in range(world_size)
        ]
        parts = [taken(loader, 8) for loader in loaders]
        for step in range(8):
            assert [batch for part in parts for batch in part[step]] == joint[step]
        assert {tuple(loader.state_dict().items()) for loader in loaders} == {
            (("seed", 5), ("position", 96), ("dataset_examples", 32))
        }
        for loader in loaders:
            loader.close()


def test_resuming_at_any_step_and_world_size_equals_no_interruption(folder: Path) -> None:
    with build_loader(folder, global_batch=12, micro_batch=3, seed=5) as loader:
        whole = taken(loader, 8)
    for stop in range(9):
        with build_loader(folder, global_batch=12, micro_batch=6, seed=5, rank=1, world_size=2) as loader:
            taken(loader, stop)
            state = loader.state_dict()  # after what was handed out, not after what the thread prepared
        with build_loader(folder, global_batch=12, micro_batch=3, seed=5, state=state) as loader:
            assert taken(loader, 8 - stop) == whole[stop:]


def test_loading_a_state_into_a_running_loader_and_a_new_batch_size(folder: Path) -> None:
    with build_loader(folder, global_batch=4, micro_batch=2, seed=5) as loader:
        first = taken(loader, 2)
        state = loader.state_dict()
        loader.set_global_batch(8)
        second = taken(loader, 3)
        assert loader.global_batch == 8
        assert loader.position == 8 + 24
        with pytest.raises(ValueError, match="nearest"):
            loader.set_global_batch(7)
        loader.load_state_dict(state)
        assert taken(loader, 3) == second
    with build_loader(folder, global_batch=16, micro_batch=2, seed=5) as loader:
        assert flat(taken(loader, 2)) == flat(first) + flat(second)


def test_a_state_of_other_data_or_seed_is_refused(folder: Path) -> None:
    good = {"seed": 5, "position": 8, "dataset_examples": 32}
    for change, message in (
        ({"dataset_examples": 31}, r"32 examples.*31"),
        ({"seed": 6}, "seed 5 differs from 6"),
        ({"position": -1}, "negative"),
        ({"position": "8"}, "whole numbers"),
        ({"more": 1}, "whole numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            build_loader(folder, global_batch=4, micro_batch=2, seed=5, state={**good, **change})
    for sizes, message in (
        ({"global_batch": 64, "micro_batch": 4, "world_size": 3}, "60 or 72"),
        ({"global_batch": 4, "micro_batch": 2, "rank": 2, "world_size": 2}, "rank 2: expected 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            build_loader(folder, **sizes)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_damage_is_named_by_the_consumer_and_never_skipped(
    tmp_path: Path, write_dataset: WriteDataset, prefetch: int
) -> None:
    index = write_dataset(tmp_path, shards=1)
    row = scan_shard(tmp_path / "shard-00000.tar").rows[1]
    path = tmp_path / "shard-00000.tar"
    data = bytearray(path.read_bytes())
    data[row.offset + 200] ^= 1
    path.write_bytes(data)
    with build_loader(tmp_path, global_batch=index.examples, micro_batch=index.examples, prefetch=prefetch) as loader:
        for _ in range(2):
            with pytest.raises(ShardError, match=r"shard-00000\.tar: key '00000-000001' .*CRC-32"):
                next(loader)
            assert loader.position == 0
        with open(path, "rb+") as file:
            file.truncate(row.offset + 100)
        with pytest.raises(ShardError, match=r"shard-00000\.tar: key .*truncated"):
            next(loader)


def test_blocks_that_the_index_does_not_describe_are_refused(folder: Path, tmp_path: Path) -> None:
    records = [scan_shard(path) for path in sorted(folder.glob("*.tar"))]
    info = ShardIndex.open(folder).info
    for changes, message in (
        ({"vocab_size": 90}, "an id of 90 or more"),
        ({"max_seq_length": 10}, "longer than 10 tokens"),
        ({"mask_sets": 3}, "2 mask sets, index.json says 3"),
    ):
        for record in records:
            (tmp_path / record.name).write_bytes((folder / record.name).read_bytes())
        write_index(tmp_path, records, replace(info, **changes))
        with (
            build_loader(tmp_path, global_batch=32, micro_batch=32, prefetch=0) as loader,
            pytest.raises(ShardError, match=rf"shard-0000\d\.tar: key .*{message}"),
        ):
            next(loader)


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


def test_the_thread_ends_with_its_loader(folder: Path) -> None:
    before = loader_threads()
    loader = build_loader(folder, global_batch=4, micro_batch=2)
    next(loader)
    assert len(loader_threads()) == len(before) + 1
    loader.close()
    assert loader_threads() == before
    with pytest.raises(ValueError, match="closed"):
        next(loader)
    dropped = build_loader(folder, global_batch=4, micro_batch=2)
    next(dropped)
    del dropped
    gc.collect()
    assert loader_threads() == before


def test_steps_are_prepared_while_the_consumer_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    original = ShardIndex.read_block
    monkeypatch.setattr(ShardIndex, "read_block", lambda self, row: (reads.append(row), original(self, row))[1])
    with build_loader(folder, global_batch=32, micro_batch=32, prefetch=2) as loader:
        next(loader)
        deadline = time.monotonic() + 20
        while len(reads) < 18 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(reads) >= 18, "three epochs of six blocks: the step handed out and two prepared"


@pytest.mark.parametrize("world_size", [1, 3, 5, 40])
def test_validation_takes_every_example_once_with_mask_set_0(folder: Path, world_size: int) -> None:
    examples = read_plainly(folder)
    parts = [list(iter_validation(folder, micro_batch=4, rank=r, world_size=world_size)) for r in range(world_size)]
    assert [e for part in parts for batch in part for e in split(batch)] == [expected(e, 0) for e in examples]
    sizes = [sum(batch.examples for batch in part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    some = [b for r in range(2) for b in iter_validation(folder, micro_batch=4, rank=r, world_size=2, examples=7)]
    assert [e for batch in some for e in split(batch)] == [expected(e, 0) for e in examples[:7]]


def test_validation_refuses_wrong_sizes_at_once(folder: Path) -> None:
    for sizes in ({"micro_batch": 0}, {"micro_batch": 4, "rank": 1}, {"micro_batch": 4, "examples": 0}):
        with pytest.raises(ValueError, match="expected"):
            iter_validation(folder, **sizes)


def masking_rule() -> MaskingRule:
    return MaskingRule(
        probability=0.15,
        limit=4,
        mask_id=4,
        predictable=np.arange(100) > 4,
        ordinary_ids=np.arange(5, 100, dtype=np.int32),
        word_starts=np.ones(100, bool),
    )


def test_masks_drawn_at_load_time_depend_on_seed_epoch_and_example(unmasked: Path) -> None:
    with pytest.raises(ValueError, match="mask_fn"):
        build_loader(unmasked, global_batch=32, micro_batch=32)
    examples = read_plainly(unmasked)
    made = {}
    for seed, micro_batch in ((1, 32), (1, 8), (2, 32)):
        with build_loader(
            unmasked, global_batch=32, micro_batch=micro_batch, mask_fn=dynamic_masks(masking_rule(), seed)
        ) as loader:
            steps = flat(taken(loader, 2))
            ids = loader.example_ids(0, 64).tolist()
        assert [step["ids"] for step in steps] == [examples[i]["ids"] for i in ids]
        made[seed, micro_batch] = {(place // 32, i): steps[place]["inputs"] for place, i in enumerate(ids)}
    assert made[1, 32] == made[1, 8]
    assert sum(made[1, 32][0, i] != made[1, 32][1, i] for i in range(32)) > 20, "another epoch, other masks"
    assert sum(made[1, 32][0, i] != made[2, 32][0, i] for i in range(32)) > 20, "another seed, other masks"


def test_a_url_is_read_like_a_folder(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe_file(f"/loader-test/{path.name}", path.read_bytes())
    sizes = {"global_batch": 12, "micro_batch": 4, "seed": 5}
    with build_loader(folder, **sizes) as local, build_loader("memory://loader-test", **sizes) as remote:
        assert remote.index.remote
        assert taken(remote, 8) == taken(local, 8)
        short = memory.cat_file("/loader-test/shard-00001.tar")[:3000]
        memory.pipe_file("/loader-test/shard-00001.tar", short)
        with pytest.raises(ShardError, match=r"shard-00001\.tar: key"):
            taken(remote, 12)
    with pytest.raises(ShardError, match=r"shard-00001\.tar: 3000 bytes"):
        build_loader("memory://loader-test", **sizes)
    memory.rm("/loader-test", recursive=True)


def test_examples_without_predictions_and_wide_ids(tmp_path: Path) -> None:
    none = np.zeros(0, np.uint16)
    block = Block(
        input_ids=np.array([2, 70_000, 3, 2, 70_001, 3], np.uint32),
        lengths=np.array([3, 3], np.uint16),
        segment_a_lengths=np.array([3, 3], np.uint16),
        nsp_labels=np.array([-1, -1], np.int8),
        mask_counts=np.zeros((1, 2), np.uint16),
        mask_positions=none,
        mask_inputs=none.astype(np.uint32),
    )
    with ShardWriter(tmp_path, "shard-0.tar") as writer:
        writer.add("0", block)
    info = DatasetInfo(
        settings={},
        tokenizer="0" * 64,
        vocab_size=80_000,
        special_ids={"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4},
        max_seq_length=3,
        mask_sets=1,
    )
    write_index(tmp_path, [writer.close()], info)
    (batch,) = list(iter_validation(tmp_path, micro_batch=4))
    assert [example["ids"] for example in split(batch)] == [[2, 70_000, 3], [2, 70_001, 3]]
    assert batch.mask_positions_P.numel() == 0
    assert batch.nsp_labels_E.tolist() == [-1, -1]
