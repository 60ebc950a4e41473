"""NSP pairs: layout, labels, partners, truncation (R09, R10, R11)."""

from __future__ import annotations

import numpy as np
import pytest

from data_pipeline.pairs import NEXT, RANDOM, Pairs, SingleDocumentError, _truncation, build_pairs


def pairs_of(documents: list[list[int]], *, max_seq_length: int = 128, short: float = 0.1, seed: int = 0) -> Pairs:
    """Pairs of documents given as lists of sentence lengths."""
    return build_pairs(
        np.array([len(document) for document in documents]),
        np.array([length for document in documents for length in document]),
        max_seq_length=max_seq_length,
        short_seq_prob=short,
        rng=np.random.default_rng(seed),
    )


def corpus(documents: int, seed: int = 0) -> list[list[int]]:
    """Documents of 1 to 40 sentences of 1 to 50 tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 51, rng.integers(1, 41)).tolist() for _ in range(documents)]


def document_of(documents: list[list[int]], tokens: np.ndarray) -> np.ndarray:
    """The document that each token position lies in."""
    return np.searchsorted(np.cumsum([sum(document) for document in documents]), tokens, side="right")


def test_r09_random_partner_is_another_document() -> None:
    documents = corpus(60)
    pairs = pairs_of(documents)
    assert len(pairs.labels) > 300
    a_document, b_document = document_of(documents, pairs.a_starts), document_of(documents, pairs.b_starts)
    b_last = document_of(documents, pairs.b_starts + pairs.b_lengths - 1)
    random = pairs.labels == RANDOM
    assert 0 < random.sum() < len(random)
    assert (a_document[random] != b_document[random]).all()
    assert (a_document[~random] == b_document[~random]).all()
    assert (b_document == b_last).all()
    assert (pairs.a_documents == a_document).all()
    assert (pairs.b_documents == b_document).all()


def test_r09_single_document_is_an_error() -> None:
    with pytest.raises(SingleDocumentError, match="at least 2 documents, here is 1"):
        pairs_of([[2, 1, 2]])


def test_r09_two_documents_of_one_sentence() -> None:
    pairs = pairs_of([[3], [4]])
    assert pairs.labels.tolist() == [RANDOM, RANDOM]
    assert sorted(zip(pairs.a_lengths.tolist(), pairs.b_lengths.tolist(), strict=True)) == [(3, 4), (4, 3)]


@pytest.mark.parametrize("seed", range(50))
def test_r10_two_documents_left_pair_for_every_seed(seed: int) -> None:
    pairs = pairs_of([[2], [3]], seed=seed)
    assert len(pairs.labels) == 2
    assert pairs.a_lengths.min() >= 1
    assert pairs.b_lengths.min() >= 1


def test_r11_long_sentence_is_truncated_and_counted() -> None:
    fronts = set()
    for seed in range(20):
        pairs = pairs_of([[1000], [3]], seed=seed)
        assert (pairs.a_lengths + pairs.b_lengths + 3 <= 128).all()
        assert pairs.a_lengths.min() >= 1
        assert pairs.b_lengths.min() >= 1
        total = int((pairs.a_lengths + pairs.b_lengths).sum())
        assert pairs.truncated == 2 * 1003 - total > 1700
        long = pairs.a_lengths > 3
        fronts.add(int(pairs.a_starts[long][0]))
        assert (pairs.a_starts[long] + pairs.a_lengths[long] <= 1000).all()
    assert len(fronts) > 5  # cut at the front and at the back


@pytest.mark.parametrize(
    ("a", "b", "room", "cuts"),
    [
        (100, 40, 120, (20, 0)),
        (40, 100, 120, (0, 20)),
        (100, 90, 120, (40, 30)),
        (70, 70, 125, (7, 8)),
        (5, 5, 125, (0, 0)),
    ],
)
def test_truncation_takes_from_the_longer_part(a: int, b: int, room: int, cuts: tuple[int, int]) -> None:
    cut_a, cut_b = _truncation(np.array([a]), np.array([b]), room)
    longer_first = [a, b]  # the definition, one token at a time
    while sum(longer_first) > room:
        longer_first[0 if longer_first[0] > longer_first[1] else 1] -= 1
    assert [a - int(cut_a[0]), b - int(cut_b[0])] == longer_first
    assert (int(cut_a[0]), int(cut_b[0])) == cuts


def test_next_pairs_are_adjacent_and_nothing_is_lost() -> None:
    documents = corpus(40, seed=3)
    pairs = pairs_of(documents, max_seq_length=4096, short=0.0)
    following = pairs.labels == NEXT
    assert following.any()
    assert (pairs.a_starts + pairs.a_lengths == pairs.b_starts)[following].all()
    assert pairs.truncated == 0
    covered = np.zeros(sum(map(sum, documents)), int)
    for start, length in zip(pairs.a_starts, pairs.a_lengths, strict=True):
        covered[start : start + length] += 1
    for start, length in zip(pairs.b_starts[following], pairs.b_lengths[following], strict=True):
        covered[start : start + length] += 1
    assert (covered == 1).all()  # unused sentences are put back, none is used twice


def test_labels_balance_in_spite_of_single_sentences() -> None:
    pairs = pairs_of(corpus(400, seed=5))
    assert pairs.forced_random > 50
    assert abs(pairs.labels.mean() - 0.5) < 0.005


def test_short_targets() -> None:
    documents = [[5] * 400 for _ in range(10)]
    plain = pairs_of(documents, short=0.0)
    short = pairs_of(documents, short=0.5)
    length = short.a_lengths + short.b_lengths
    assert (plain.a_lengths + plain.b_lengths >= 115).mean() > 0.9
    assert 0.35 < (length < 110).mean() < 0.6


def test_same_seed_same_pairs() -> None:
    documents = corpus(30)
    one, same, other = pairs_of(documents, seed=1), pairs_of(documents, seed=1), pairs_of(documents, seed=2)
    assert (one.b_starts == same.b_starts).all()
    assert (one.a_lengths == same.a_lengths).all()
    assert one.b_starts.tolist() != other.b_starts.tolist()
