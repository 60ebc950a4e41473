"""Modes without NSP: ALBERT's ordered pairs, RoBERTa's packed sentences."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.assemble_stage import AssembleSettings, write_bucket
from data_pipeline.block_codec import decode_block
from data_pipeline.packing import pack_sentences, split_long_sentences, with_separators
from data_pipeline.pairs import IN_ORDER, SWAPPED, build_ordered_pairs
from data_pipeline.shards import iter_members
from data_pipeline.token_store import Documents
from data_pipeline.tokenizer_folder import Normalisation
from data_pipeline.wordpiece import WordPieceTokenizer

CLS, SEP = 2, 3
ROOM = 10


def documents_of(lengths: list[list[int]]) -> Documents:
    """Documents given as lists of sentence lengths; every token has an id of its own, from 100."""
    flat = [length for document in lengths for length in document]
    return Documents(
        keys=[f"d{i}" for i in range(len(lengths))],
        sentence_counts=np.array([len(document) for document in lengths], np.int64),
        sentence_lengths=np.array(flat, np.int64),
        ids=np.arange(100, 100 + sum(flat)).astype(np.uint16),
    )


def parts_of(documents: Documents, *, cross: bool, seed: int = 0) -> list[list[int]]:
    """The ids of each packed example, structural tokens left out."""
    pairs = pack_sentences(documents, max_seq_length=ROOM + 2, cross_documents=cross, rng=np.random.default_rng(seed))
    assert (pairs.labels == -1).all()
    assert not pairs.b_lengths.any()
    return [documents.ids[s : s + n].tolist() for s, n in zip(pairs.a_starts, pairs.a_lengths, strict=True)]


def test_doc_sentences_stop_at_the_document() -> None:
    documents = documents_of([[4, 4, 4, 4], [3], [6, 5]])
    assert [len(part) for part in parts_of(documents, cross=False)] == [8, 8, 3, 6, 5]
    assert [i for part in parts_of(documents, cross=False) for i in part] == documents.ids.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_full_sentences_cross_documents_with_a_separator_and_lose_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plain = documents_of([rng.integers(1, 13, rng.integers(1, 5)).tolist() for _ in range(12)])
    parts = parts_of(with_separators(plain, SEP), cross=True, seed=seed)
    assert all(1 <= len(part) <= ROOM for part in parts)
    assert all(part[0] != SEP and part[-1] != SEP for part in parts)
    assert [i for part in parts for i in part if i != SEP] == plain.ids.tolist()
    assert any(SEP in part for part in parts)
    ends = set((100 + np.cumsum(plain.token_counts()) - 1).tolist())
    for part in parts:
        for left, right in itertools.pairwise(part):
            assert (right == SEP) == (left in ends) or left == SEP


def test_long_sentences_are_split_not_cut() -> None:
    pieces = split_long_sentences(documents_of([[25, 3], [10]]), ROOM)
    assert pieces.sentence_lengths.tolist() == [10, 10, 5, 3, 10]
    assert pieces.sentence_counts.tolist() == [4, 1]


def test_ordered_pairs_are_half_swapped_and_from_one_document() -> None:
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 30, rng.integers(1, 40)).tolist() for _ in range(300)]
    documents = documents_of([[min(length, 29) for length in document] for document in lengths])
    pairs = build_ordered_pairs(
        documents.sentence_counts, documents.sentence_lengths, max_seq_length=64, short_seq_prob=0.1, rng=rng
    )
    assert len(pairs.labels) > 1000
    assert (pairs.a_documents == pairs.b_documents).all()
    assert abs((pairs.labels == SWAPPED).mean() - 0.5) < 0.05
    first_is_earlier = pairs.a_starts < pairs.b_starts
    assert (first_is_earlier == (pairs.labels == IN_ORDER)).all()
    assert (pairs.a_lengths + pairs.b_lengths + 3 <= 64).all()
    assert pairs.a_lengths.min() >= 1
    assert pairs.b_lengths.min() >= 1
    used = int((pairs.a_lengths + pairs.b_lengths).sum())
    assert used + pairs.truncated == len(documents.ids)


@pytest.mark.parametrize("mode", ["sop", "full_sentences", "doc_sentences"])
def test_every_mode_writes_valid_blocks(tmp_path: Path, mode: str) -> None:
    flags = Normalisation(lowercase=True, strip_accents=True, split_cjk=True)
    tokenizer = WordPieceTokenizer(
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(chr(ord("a") + i) for i in range(26))], flags
    )
    rng = np.random.default_rng(1)
    lengths = [rng.integers(1, 40, rng.integers(1, 9)).tolist() for _ in range(30)]
    documents = documents_of(lengths)
    ids = rng.integers(5, 31, len(documents.ids)).astype(np.uint16)
    documents = Documents(
        keys=documents.keys,
        sentence_counts=documents.sentence_counts,
        sentence_lengths=documents.sentence_lengths,
        ids=ids,
    )
    settings = AssembleSettings(
        seed=1, mode=mode, max_seq_length=64, short_seq_prob=0.1, mask_prob=0.15, max_predictions=10, mask_sets=2,
        whole_word=False, span_masking=False, dupes=2, block_examples=16, shard_megabytes=1,
    )  # fmt: skip
    records, stats = write_bucket(
        documents, directory=tmp_path, split="train", bucket=0, tokenizer=tokenizer, settings=settings
    )
    blocks = [decode_block(data, where=key, deep=True) for key, _, data in iter_members(tmp_path / records[0].name)]
    assert stats.counts["examples"] == sum(block.examples for block in blocks) > 20
    for block in blocks:
        ends = np.cumsum(block.lengths, dtype=int)
        assert (block.lengths <= 64).all()
        assert (block.input_ids[ends - 1] == SEP).all()
        assert (block.input_ids[ends - block.lengths] == CLS).all()
        if mode == "sop":
            assert set(block.nsp_labels.tolist()) <= {0, 1}
        else:
            assert (block.segment_a_lengths == block.lengths).all()
            assert (block.nsp_labels == -1).all()
