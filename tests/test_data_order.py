"""The order of examples as properties, and the sizes that are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.order import ExampleOrder, check_batch_sizes, permutation, rank_slice

ROOT = Path(__file__).resolve().parent.parent
block_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=12)
seeds = st.integers(0, 2**70)
PINNED_EPOCH = [6, 5, 0, 1, 3, 2, 4]


@given(sizes=block_sizes, seed=seeds, epoch=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_epoch_is_a_permutation_that_keeps_blocks_together(sizes: list[int], seed: int, epoch: int) -> None:
    order = ExampleOrder(np.array(sizes), seed)
    ids = order.example_ids(epoch * order.examples, (epoch + 1) * order.examples)
    assert sorted(ids.tolist()) == list(range(sum(sizes)))
    rows = np.repeat(np.arange(len(sizes)), sizes)[ids]
    assert np.count_nonzero(np.diff(rows)) == len(sizes) - 1


@given(sizes=block_sizes, seed=seeds, start=st.integers(0, 200), length=st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_any_part_of_the_stream_is_the_same_as_asked_one_by_one(
    sizes: list[int], seed: int, start: int, length: int
) -> None:
    order = ExampleOrder(np.array(sizes), seed)
    firsts = np.cumsum([0, *sizes])
    one_by_one = []
    for position in range(start, start + length):
        epoch, row, example = ExampleOrder(np.array(sizes), seed).locate(position)
        assert epoch == position // order.examples
        one_by_one.append(firsts[row] + example)
    assert order.example_ids(start, start + length).tolist() == one_by_one


@given(sizes=block_sizes, seed=seeds, worlds=st.permutations([1, 2, 3, 4, 6, 12]), skip=st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_r19_ranks_are_disjoint_and_their_union_is_the_same_for_any_world_size(
    sizes: list[int], seed: int, worlds: list[int], skip: int
) -> None:
    order = ExampleOrder(np.array(sizes), seed)
    expected = order.example_ids(skip, skip + 24)
    for world_size in worlds:
        slices = [rank_slice(skip, 24, rank, world_size) for rank in range(world_size)]
        assert [start for start, _ in slices] == list(range(skip, skip + 24, 24 // world_size))
        union = np.concatenate([order.example_ids(start, stop) for start, stop in slices])
        np.testing.assert_array_equal(union, expected)


def test_r19_the_order_depends_on_seed_and_epoch_alone() -> None:
    # Literals: another machine, day, NumPy or PYTHONHASHSEED must give these.
    assert permutation(10, 7, 0, 2).tolist() == [2, 0, 4, 3, 9, 5, 6, 1, 7, 8]
    order = ExampleOrder(np.array([2, 3, 2]), 7)
    assert order.example_ids(14, 21).tolist() == PINNED_EPOCH
    code = (
        "import numpy as np; from data_pipeline.order import ExampleOrder;"
        "print(ExampleOrder(np.array([2, 3, 2]), 7).example_ids(14, 21).tolist())"
    )
    for hash_seed in ("0", "1"):
        shown = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": hash_seed}, capture_output=True, check=True
        )
        assert shown.stdout.decode().strip() == str(PINNED_EPOCH)


def test_r20_epochs_and_seeds_have_orders_of_their_own() -> None:
    sizes = np.full(16, 8)
    orders = {
        (seed, epoch): tuple(ExampleOrder(sizes, seed).example_ids(epoch * 128, (epoch + 1) * 128).tolist())
        for seed in (0, 1, 2**32, 2**32 + 1)
        for epoch in range(3)
    }
    assert len(set(orders.values())) == 12
    insides = {tuple(np.argsort(order[:8]).tolist()) for order in orders.values()}
    assert len(insides) == 12, "examples inside a block are permuted anew each time"


def test_all_permutations_of_four_blocks_come_about_equally_often() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        key = tuple(permutation(4, seed, 0, 0).tolist())
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 24
    chi_squared = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert chi_squared < 49.7  # 0.1 % quantile of 23 degrees of freedom; the draws are fixed, so this never flickers


def test_natural_order_is_that_of_the_index() -> None:
    order = ExampleOrder(np.array([2, 3, 2]), 7)
    places = [(p.epoch, p.row, p.examples.tolist()) for p in order.natural_pieces(1, 6)]
    assert places == [(0, 0, [1]), (0, 1, [0, 1, 2]), (0, 2, [0])]


def test_positions_far_away_are_found_by_arithmetic() -> None:
    # 100 million examples in 400,000 blocks; one permutation of the blocks and a search, nothing is walked through.
    order = ExampleOrder(np.full(400_000, 250), 3)
    epoch, row, example = order.locate(7_012_345_678)
    assert epoch == 70
    assert (row, example) == (104589, 87)


def test_a_wrong_order_is_refused() -> None:
    for sizes, seed in (([], 0), ([3, 0], 0), ([3], -1)):
        with pytest.raises(ValueError):
            ExampleOrder(np.array(sizes), seed)
    with pytest.raises(ValueError, match="position -1"):
        list(ExampleOrder(np.array([3]), 0).pieces(-1, 1))


@pytest.mark.parametrize(
    ("sizes", "hints"),
    [
        ((64, 4, 3), ["64", "3 ranks", "60 or 72", "2 or 4 ranks"]),
        ((64, 6, 4), ["48 or 72", "micro-batches of 4 or 8"]),
        ((2, 4, 2), ["global batches of 8", "micro-batches of 1"]),
        ((0, 1, 1), ["at least 1"]),
        ((8, 0, 1), ["at least 1"]),
    ],
)
def test_r26_sizes_that_do_not_divide_name_the_nearest_that_do(sizes: tuple[int, int, int], hints: list[str]) -> None:
    with pytest.raises(ValueError, match="batch") as caught:
        check_batch_sizes(*sizes)
    for hint in hints:
        assert hint in str(caught.value)


@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_r26_hints_are_right(global_batch: int, micro_batch: int, world_size: int) -> None:
    try:
        check_batch_sizes(global_batch, micro_batch, world_size)
    except ValueError as error:
        hint = str(error).split("global batches of ")[1].split(",")[0].split()[0]
        check_batch_sizes(int(hint), micro_batch, world_size)
    else:
        assert global_batch % (micro_batch * world_size) == 0
