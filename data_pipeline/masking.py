"""Which tokens are predicted and what the encoder sees there, for a whole block of examples at once.

BERT (arXiv:1810.04805, section 3.1 and appendix A.1): 15 % of the tokens, of which 80 % become the mask id, 10 % a
random id, 10 % stay. Counts are exact, special tokens are never predicted, and random ids come from ordinary vocabulary
entries only. Whole-word masking is that of google-research/bert's release notes of May 2019: all pieces of a word or none.
Spans are SpanBERT's (arXiv:1907.10529, section 3.1): runs of whole words that are masked, replaced or kept as one.

Everything is a pure function of the block and of the numbers that seed the generator.

Legend: `E` examples, `L` tokens of the longest, `N` tokens of the block, `K` predictions of the example with most of
them, `P` predictions of the block, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from data_pipeline.token_store import ranges

if TYPE_CHECKING:
    from data_pipeline.tokenizer import Tokenizer

MASKED_SHARE = 0.8
RANDOM_SHARE = 0.1
SPAN_LENGTH_SHARES = 0.2 * 0.8 ** np.arange(10) / (0.2 * 0.8 ** np.arange(10)).sum()
"""Share of spans of 1, 2, ... 10 words: a geometric distribution cut off at 10, 3.8 words on average."""

_SPAN_CUMULATIVE = np.cumsum(SPAN_LENGTH_SHARES)[:-1]

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
        word_starts: bool (V,), ids that begin a word; only read with `whole_word` and `spans`.
        whole_word: predict all pieces of a word together or not at all.
        spans: predict runs of whole words, see `SPAN_LENGTH_SHARES`.
        masked, random: shares of the predictions that become the mask id, and a random id; the rest stays.
    """

    probability: float
    limit: int
    mask_id: int
    predictable: np.ndarray
    ordinary_ids: np.ndarray
    word_starts: np.ndarray
    whole_word: bool = False
    spans: bool = False
    masked: float = MASKED_SHARE
    random: float = RANDOM_SHARE


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
    begins: np.ndarray | None = None,
) -> MaskSet:
    """Mask every example of a block once.

    Args:
        input_ids: (N,) clean ids, all examples end to end.
        lengths: (E,) tokens of each example.
        rule: how to mask.
        rng: every draw comes from here.
        begins: (N,) bool, tokens that begin a word, where a segmenter knows it better than `rule.word_starts`.
    """
    lengths = lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    candidates = rule.predictable.take(input_ids)  # twice as fast as an index of 16 bits
    counts = np.minimum(
        prediction_counts(lengths, rule.probability, rule.limit), np.add.reduceat(candidates, starts, dtype=np.int64)
    )
    span = None
    if rule.whole_word or rule.spans:
        begins = rule.word_starts.take(input_ids) if begins is None else begins.copy()
        places, counts, span = _choose_words(begins, lengths, candidates, counts, rule, rng)
    else:
        places = _choose_tokens(lengths, candidates, counts, rng) + np.repeat(starts, counts)
    return MaskSet(
        counts=counts.astype(np.uint16),
        positions=(places - np.repeat(starts, counts)).astype(np.uint16),
        inputs=_replace(input_ids[places], rule, rng, span),
    )


