"""Flat examples are what a padding tokenizer of the peer makes of the same texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import Tokenizer, import_tokenizer
from eval.packing import build_batch, encode_examples, keep_longest_first, ranges, token_budget_batches


@pytest.fixture(scope="module")
def tokenizer(shared_data: Path) -> Tokenizer:
    return import_tokenizer(shared_data / "vocab" / "bert-base-uncased-vocab.txt", TokenizerConfig())


def test_ranges() -> None:
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.array([], dtype=int), np.array([], dtype=int)).tolist() == []


@pytest.mark.parametrize(
    ("a", "b", "room", "kept"),
    [
        (10, 4, 9, (5, 4)),
        (4, 10, 9, (4, 5)),
        (10, 9, 9, (5, 4)),
        (9, 9, 9, (4, 5)),
        (3, 4, 9, (3, 4)),
        (20, 1, 9, (8, 1)),
    ],
)
def test_the_longer_part_is_cut_first(a: int, b: int, room: int, kept: tuple[int, int]) -> None:
    keep_a, keep_b = keep_longest_first(np.array([a]), np.array([b]), room)
    assert (keep_a[0], keep_b[0]) == kept


@pytest.mark.parametrize("max_length", [512, 128, 16, 15])
@pytest.mark.parametrize("pairs", [True, False])
def test_same_ids_as_transformers(shared_data: Path, tokenizer: Tokenizer, pairs: bool, max_length: int) -> None:
    from transformers import BertTokenizerFast

    peer = BertTokenizerFast(vocab=str(shared_data / "vocab" / "bert-base-uncased-vocab.txt"))
    rows = (shared_data / "glue" / "RTE" / "dev.tsv").read_text(encoding="utf-8").split("\n")[1:60]
    a, b = zip(*[row.split("\t")[1:3] for row in rows], strict=True)
    # Marker strings in the text are ordinary text here (R04) and special there: not compared.
    encoded = encode_examples(tokenizer, a, b if pairs else None, max_length)
    theirs = peer(list(a), list(b) if pairs else None, truncation=True, max_length=max_length)
    for number, ids in enumerate(theirs["input_ids"]):
        ours = encoded.ids[encoded.offsets[number] : encoded.offsets[number + 1]]
        assert ours.tolist() == ids
        segments = theirs["token_type_ids"][number]
        assert encoded.segment_a[number] == len(segments) - sum(segments)
    assert (encoded.truncated > 0) == (max_length < 512)


def test_batches_are_flat_and_in_the_order_asked_for(tokenizer: Tokenizer) -> None:
    encoded = encode_examples(tokenizer, ["a cat", "dogs", "the sat on"], ["x", "", "y z"], 32)
    batch = build_batch(encoded, np.array([2, 0]))
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    lengths = np.diff(batch.cu_seqlens.numpy())
    assert lengths.tolist() == encoded.lengths[[2, 0]].tolist() and batch.max_seqlen == max(lengths)
    assert batch.input_ids_T[batch.cls_positions_E].tolist() == [cls, cls]
    assert batch.input_ids_T.tolist().count(sep) == 4
    assert batch.position_ids_T.tolist() == [*range(lengths[0]), *range(lengths[1])]
    assert batch.segment_ids_T[: lengths[0]].tolist() == [0] * 5 + [1] * 3
    assert batch.cu_seqlens.dtype == torch.int32


def test_evaluation_batches_hold_every_example_once_within_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(3, 100, 200)
    batches = list(token_budget_batches(lengths, 512))
    assert sorted(np.concatenate(batches)) == list(range(200))
    assert all(lengths[rows].max() * len(rows) <= 512 or len(rows) == 1 for rows in batches)


def test_no_room_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="max_length 4 leaves no room"):
        encode_examples(tokenizer, ["a"], ["b"], 4)
