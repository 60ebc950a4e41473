"""Which tokens are predicted and what the encoder sees there, for a whole block of examples at once.

BERT (arXiv:1810.04805, section 3.1 and appendix A.1): 15 % of the tokens, of which 80 % become the mask id, 10 % a
random id, 10 % stay. Counts are exact, special tokens are never predicted, and random ids come from ordinary vocabulary
entries only. Whole-word masking is that of google-research/bert's release notes of May 2019: all pieces of a word or none.

Everything is a pure function of the block and of the numbers that seed the generator.

Legend: `E` examples, `L` tokens of the longest, `N` tokens of the block, `K` predictions of the example with most of
them, `P` predictions of the block, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MASKED_SHARE = 0.8
RANDOM_SHARE = 0.1

_POSITION_MASK = np.uint64(0xFFFF)
_NEVER = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskingRule:
    """How to mask, with what masking must know of the vocabulary.

    Attributes:
        probability: share of an example's tokens, specials included, that is predicted.
        limit: most predictions of one example.
        mask_id: what a masked token becomes.
        predictable: bool (V,), false for the special ids, [UNK] among them: those are never predicted.
        ordinary_ids: int32, ids that a random replacement may be.
        word_starts: bool (V,), ids that begin a word; only read with `whole_word`.
        whole_word: predict all pieces of a word together or not at all.
    """

    probability: float
    limit: int
    mask_id: int
    predictable: np.ndarray
    ordinary_ids: np.ndarray
    word_starts: np.ndarray
    whole_word: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskSet:
    """One masking of a block.

    Attributes:
        counts: (E,) uint16, predictions of each example.
        positions: (P,) uint16, counted from the example's start, ascending within an example.
        inputs: (P,) dtype of the block's ids, what the encoder sees.
    """

    counts: np.ndarray
    positions: np.ndarray
    inputs: np.ndarray


def mask_rng(seed: int, *place: int) -> np.random.Generator:
    """The generator of one mask set of one block: a pure function of the seed and of where it is used.

    Args:
        seed: of the data set.
        place: for example (bucket, block, set), or (epoch, block) where masks are drawn at load time.
    """
    return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence([seed, *place])))


def prediction_counts(lengths: np.ndarray, probability: float, limit: int) -> np.ndarray:
    """(E,) int64: min(limit, max(1, round(probability x length))), halves to even: 12 -> 2, 30 -> 4, 128 -> 19."""
    return np.minimum(limit, np.maximum(1, np.rint(probability * lengths.astype(np.float64)))).astype(np.int64)


def default_limit(max_seq_length: int, probability: float) -> int:
    """What `probability` of the longest example rounds to: 128 at 0.15 gives 19, 512 gives 77."""
    return int(prediction_counts(np.array([max_seq_length]), probability, max_seq_length)[0])


def draw_masks(
    input_ids: np.ndarray,
    lengths: np.ndarray,
    rule: MaskingRule,
    rng: np.random.Generator,
) -> MaskSet:
    """Mask every example of a block once.

    Args:
        input_ids: (N,) clean ids, all examples end to end.
        lengths: (E,) tokens of each example.
        rule: how to mask.
        rng: every draw comes from here.
    """
    lengths = lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    candidates = rule.predictable[input_ids]
    counts = np.minimum(
        prediction_counts(lengths, rule.probability, rule.limit), np.add.reduceat(candidates, starts, dtype=np.int64)
    )
    if rule.whole_word:
        positions, counts = _choose_words(input_ids, lengths, candidates, counts, rule, rng)
    else:
        positions = _choose_tokens(lengths, candidates, counts, rng)
    originals = input_ids[positions + np.repeat(starts, counts)]
    return MaskSet(
        counts=counts.astype(np.uint16),
        positions=positions.astype(np.uint16),
        inputs=_replace(originals, rule, rng),
    )


def _random_keys(count: int, rng: np.random.Generator) -> np.ndarray:
    """(count,) uint64 below 2**63: a random order once sorted."""
    return rng.bit_generator.random_raw(count) >> np.uint64(1)


def _choose_tokens(
    lengths: np.ndarray, candidates: np.ndarray, counts: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """(P,) int64 positions: of each example a uniform sample of `counts` candidates, ascending.

    One random number a token with its position in the low bits: the smallest `count` numbers of a row are a sample
    without replacement, and partly sorting plain integers is the fastest thing NumPy does.
    """
    longest, most = int(lengths.max()), max(1, int(counts.max()))
    columns = np.arange(longest, dtype=np.uint64)
    table_EL = np.full((len(lengths), longest), _NEVER)
    table_EL[columns < lengths[:, None]] = np.where(candidates, _random_keys(len(candidates), rng), _NEVER)
    table_EL &= ~_POSITION_MASK
    table_EL |= columns
    smallest_EK = np.sort(np.partition(table_EL, most - 1, axis=1)[:, :most], axis=1)
    chosen_EK = np.arange(most) < counts[:, None]
    positions_EK = np.sort(np.where(chosen_EK, smallest_EK & _POSITION_MASK, _NEVER), axis=1)
    return positions_EK[chosen_EK].astype(np.int64)


def _choose_words(
    input_ids: np.ndarray,
    lengths: np.ndarray,
    candidates: np.ndarray,
    counts: np.ndarray,
    rule: MaskingRule,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """(P,) int64 positions of whole words, ascending within an example, and the (E,) int64 numbers of them.

    Words are taken in random order; one that would exceed the count is passed over. Where every word is longer than
    the count, the first that is within the limit is taken: an example should predict something.
    """
    rows = np.repeat(np.arange(len(lengths)), lengths)
    columns = np.arange(len(input_ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    begins = rule.word_starts[input_ids]
    begins[1:] |= ~candidates[:-1]  # a part that was cut at the front may start inside a word
    tokens = np.flatnonzero(candidates)
    heads = begins[tokens]
    word_of_token = np.cumsum(heads) - 1
    word_rows = rows[tokens[heads]]
    order = _shuffled_within(word_rows, rng)
    sizes = np.bincount(word_of_token, minlength=len(order))[order]
    words = np.bincount(word_rows, minlength=len(lengths))
    first_word = np.cumsum(words) - words
    taken = np.zeros(len(order), bool)
    room = counts.copy()
    active = np.flatnonzero((words > 0) & (room > 0))
    rank = 0
    while len(active):
        word = first_word[active] + rank
        fits = sizes[word] <= room[active]
        taken[word[fits]] = True
        room[active[fits]] -= sizes[word[fits]]
        rank += 1
        active = active[(rank < words[active]) & (room[active] > 0)]
    for row in np.flatnonzero((room == counts) & (words > 0)).tolist():
        within = np.flatnonzero(sizes[first_word[row] : first_word[row] + words[row]] <= rule.limit)
        taken[first_word[row] + within[:1]] = True
    chosen_words = np.zeros(len(order), bool)
    chosen_words[order[taken]] = True
    picked = tokens[chosen_words[word_of_token]]
    return columns[picked], np.bincount(rows[picked], minlength=len(lengths))


def _shuffled_within(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(W,) int64 indices that put the entries of each row in random order; `rows` ascends.

    Row, random bits and index share 64 bits, as sorting integers costs a tenth of sorting by two keys.
    """
    index_bits = np.uint64(max(1, len(rows) - 1).bit_length())
    row_bits = np.uint64(max(1, int(rows.max(initial=0))).bit_length())
    random_bits = np.uint64(64) - index_bits - row_bits
    keys = rng.bit_generator.random_raw(len(rows)) >> (np.uint64(64) - random_bits) << index_bits
    keys |= rows.astype(np.uint64) << (np.uint64(64) - row_bits)
    keys |= np.arange(len(rows), dtype=np.uint64)
    keys.sort()
    return (keys & ((np.uint64(1) << index_bits) - np.uint64(1))).astype(np.int64)


def _replace(originals: np.ndarray, rule: MaskingRule, rng: np.random.Generator) -> np.ndarray:
    """What the encoder sees instead of these ids: 80 % the mask id, 10 % a random ordinary id, 10 % themselves."""
    fate = rng.random(len(originals))
    drawn = rule.ordinary_ids[rng.integers(0, len(rule.ordinary_ids), len(originals))].astype(originals.dtype)
    inputs = np.where(fate < MASKED_SHARE + RANDOM_SHARE, drawn, originals)
    inputs[fate < MASKED_SHARE] = rule.mask_id
    return inputs
