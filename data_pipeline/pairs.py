"""Sentence pairs for next sentence prediction and sentence order prediction, from sentence lengths alone.

BERT (arXiv:1810.04805, section 3.1 and appendix A.2): half of the pairs are two parts of one document that follow each
other, half take their second part from another document; the sentences that a random pair did not use are put back.
A pair is two ranges of tokens, so building it never touches an id.

Where this is more exact than the original: the target length is drawn per pair (a short draw does not shorten a
whole book), and labels balance. A chunk of one sentence has nothing that follows, so its pair is always random; each
such pair that should have been a continuation is made up for by the next random draw that can be turned.

ALBERT's pairs (arXiv:1909.11942, section 3.1) are two parts that follow each other, half of them swapped.

Legend: `D` documents, `S` sentences, `E` pairs.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

NEXT = 0
RANDOM = 1
IN_ORDER = 0
SWAPPED = 1
STRUCTURAL_TOKENS = 3
"""[CLS] A [SEP] B [SEP]"""

_DRAWS = 4096


class SingleDocumentError(ValueError):
    """A random second part needs another document, and there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Pairs as token ranges in the ids of one bucket.

    Attributes:
        a_starts, a_lengths: (E,) int64, the first part; at least one token.
        b_starts, b_lengths: (E,) int64, the second part; at least one token in the modes with pairs, else none.
        labels: (E,) int8, `NEXT` or `RANDOM`; `IN_ORDER` or `SWAPPED`; -1 where there is no second part.
        a_documents, b_documents: (E,) int64, which document each part comes from.
        truncated: tokens that truncation cut off, of all pairs.
        forced_random: pairs that are random only because their chunk was a single sentence.
    """

    a_starts: np.ndarray
    a_lengths: np.ndarray
    b_starts: np.ndarray
    b_lengths: np.ndarray
    labels: np.ndarray
    a_documents: np.ndarray
    b_documents: np.ndarray
    truncated: int
    forced_random: int

    def take(self, order: np.ndarray | slice) -> Pairs:
        """The pairs at these places, in this order; the counts stay those of all."""
        columns = {name: getattr(self, name)[order] for name in _COLUMNS}
        return replace(self, **columns)

    @classmethod
    def joined(cls, parts: Sequence[Pairs]) -> Pairs:
        """The pairs of all parts, in order."""
        return cls(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS},
            truncated=sum(part.truncated for part in parts),
            forced_random=sum(part.forced_random for part in parts),
        )


_COLUMNS = tuple(name for name in Pairs.__slots__ if name not in ("truncated", "forced_random"))


def build_pairs(
    sentence_counts: np.ndarray,
    sentence_lengths: np.ndarray,
    *,
    max_seq_length: int,
    short_seq_prob: float,
    rng: np.random.Generator,
) -> Pairs:
    """Pair up every sentence of the documents.

    Args:
        sentence_counts: (D,) sentences of each document, at least 1.
        sentence_lengths: (S,) tokens of each sentence, at least 1.
        max_seq_length: upper limit of an example, the three structural tokens included.
        short_seq_prob: share of pairs with a random, shorter target length.
        rng: every draw comes from here; the same state gives the same pairs.

    Raises:
        SingleDocumentError: fewer than two documents.
    """
    if len(sentence_counts) < 2:
        raise SingleDocumentError(
            f"next sentence pairs need at least 2 documents, here is {len(sentence_counts)}: "
            "a random second part must come from another document"
        )
    room = max_seq_length - STRUCTURAL_TOKENS
    rows, forced_random = _choose_sentences(sentence_counts, sentence_lengths, room, short_seq_prob, rng)
    return _finish(rows, sentence_lengths, room, rng, forced_random)


def build_ordered_pairs(
    sentence_counts: np.ndarray,
    sentence_lengths: np.ndarray,
    *,
    max_seq_length: int,
    short_seq_prob: float,
    rng: np.random.Generator,
) -> Pairs:
    """ALBERT's pairs: every two parts that follow each other, in order or swapped. Arguments as `build_pairs`.

    A document of one sentence, or a last sentence left alone, makes no pair; such tokens count as truncated.
    """
    room = max_seq_length - STRUCTURAL_TOKENS
    before = _integers(np.concatenate([[0], np.cumsum(sentence_lengths)]))
    draws = _draws(rng)
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    i = alone = 0
    for document, document_end in enumerate(np.cumsum(sentence_counts).tolist()):
        while document_end - i >= 2:
            short, length, split, toss, _, _ = next(draws)
            target = 2 + int(length * (room - 1)) if short < short_seq_prob else room
            end = max(i + 2, min(bisect_left(before, before[i] + target, i + 1, document_end), document_end))
            middle = i + 1 + int(split * (end - i - 1))
            first, second = (document, i, middle), (document, middle, end)
            rows.append((*first, *second, IN_ORDER) if toss < 0.5 else (*second, *first, SWAPPED))
            i = end
        alone += before[document_end] - before[i]
        i = document_end
    pairs = _finish(np.array(rows, np.int64).reshape(-1, 7).T, sentence_lengths, room, rng, 0)
    return replace(pairs, truncated=pairs.truncated + alone)


def _finish(
    rows: np.ndarray, sentence_lengths: np.ndarray, room: int, rng: np.random.Generator, forced_random: int
) -> Pairs:
    """Sentences to tokens, and truncation."""
    token_starts = np.concatenate([[0], np.cumsum(sentence_lengths)])
    a_document, a_first, a_end, b_document, b_first, b_end, labels = rows
    a_starts, b_starts = token_starts[a_first], token_starts[b_first]
    a_lengths, b_lengths = token_starts[a_end] - a_starts, token_starts[b_end] - b_starts
    cut_a, cut_b = _truncation(a_lengths, b_lengths, room)
    # Each cut token leaves from the front or the back with equal chance.
    front_a, front_b = rng.binomial(cut_a, 0.5), rng.binomial(cut_b, 0.5)
    return Pairs(
        a_starts=a_starts + front_a,
        a_lengths=a_lengths - cut_a,
        b_starts=b_starts + front_b,
        b_lengths=b_lengths - cut_b,
        labels=labels.astype(np.int8),
        a_documents=a_document,
        b_documents=b_document,
        truncated=int(cut_a.sum() + cut_b.sum()),
        forced_random=forced_random,
    )


def _choose_sentences(
    sentence_counts: np.ndarray,
    sentence_lengths: np.ndarray,
    room: int,
    short_seq_prob: float,
    rng: np.random.Generator,
) -> tuple[np.ndarray, int]:
    """Which sentences make each pair: (7, E) rows of [A document, first, end, B document, first, end, label].

    Where a pair begins depends on the pair before, so that is a loop; what it takes B from is worked out for all at once.
    """
    document_ends = np.cumsum(sentence_counts)
    # before[i] is the number of tokens before sentence i, so that a chunk is one search, not a loop over sentences.
    before = np.concatenate([[0], np.cumsum(sentence_lengths)])
    full_ends = _integers(
        np.minimum(np.searchsorted(before, before[:-1] + room), np.repeat(document_ends, sentence_counts))
    )
    before_each = _integers(before)
    blocks: list[np.ndarray] = []
    draws = _kept_draws(rng, blocks)
    firsts, a_ends, chunk_ends, labels = (array("q") for _ in range(4))
    owed = forced_random = 0
    coin = RANDOM
    antithetic = False
    i = 0
    for document_end in document_ends.tolist():
        while i < document_end:
            short, length, split, toss = next(draws)
            if short < short_seq_prob:
                target = 2 + int(length * (room - 1))
                chunk_end = bisect_left(before_each, before_each[i] + target, i + 1, document_end)
            else:
                chunk_end = full_ends[i]
            sentences = chunk_end - i
            # Tosses come in opposite pairs: the labels of a bucket balance exactly, not only on average.
            coin = 1 - coin if antithetic else int(toss < 0.5)
            antithetic = not antithetic
            label = coin
            if sentences == 1:
                a_end = chunk_end
                if label == NEXT:
                    owed += 1
                    forced_random += 1
                label = RANDOM
            else:
                a_end = i + 1 + int(split * (sentences - 1))
                if label == RANDOM and owed:
                    owed -= 1
                    label = NEXT
            firsts.append(i)
            a_ends.append(a_end)
            chunk_ends.append(chunk_end)
            labels.append(label)
            i = chunk_end if label == NEXT else a_end  # of a random pair, what the chunk held beyond A is put back
    first, a_end_of, chunk_end_of, label_of = (
        np.frombuffer(part, np.int64) if part else np.zeros(0, np.int64)
        for part in (firsts, a_ends, chunk_ends, labels)
    )
    document = np.searchsorted(document_ends, first, side="right")
    short_E, length_E, _, partner_E, place_E, _ = np.concatenate(blocks)[: len(first)].T
    targets = np.where(short_E < short_seq_prob, 2 + (length_E * (room - 1)).astype(np.int64), room)
    other = (partner_E * (len(document_ends) - 1)).astype(np.int64)
    other += other >= document
    b_first = document_ends[other] - sentence_counts[other]
    b_first += (place_E * sentence_counts[other]).astype(np.int64)
    wanted = np.maximum(1, targets - (before[a_end_of] - before[first]))
    b_end = np.minimum(np.searchsorted(before, before[b_first] + wanted), document_ends[other])
    follows = label_of == NEXT
    b_document = np.where(follows, document, other)
    b_first = np.where(follows, a_end_of, b_first)
    b_end = np.where(follows, chunk_end_of, b_end)
    return np.stack([document, first, a_end_of, b_document, b_first, b_end, label_of]), forced_random


def _integers(values: np.ndarray) -> array[int]:
    """For loops and searches in Python: as fast as a list and a fifth of its memory."""
    return array("q", values.astype(np.int64, copy=False).tobytes())


def _kept_draws(rng: np.random.Generator, blocks: list[np.ndarray]) -> Iterator[list[float]]:
    """The columns 0, 1, 2 and 5 of rows of six uniform numbers; the whole rows are appended to `blocks`."""
    while True:
        blocks.append(rng.random((_DRAWS, 6)))
        yield from blocks[-1][:, (0, 1, 2, 5)].tolist()


def _draws(rng: np.random.Generator) -> Iterator[list[float]]:
    """Rows of six uniform numbers, drawn many at a time."""
    while True:
        yield from rng.random((_DRAWS, 6)).tolist()


def _truncation(a_lengths: np.ndarray, b_lengths: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens to cut from A and from B, (E,) each: always from the longer part, one by one, from B where they tie.

    Lengths 100 and 40 with room 120 give cuts 20 and 0; 100 and 90 with room 120 give 40 and 30.
    """
    excess = np.maximum(a_lengths + b_lengths - room, 0)
    difference = a_lengths - b_lengths
    from_longer = np.minimum(excess, np.abs(difference))
    rest = excess - from_longer
    cut_a = np.where(difference > 0, from_longer, 0) + rest // 2
    return cut_a, excess - cut_a
