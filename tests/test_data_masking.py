"""Masking: exact counts, specials, 80/10/10, whole words (R12, R13)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from data_pipeline.masking import MaskingRule, default_limit, draw_masks, mask_rng, prediction_counts

V = 200
SPECIALS = 5  # [PAD] [UNK] [CLS] [SEP] [MASK]
CLS, SEP, MASK = 2, 3, 4


def rule(*, limit: int = 20, whole_word: bool = False, word_starts: np.ndarray | None = None) -> MaskingRule:
    """15 % of a vocabulary of 200 with five specials; ids 190 and up are rows that must never be drawn."""
    return MaskingRule(
        probability=0.15,
        limit=limit,
        mask_id=MASK,
        predictable=np.arange(V) >= SPECIALS,
        ordinary_ids=np.arange(SPECIALS, 190, dtype=np.int32),
        word_starts=np.ones(V, bool) if word_starts is None else word_starts,
        whole_word=whole_word,
    )


def examples(parts: list[tuple[int, int]], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids and lengths of `[CLS] A [SEP] B [SEP]` with random tokens."""
    rng = np.random.default_rng(seed)
    rows = [
        np.concatenate([[CLS], rng.integers(SPECIALS, 190, a), [SEP], rng.integers(SPECIALS, 190, b), [SEP]])
        for a, b in parts
    ]
    return np.concatenate(rows).astype(np.uint16), np.array([len(row) for row in rows], np.uint16)


@pytest.mark.parametrize(("length", "count"), [(4, 1), (12, 2), (30, 4), (128, 19), (512, 77)])
def test_r12_counts(length: int, count: int) -> None:
    assert prediction_counts(np.array([length]), 0.15, 1000).tolist() == [count]
    assert prediction_counts(np.array([length]), 0.15, 3).tolist() == [min(3, count)]
    assert default_limit(length, 0.15) == count
    ids, lengths = examples([(length - 4, 1)] * 3)
    assert draw_masks(ids, lengths, rule(limit=1000), mask_rng(1)).counts.tolist() == [count] * 3


def test_r12_shares_and_specials_over_20000_predictions() -> None:
    ids, lengths = examples([(5, 4)] * 10_000)
    masks = draw_masks(ids, lengths, rule(), mask_rng(7))
    assert masks.counts.tolist() == [2] * 10_000
    at = np.repeat(np.arange(10_000) * 12, 2) + masks.positions
    originals = ids[at]
    assert (originals >= SPECIALS).all()
    masked = masks.inputs == MASK
    kept = masks.inputs == originals
    random = ~masked & ~kept
    assert abs(masked.mean() - 0.8) < 0.01
    assert abs(kept.mean() - 0.1) < 0.01
    assert abs(random.mean() - 0.1) < 0.01
    drawn = masks.inputs[random]
    assert drawn.min() >= SPECIALS
    assert drawn.max() < 190
    assert len(np.unique(drawn)) > 150
    # every ordinary position is as likely as another, and positions of an example ascend
    places = np.bincount(masks.positions, minlength=12)
    assert set(np.flatnonzero(places)) == {1, 2, 3, 4, 5, 7, 8, 9, 10}
    assert places[places > 0].min() > 0.9 * 20_000 / 9
    assert (np.diff(masks.positions.reshape(-1, 2).astype(int), axis=1) > 0).all()


@pytest.mark.parametrize(("masked", "random"), [(1.0, 0.0), (0.8, 0.2), (0.8, 0.0), (0.0, 0.8), (0.0, 1.0), (0.0, 0.0)])
def test_shares_of_the_paper_s_other_masking_strategies(masked: float, random: float) -> None:
    """arXiv 1810.04805, table 8; 0 and 0: what a left-to-right model reads."""
    ids, lengths = examples([(5, 4)] * 5_000)
    masks = draw_masks(ids, lengths, replace(rule(), masked=masked, random=random), mask_rng(7))
    originals = ids[np.repeat(np.arange(5_000) * 12, 2) + masks.positions]
    assert (masks.inputs == MASK).mean() == pytest.approx(masked, abs=0.015)
    assert ((masks.inputs != MASK) & (masks.inputs != originals)).mean() == pytest.approx(random, abs=0.015)


def test_masks_are_a_function_of_seed_and_place() -> None:
    ids, lengths = examples([(40, 30), (3, 2), (60, 60)])
    one, same, other = (draw_masks(ids, lengths, rule(), mask_rng(*place)) for place in [(1, 2), (1, 2), (1, 3)])
    assert one.positions.tolist() == same.positions.tolist()
    assert one.inputs.tolist() == same.inputs.tolist()
    assert one.positions.tolist() != other.positions.tolist()


def test_r12_example_of_unknown_tokens_has_nothing_to_predict() -> None:
    ids, lengths = examples([(4, 4), (6, 6)])
    ids[:11] = np.where(ids[:11] >= SPECIALS, 1, ids[:11])  # every ordinary token of the first example is [UNK]
    masks = draw_masks(ids, lengths, rule(), mask_rng(0))
    assert masks.counts.tolist() == [0, 2]


