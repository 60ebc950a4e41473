"""Tagged sentences as flat examples with their neighbours around them (arXiv 1810.04805, section 5.3).

The paper gives each sentence "the maximal document context". Here sentences of one document share an example as long as
they fit, so that every word has its context and is still predicted exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_pipeline.tokenizer import Tokenizer
from eval.conll_data import Sentences, to_iob2
from eval.packing import Encoded, ranges
from eval.problems import TagProblem
from eval.tasks import TaskError

SPECIALS = 2


@dataclass(kw_only=True)
class SentenceProblem(TagProblem):
    """Sentences as rows of ids.

    Attributes:
        first_pieces: (words,) int64, the id that answers for each word, in the order of the words.
        sentences: what was encoded.
    """

    first_pieces: np.ndarray
    sentences: Sentences


def tag_problem(tokenizer: Tokenizer, sentences: Sentences, max_length: int) -> SentenceProblem:
    """Encode sentences, word by word; the first piece of a word carries its tag.

    A word of which normalisation leaves nothing is one unknown token. A sentence longer than an example is continued in
    the next one.

    Raises:
        TaskError: no room for a word.
    """
    room = max_length - SPECIALS
    if room < 1:
        raise TaskError(f"max_length {max_length} leaves no room for a word beside {SPECIALS} special tokens")
    words = [word for sentence in sentences.words for word in sentence]
    ids, lengths = tokenizer.encode_flat(words)
    starts = np.cumsum(lengths) - lengths
    kept = np.clip(lengths, 1, room)
    pieces = np.full(int(kept.sum()), tokenizer.unk_id, dtype=np.int32)
    places = np.cumsum(kept) - kept
    some = lengths > 0
    pieces[ranges(places[some], kept[some])] = ids[ranges(starts[some], kept[some])]

    borders = np.array(list(_examples(sentences, kept, room)), dtype=np.int64)
    sizes = np.add.reduceat(kept, borders)
    example = np.repeat(np.arange(len(borders)), np.diff(np.append(borders, len(words))))
    offsets = np.concatenate([[0], np.cumsum(sizes + SPECIALS)]).astype(np.int64)
    first_pieces = places + SPECIALS * example + 1
    flat = np.empty(int(offsets[-1]), dtype=np.int32)
    flat[offsets[:-1]], flat[offsets[1:] - 1] = tokenizer.cls_id, tokenizer.sep_id
    flat[ranges(first_pieces, kept)] = pieces
    number = {name: label for label, name in enumerate(sentences.label_names)}
    tags = np.full(len(flat), -1, dtype=np.int64)
    tags[first_pieces] = [number[tag] for sentence in sentences.tags for tag in sentence]
    encoded = Encoded(
        ids=flat, offsets=offsets, segment_a=np.diff(offsets), truncated=int((lengths - kept)[lengths > room].sum())
    )
    return SentenceProblem(
        encoded=encoded,
        tags=tags,
        outputs=len(sentences.label_names),
        first_pieces=first_pieces,
        sentences=sentences,
    )


def _examples(sentences: Sentences, pieces: np.ndarray, room: int) -> Iterator[int]:
    """Number of the first word of each example."""
    word, filled, document = 0, 0, -1
    for number, sentence in enumerate(sentences.words):
        sizes = pieces[word : word + len(sentence)]
        if sentences.documents[number] != document or filled + sizes.sum() > room:
            document, filled = sentences.documents[number], 0
            yield word
        for place, size in enumerate(sizes):
            if filled + size > room:
                yield word + place
                filled = 0
            filled += int(size)
        word += len(sentence)


def decode_tags(problem: SentenceProblem, logits: np.ndarray) -> list[list[str]]:
    """IOB2 tags of every word, sentence by sentence, from the logits of all ids."""
    names = problem.sentences.label_names
    chosen = iter(logits[problem.first_pieces].argmax(1))
    return [to_iob2([names[next(chosen)] for _ in sentence]) for sentence in problem.sentences.words]
