"""Examples without a sentence objective: full sentences, packed until an example is full.

RoBERTa (arXiv:1907.11692, section 4.2): FULL-SENTENCES goes on into the next document, with a separator between;
DOC-SENTENCES stops at the end of a document.

Legend: `D` documents, `S` sentences, `E` examples.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

import numpy as np

from data_pipeline.pairs import Pairs
from data_pipeline.token_store import Documents

STRUCTURAL_TOKENS = 2
"""[CLS] sentences [SEP]"""


def with_separators(documents: Documents, sep_id: int) -> Documents:
    """The documents with a separator at the end of each, as part of its last sentence."""
    lengths = documents.sentence_lengths.copy()
    lengths[np.cumsum(documents.sentence_counts) - 1] += 1
    ends = np.cumsum(documents.token_counts())
    return replace(documents, sentence_lengths=lengths, ids=np.insert(documents.ids, ends, sep_id))


def split_long_sentences(documents: Documents, room: int) -> Documents:
    """Sentences longer than an example are cut into parts of at most `room` tokens, so that nothing is lost."""
    parts = -(-documents.sentence_lengths // room)
    if int(parts.max(initial=1)) == 1:
        return documents
    lengths = np.full(int(parts.sum()), room, np.int64)
    lengths[np.cumsum(parts) - 1] = documents.sentence_lengths - (parts - 1) * room
    owner = np.repeat(np.arange(len(documents.keys)), documents.sentence_counts)
    return replace(documents, sentence_lengths=lengths, sentence_counts=np.bincount(owner, parts).astype(np.int64))


def pack_sentences(
    documents: Documents, *, max_seq_length: int, cross_documents: bool, rng: np.random.Generator
) -> Pairs:
    """Examples of consecutive whole sentences, as many as fit.

    Args:
        documents: in the order in which they are packed; from `with_separators` where examples cross documents.
        max_seq_length: upper limit of an example, the two structural tokens included.
        cross_documents: go on into the next document. The first example then has a random length, so that dupes of
            one bucket are cut at other places.
        rng: that length comes from here.

    Returns:
        examples with a first part only, label -1. Where a part begins or ends with the separator of a document, that
        is left out: the structural one stands there.
    """
    room = max_seq_length - STRUCTURAL_TOKENS
    pieces = split_long_sentences(documents, room)
    before = [0, *np.cumsum(pieces.sentence_lengths).tolist()]
    ends = np.cumsum(pieces.sentence_counts)
    limits = [len(before) - 1] if cross_documents else ends.tolist()
    target = int(rng.integers(1, room + 1)) if cross_documents else room
    firsts: list[int] = []
    i = 0
    for limit in limits:
        while i < limit:
            firsts.append(i)
            i = max(i + 1, bisect_right(before, before[i] + target, i, limit + 1) - 1)
            target = room
    first = np.array([*firsts, len(before) - 1], np.int64)
    tokens = np.array(before, np.int64)[first]
    starts, lengths = tokens[:-1], np.diff(tokens)
    if cross_documents:
        alone = np.isin(first[:-1] + 1, ends) & (pieces.sentence_lengths[first[:-1]] == 1)
        starts = starts + alone
        lengths = np.maximum(lengths - alone - np.isin(first[1:], ends), 0)
    kept = lengths > 0
    starts, lengths = starts[kept], lengths[kept]
    owner = np.searchsorted(ends, first[:-1][kept], side="right")
    nothing = np.zeros_like(lengths)
    return Pairs(
        a_starts=starts,
        a_lengths=lengths,
        b_starts=nothing,
        b_lengths=nothing,
        labels=np.full(len(lengths), -1, np.int8),
        a_documents=owner,
        b_documents=owner,
        truncated=0,
        forced_random=0,
    )