def test_r13_word_is_predicted_whole_or_not_at_all() -> None:
    """`[CLS] un ##believ ##able cat [SEP] dog [SEP]` many times, and longer text."""
    un, believ, able, cat, dog = 10, 11, 12, 13, 14
    starts = np.ones(V, bool)
    starts[[believ, able]] = False
    example = [CLS, un, believ, able, cat, SEP, dog, SEP]
    ids = np.array(example * 300 + [CLS, *[un, believ, able, cat] * 20, SEP, dog, SEP], np.uint16)
    lengths = np.array([8] * 300 + [84], np.uint16)
    masks = draw_masks(ids, lengths, rule(limit=12, whole_word=True, word_starts=starts), mask_rng(3))
    parts = np.split(masks.positions, np.cumsum(masks.counts)[:-1])
    short = {tuple(part.tolist()) for part in parts[:-1]}
    assert short == {(4,), (6,)}  # room for one token: the word of three pieces never fits
    long = set(parts[-1].tolist())
    assert masks.counts[-1] == 12
    words = [{1 + 4 * i, 2 + 4 * i, 3 + 4 * i} for i in range(20)]
    assert any(word <= long for word in words)
    assert all(word <= long or not word & long for word in words)


def test_r13_only_long_words_still_predict_something() -> None:
    starts = np.ones(V, bool)
    starts[20:] = False
    ids = np.array([CLS, 10, 21, 22, SEP, 11, 23, 24, SEP], np.uint16)
    masks = draw_masks(ids, np.array([9]), rule(limit=5, whole_word=True, word_starts=starts), mask_rng(0))
    assert masks.positions.tolist() in ([1, 2, 3], [5, 6, 7])


def test_whole_word_part_that_starts_inside_a_word() -> None:
    """Truncation can cut a part at the front: its first piece then begins a word of its own."""
    starts = np.ones(V, bool)
    starts[20:] = False
    ids = np.array([CLS, 21, SEP, 22, SEP], np.uint16)
    seen = {
        tuple(draw_masks(ids, np.array([5]), rule(whole_word=True, word_starts=starts), mask_rng(s)).positions.tolist())
        for s in range(30)
    }
    assert seen == {(1,), (3,)}


def test_whole_word_counts_stay_near_15_percent() -> None:
    ids, lengths = examples([(60, 65)] * 200)
    starts = np.random.default_rng(0).random(V) < 0.75
    masks = draw_masks(ids, lengths, rule(whole_word=True, word_starts=starts), mask_rng(5))
    assert masks.counts.max() <= 19
    assert masks.counts.mean() > 18.5


def test_span_masking_takes_runs_of_whole_words_with_one_fate() -> None:
    """SpanBERT's lengths (3.8 words on average, at most 10), whole words, never over a separator, 15 % of the tokens."""
    rng = np.random.default_rng(1)
    starts = np.ones(V, bool)
    starts[120:] = False  # ids that go on a word
    ids, lengths = examples([(200, 250)] * 400, seed=2)
    begins = starts[ids] | (np.concatenate([[SEP], ids[:-1]]) < SPECIALS)
    spans = replace(rule(limit=68, word_starts=starts), spans=True)
    masks = draw_masks(ids, lengths, spans, mask_rng(int(rng.integers(9))))
    assert masks.counts.tolist() == [68] * 400
    at = np.repeat(np.cumsum(lengths, dtype=int) - lengths, masks.counts) + masks.positions
    chosen = np.zeros(len(ids) + 1, bool)
    chosen[at] = True
    assert (ids[at] >= SPECIALS).all()
    cut = np.flatnonzero(chosen[:-1] & ~chosen[1:])  # last token of each run: the next one begins a word or is special
    inside = ~(begins[cut + 1] | (ids[cut + 1] < SPECIALS))
    assert not inside.any()
    heads = np.flatnonzero(chosen[:-1] & ~np.concatenate([[False], chosen[:-2]]))
    assert begins[heads].all()
    words = np.add.reduceat(begins[at], np.searchsorted(at, heads))
    assert 3.5 < words.mean() < 5.5  # spans that happen to touch are one run here, those at an end are shorter
    masked = masks.inputs == MASK
    assert abs(masked.mean() - 0.8) < 0.03
    same_run = np.diff(at) == 1
    assert (masked[1:] == masked[:-1])[same_run].mean() > 0.93  # 0.68 where each token is tossed for


def test_span_masking_of_short_examples_keeps_the_count() -> None:
    ids, lengths = examples([(5, 4)] * 2000)
    spans = replace(rule(), spans=True)
    masks = draw_masks(ids, lengths, spans, mask_rng(7))
    assert masks.counts.tolist() == [2] * 2000
    places = np.bincount(masks.positions, minlength=12)
    assert places[places > 0].min() > 0.6 * 4000 / 9
