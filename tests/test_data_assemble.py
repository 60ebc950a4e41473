"""Stage 1's columns and stage 2's shards, with a real tokenizer: layout, specials, document names, interruption."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.assemble_stage import AssembleSettings, read_bucket, write_bucket
from data_pipeline.block_codec import decode_block
from data_pipeline.masking import default_limit
from data_pipeline.records import Block, Document
from data_pipeline.sentences import split_sentences
from data_pipeline.shards import ShardWriter, iter_members
from data_pipeline.token_store import Documents, TokenFile, TokenWriter
from data_pipeline.tokenize_stage import batches, tokenize_batch
from data_pipeline.tokenizer_folder import Normalisation
from data_pipeline.wordpiece import WordPieceTokenizer

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "the",
    "cat",
    "[",
    "mask",
    "]",
    "sat",
    "on",
    "sep",
    "hello",
    "world",
    "second",
    "doc",
    "here",
    "word",
    "short",
    "one",
    "wiki",
    "a",
    "##a",
    "un",
    "##believ",
    "##able",
]


@pytest.fixture(scope="module")
def tokenizer() -> WordPieceTokenizer:
    """A small real vocabulary."""
    return WordPieceTokenizer(SPECIALS + WORDS, Normalisation(lowercase=True, strip_accents=True, split_cjk=True))


def settings(**changes: object) -> AssembleSettings:
    """Length 128, two mask sets."""
    given: dict[str, object] = {
        "seed": 3,
        "mode": "nsp",
        "max_seq_length": 128,
        "short_seq_prob": 0.1,
        "mask_prob": 0.15,
        "max_predictions": default_limit(128, 0.15),
        "mask_sets": 2,
        "whole_word": False,
        "span_masking": False,
        "dupes": 1,
        "block_examples": 4,
        "shard_megabytes": 1,
    }
    return AssembleSettings(**(given | changes))  # type: ignore[arg-type]


def tokenized(texts: dict[str, str], tokenizer: WordPieceTokenizer) -> tuple[Documents, Counter[str]]:
    """Documents (name -> lines) as stage 1 stores them, and its counts."""
    counts: Counter[str] = Counter()
    documents = [Document(text=text, id=name) for name, text in texts.items()]
    split = partial(split_sentences, method="line")
    return tokenize_batch(documents, tokenizer, split, counts), counts


def blocks_of(folder: Path) -> list[Block]:
    """All blocks of all shards of a folder, in order."""
    return [
        decode_block(payload, where=key, deep=True)
        for path in sorted(folder.glob("*.tar"))
        for key, _, payload in iter_members(path)
    ]


def assemble(documents: Documents, folder: Path, tokenizer: WordPieceTokenizer, **changes: object) -> list[Block]:
    """The blocks of one bucket, through the shards."""
    write_bucket(
        documents, directory=folder, split="train", bucket=0, tokenizer=tokenizer, settings=settings(**changes)
    )
    return blocks_of(folder)


def examples_of(block: Block) -> list[np.ndarray]:
    """Clean ids of each example."""
    return np.split(block.input_ids, np.cumsum(block.lengths, dtype=int)[:-1])


def test_r04_markers_in_text_are_ordinary_in_a_stored_sample(tmp_path: Path, tokenizer: WordPieceTokenizer) -> None:
    texts = {f"d{i}": "the [MASK] cat [SEP]on\nthe cat sat on the cat" for i in range(8)}
    documents, _ = tokenized(texts, tokenizer)
    line = [tokenizer.tokens[i] for i in documents.ids[:9]]
    assert line == ["the", "[", "mask", "]", "cat", "[", "sep", "]", "on"]
    for block in assemble(documents, tmp_path, tokenizer):
        starts = np.cumsum(block.lengths, dtype=int) - block.lengths
        assert not (block.input_ids == tokenizer.mask_id).any()
        for ids, a_length in zip(examples_of(block), block.segment_a_lengths.tolist(), strict=True):
            assert np.flatnonzero(ids == tokenizer.sep_id).tolist() == [a_length - 1, len(ids) - 1]
            assert np.flatnonzero(ids == tokenizer.cls_id).tolist() == [0]
        for counts, positions, inputs in zip(
            block.mask_counts,
            np.split(block.mask_positions, np.cumsum(block.mask_counts.sum(axis=1))[:-1]),
            np.split(block.mask_inputs, np.cumsum(block.mask_counts.sum(axis=1))[:-1]),
            strict=True,
        ):
            seen = block.input_ids.copy()
            at = np.repeat(starts, counts) + positions
            seen[at] = inputs
            assert set(np.flatnonzero(seen == tokenizer.mask_id)) <= set(at.tolist())
            assert ((seen == tokenizer.sep_id) == (block.input_ids == tokenizer.sep_id)).all()


def test_r10_documents_without_tokens_are_dropped_and_counted(tmp_path: Path, tokenizer: WordPieceTokenizer) -> None:
    texts = {"empty": "", "blank": "   ", "zwsp": "\u200b", "hello": "hello world", "second": "second doc here\n\u200b"}
    documents, counts = tokenized(texts, tokenizer)
    assert documents.keys == ["hello", "second"]
    assert documents.sentence_counts.tolist() == [1, 1]
    assert documents.sentence_lengths.tolist() == [2, 3]
    assert (counts["dropped:empty"], counts["dropped:blank"], counts["dropped:no_tokens"]) == (1, 1, 1)
    assert (counts["documents"], counts["documents_kept"], counts["sentences_no_tokens"]) == (5, 2, 2)
    for seed in range(20):
        (block,) = assemble(documents, tmp_path, tokenizer, seed=seed)
        assert (block.segment_a_lengths >= 3).all()
        assert (block.lengths - block.segment_a_lengths >= 2).all()


def test_r11_layout_of_a_line_of_1000_words(tmp_path: Path, tokenizer: WordPieceTokenizer) -> None:
    documents, _ = tokenized({"long": "word " * 1000, "short": "short one here"}, tokenizer)
    folder = tmp_path / "train"
    folder.mkdir()
    _, stats = write_bucket(
        documents, directory=folder, split="train", bucket=0, tokenizer=tokenizer, settings=settings()
    )
    (block,) = blocks_of(folder)
    assert block.examples == 2
    assert stats.counts["truncated_tokens"] == 2 * (1000 - (125 - 3))
    for ids, a_length in zip(examples_of(block), block.segment_a_lengths.tolist(), strict=True):
        assert len(ids) == 128
        assert ids[0] == tokenizer.cls_id
        assert ids[a_length - 1] == ids[-1] == tokenizer.sep_id
        assert a_length >= 3
        assert len(ids) - a_length >= 2


def test_r16_samples_of_any_document_name_are_all_there(tmp_path: Path, tokenizer: WordPieceTokenizer) -> None:
    names = ["wiki.v1", "wiki.v2", "a/../b", "Wiki.V1", "w\u00efki \u4e2d", "", "x" * 300]
    words = [word for word in WORDS if word.isalpha()]
    documents, _ = tokenized({name: words[i] for i, name in enumerate(names)}, tokenizer)
    blocks = assemble(documents.take(np.arange(len(names))), tmp_path, tokenizer, dupes=3)
    firsts = Counter(tokenizer.tokens[ids[1]] for block in blocks for ids in examples_of(block))
    assert firsts == dict.fromkeys(words[: len(names)], 3)


def test_r15_killed_while_writing_leaves_complete_shards_only(tmp_path: Path, tokenizer: WordPieceTokenizer) -> None:
    """12 samples, 5 a shard; killed after the 12th is written and before the shard is closed."""
    documents, _ = tokenized({f"d{i}": WORDS[i % 2] for i in range(12)}, tokenizer)
    small = {"block_examples": 1, "shard_megabytes": 5 * 2560 / 1e6}  # a block of one example takes 2,560 bytes
    child = os.fork()
    if child == 0:
        add, count = ShardWriter.add, itertools.count(1)

        def add_until_killed(self: ShardWriter, key: str, block: Block) -> None:
            add(self, key, block)
            if next(count) == 12:
                os.kill(os.getpid(), signal.SIGKILL)

        ShardWriter.add = add_until_killed  # type: ignore[method-assign]
        assemble(documents, tmp_path, tokenizer, **small)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.glob("*.tar")) == ["shard-00000-0000.tar", "shard-00000-0001.tar"]
    assert [block.examples for block in blocks_of(tmp_path)] == [1] * 10
    assert len(assemble(documents, tmp_path, tokenizer, **small)) == 12
    keys = [key for path in sorted(tmp_path.glob("*.tar")) for key, _, _ in iter_members(path)]
    assert len(keys) == len(set(keys)) == 12
    assert not list(tmp_path.glob(".*.tmp"))


def test_bytes_do_not_depend_on_the_order_of_documents(tmp_path: Path, tokenizer: WordPieceTokenizer) -> None:
    def stored(name: str, documents: Documents) -> TokenFile:
        with (tmp_path / name).open("wb") as file:
            writer = TokenWriter(file, groups=1, dtype=documents.ids.dtype)
            writer.add(documents, np.zeros(len(documents.keys), np.int64))
            writer.close({})
        return TokenFile(tmp_path / name)

    texts = {f"d{i % 30}": f"{' '.join(WORDS[i % 7 : i % 11 + 4])}\nthe cat sat" for i in range(30)}
    documents, _ = tokenized(texts, tokenizer)
    twice = documents.take(np.array([*range(30), 4, 4, 9]))  # keys that come more than once
    orders = [np.arange(33), np.arange(33)[::-1], np.random.default_rng(0).permutation(33)]
    for number, order in enumerate(orders):
        files = [stored("a.tokens", twice.take(order[:10])), stored("b.tokens", twice.take(order[10:]))]
        bucket = read_bucket(files, range(1), documents.ids.dtype)
        folder = tmp_path / str(number)
        folder.mkdir()
        assemble(bucket, folder, tokenizer)
    contents = {b"".join(p.read_bytes() for p in sorted((tmp_path / str(n)).glob("*.tar"))) for n in range(3)}
    assert len(contents) == 1


def test_mask_sets_differ_and_no_set_at_all_is_possible(tmp_path: Path, tokenizer: WordPieceTokenizer) -> None:
    documents, _ = tokenized({f"d{i}": "the cat sat on the cat\n" * 20 for i in range(9)}, tokenizer)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    block = assemble(documents, tmp_path / "a", tokenizer, mask_sets=3)[0]
    sets = np.split(block.mask_positions, np.cumsum(block.mask_counts.sum(axis=1))[:-1])
    assert len({tuple(part.tolist()) for part in sets}) == 3
    block = assemble(documents, tmp_path / "b", tokenizer, mask_sets=0)[0]
    assert block.mask_counts.shape == (0, block.examples)
    assert len(block.mask_positions) == 0


def test_overlong_and_unknown_words_are_counted(tokenizer: WordPieceTokenizer) -> None:
    _, counts = tokenized({"x": f"the cat\n{'a' * 101} cat {'a' * 100}\nzebra"}, tokenizer)
    assert counts["overlong_words"] == 1
    assert counts["unknown_tokens"] == 2
    assert counts["tokens"] == 2 + 1 + 1 + 100 + 1


def test_batches_follow_the_amount_of_text() -> None:
    documents = [Document(text="x" * 40, id=str(i)) for i in range(10)]
    assert [len(batch) for batch in batches(iter(documents), 100)] == [3, 3, 3, 1]