def masking_rule(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> MaskingRule:
    """The masking that the settings of a data set ask for, with its vocabulary.

    Args:
        tokenizer: of the data set.
        settings: `settings` of its index, of which `mask_prob`, `max_predictions`, `whole_word`, `span_masking` and, where they
            are there, `masked_share` and `random_share` are read.
    """
    predictable = np.ones(tokenizer.vocab_size, bool)
    special = [tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id]
    predictable[special] = False
    return MaskingRule(
        probability=settings["mask_prob"],
        limit=settings["max_predictions"],
        mask_id=tokenizer.mask_id,
        predictable=predictable,
        ordinary_ids=tokenizer.ordinary_ids,
        word_starts=tokenizer.word_starts,
        whole_word=settings["whole_word"],
        spans=settings["span_masking"],
        masked=settings.get("masked_share", MASKED_SHARE),
        random=settings.get("random_share", RANDOM_SHARE),
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
    table_EL[np.arange(longest) < lengths[:, None]] = np.where(candidates, _random_keys(len(candidates), rng), _NEVER)
    table_EL &= ~_POSITION_MASK
    table_EL |= columns
    table_EL.partition(most - 1, axis=1)
    smallest_EK = np.sort(table_EL[:, :most], axis=1)
    chosen_EK = np.arange(most) < counts[:, None]
    positions_EK = np.sort(np.where(chosen_EK, smallest_EK & _POSITION_MASK, _NEVER), axis=1)
    return positions_EK[chosen_EK].astype(np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Words:
    """The words of a block, `W` of them, made of the `C` tokens that may be predicted.

    Attributes:
        tokens: (C,) int64, places of those tokens in the block.
        word_of_token: (C,) int64.
        heads: (W,) int64, place of each word's first token in the block.
        rows: (W,) int64, example of each word, ascending.
        sizes: (W,) int64, tokens of each word.
    """

    tokens: np.ndarray
    word_of_token: np.ndarray
    heads: np.ndarray
    rows: np.ndarray
    sizes: np.ndarray


def _find_words(begins: np.ndarray, candidates: np.ndarray, rows: np.ndarray) -> _Words:
    begins[1:] |= ~candidates[:-1]  # a part that was cut at the front may start inside a word
    tokens = np.flatnonzero(candidates)
    first = begins[tokens]
    word_of_token = np.cumsum(first) - 1
    heads = tokens[first]
    sizes = np.bincount(word_of_token, minlength=len(heads))
    return _Words(tokens=tokens, word_of_token=word_of_token, heads=heads, rows=rows[heads], sizes=sizes)


def _choose_words(
    begins: np.ndarray,
    lengths: np.ndarray,
    candidates: np.ndarray,
    counts: np.ndarray,
    rule: MaskingRule,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Whole words, or spans of them: places in the block, how many of each example, and the span of each.

    Units (words, or spans) are taken in random order. A word that would exceed the count is passed over, a span is
    shortened to the words that fit. Where every word is longer than the count, the first that is within the limit is
    taken: an example should predict something.

    Returns:
        (P,) int64 places in the block, ascending; (E,) int64; (P,) int64 span of each place, None for words.
    """
    rows = np.repeat(np.arange(len(lengths)), lengths)
    words = _find_words(begins, candidates, rows)
    if rule.spans:
        unit_first = _span_starts(words, candidates, rng)
        unit_words = np.diff(unit_first, append=len(words.heads))
    else:
        unit_first = np.arange(len(words.heads))
        unit_words = np.ones_like(unit_first)
    order = _shuffled_within(words.rows[unit_first], rng)
    units = np.bincount(words.rows[unit_first], minlength=len(lengths))
    first_unit = np.cumsum(units) - units
    token_ends = np.concatenate([[0], np.cumsum(words.sizes)])
    chosen = np.zeros(len(words.heads), bool)
    room = counts.copy()
    active = np.flatnonzero((units > 0) & (room > 0))
    rank = 0
    while len(active):
        unit = order[first_unit[active] + rank]
        start, length = unit_first[unit], unit_words[unit]
        fitting = np.searchsorted(token_ends, token_ends[start] + room[active], side="right") - 1 - start
        if rule.spans:  # the part that fits lies anywhere in the span, not always at its beginning
            skipped = (rng.random(len(start)) * np.maximum(1, length - fitting + 1)).astype(np.int64)
            start, length = start + skipped, length - skipped
            fitting = np.searchsorted(token_ends, token_ends[start] + room[active], side="right") - 1 - start
        taken = np.minimum(fitting, length)
        chosen[ranges(start, taken)] = True
        room[active] -= token_ends[start + taken] - token_ends[start]
        rank += 1
        active = active[(rank < units[active]) & (room[active] > 0)]
    for row in np.flatnonzero((room == counts) & (units > 0)).tolist():
        of_row = order[first_unit[row] : first_unit[row] + units[row]]
        within = of_row[words.sizes[unit_first[of_row]] <= rule.limit]
        chosen[unit_first[within[:1]]] = True
    picked = chosen[words.word_of_token]
    places = words.tokens[picked]
    span = np.searchsorted(unit_first, words.word_of_token[picked], side="right") - 1 if rule.spans else None
    return places, np.bincount(rows[places], minlength=len(lengths)), span


def _span_starts(words: _Words, candidates: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Words that begin a span. Spans of random length tile the words of the block, so they never overlap; one that
    would reach over a special token or into the next example is cut there."""
    lengths = 1 + np.searchsorted(_SPAN_CUMULATIVE, rng.random(len(words.heads)), side="right")
    ends = np.cumsum(lengths)
    begins = words.heads == 0
    begins |= ~candidates[words.heads - 1]
    begins[ends[ends < len(begins)]] = True
    return np.flatnonzero(begins)


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


def _replace(originals: np.ndarray, rule: MaskingRule, rng: np.random.Generator, span: np.ndarray | None) -> np.ndarray:
    """What the encoder sees instead of these ids: the mask id, a random ordinary id or themselves, by the rule's shares.

    The tokens of one `span` (P,) share their fate, as in SpanBERT.
    """
    if span is None:
        fate = rng.random(len(originals))
    else:
        fate = rng.random(int(span.max(initial=0)) + 1)[span]
    drawn = rule.ordinary_ids[rng.integers(0, len(rule.ordinary_ids), len(originals))].astype(originals.dtype)
    inputs = np.where(fate < rule.masked + rule.random, drawn, originals)
    inputs[fate < rule.masked] = rule.mask_id
    return inputs
