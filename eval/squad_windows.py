"""Questions over long contexts as overlapping windows `[CLS] question [SEP] piece of context [SEP]`.

Legend: `W` windows, `C` tokens of a context. Offsets count code points of the untouched context.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from data_pipeline.tokenizer import Tokenizer
from eval.packing import Encoded
from eval.squad_data import SquadExample
from eval.tasks import TaskError

MAX_QUESTION = 64
"""Most tokens of a question, as in the original BERT code; the rest is cut."""
SPECIALS = 3
# Text between these borders never shares a token with its neighbour, so atoms can be tokenized one by one.
_ATOM = re.compile(r"[^\W_]+|[^\s]", re.UNICODE)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as ids with their places.

    Attributes:
        ids: (C,) int32.
        starts, ends: (C,) int64, code points; a token is `text[start:end]`.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """All windows of a set of questions.

    Attributes:
        encoded: W rows.
        example: (W,) int64, number of the question.
        first: (W,) int64, context token that the window's piece begins with.
        question_tokens: (W,) int64, so that context token c stands at `question_tokens + 2 + c - first`.
        contexts: tokens of each question's context.
    """

    encoded: Encoded
    example: np.ndarray
    first: np.ndarray
    question_tokens: np.ndarray
    contexts: list[Tokens]


def window_spans(context: int, room: int, overlap: int) -> list[tuple[int, int]]:
    """Pieces [start, end) of a context that cover each of its tokens, two neighbours sharing `overlap` tokens.

    Worked example: 157 tokens, room for 114, overlap 64: [0, 114) and [50, 157).

    Raises:
        TaskError: an overlap that leaves no step forward, or a negative one.
    """
    if not 0 <= overlap < room:
        raise TaskError(
            f"an overlap of {overlap} tokens does not fit windows with room for {room}; use 0 to {room - 1}"
        )
    spans = [(0, min(room, context))]
    while spans[-1][1] < context:
        start = spans[-1][0] + room - overlap
        spans.append((start, min(start + room, context)))
    return spans


def tokenize_with_offsets(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Tokens]:
    """Ids with code point offsets. Inside a word that the tokenizer's normalisation makes longer or shorter, every
    piece stands for the whole word."""
    matches = [list(_ATOM.finditer(text)) for text in texts]
    atoms = [match.group() for found in matches for match in found]
    ids, lengths = tokenizer.encode_flat(atoms)
    begin = np.array([match.start() for found in matches for match in found], dtype=np.int64)
    end = np.array([match.end() for found in matches for match in found], dtype=np.int64)
    starts, ends = np.repeat(begin, lengths), np.repeat(end, lengths)
    sizes = np.array([len(token.removeprefix("##")) for token in tokenizer.tokens], dtype=np.int64)[ids]
    sizes[ids == tokenizer.unk_id] = 0
    owner = np.repeat(np.arange(len(atoms)), lengths)
    covered = np.bincount(owner, weights=sizes, minlength=len(atoms)).astype(np.int64)
    exact = (covered == end - begin)[owner]
    upto = np.cumsum(sizes)
    before = np.concatenate([[0], np.cumsum(covered)])[:-1]
    inner_end = starts + upto - before[owner]
    starts, ends = np.where(exact, inner_end - sizes, starts), np.where(exact, inner_end, ends)
    per_text = np.array([lengths[first : first + count].sum() for first, count in _runs(matches)], dtype=np.int64)
    borders = np.concatenate([[0], np.cumsum(per_text)])
    return [Tokens(ids[a:b], starts[a:b], ends[a:b]) for a, b in pairwise(borders)]


def _runs(matches: Sequence[Sequence[object]]) -> list[tuple[int, int]]:
    first, runs = 0, []
    for found in matches:
        runs.append((first, len(found)))
        first += len(found)
    return runs


def make_windows(tokenizer: Tokenizer, examples: Sequence[SquadExample], max_length: int, overlap: int) -> Windows:
    """Windows of all questions, question by question.

    Raises:
        TaskError: no room for context beside a question of `MAX_QUESTION` tokens, or an overlap that does not fit.
    """
    if max_length < MAX_QUESTION + SPECIALS + 1:
        raise TaskError(
            f"max_length {max_length} leaves no room for context beside a question of {MAX_QUESTION} tokens"
        )
    contexts = _per_distinct(tokenizer, [example.context for example in examples])
    flat, lengths = tokenizer.encode_flat([example.question for example in examples])
    borders = np.concatenate([[0], np.cumsum(lengths)])
    cls, sep = np.array([tokenizer.cls_id], np.int32), np.array([tokenizer.sep_id], np.int32)
    rows, sizes, segment_a, owner, first, asked = [], [], [], [], [], []
    for number, context in enumerate(contexts):
        question = flat[borders[number] : borders[number + 1]][:MAX_QUESTION]
        for start, end in window_spans(len(context.ids), max_length - SPECIALS - len(question), overlap):
            rows += [cls, question, sep, context.ids[start:end], sep]
            sizes.append(len(question) + SPECIALS + end - start)
            segment_a.append(len(question) + 2)
            owner.append(number)
            first.append(start)
            asked.append(len(question))
    encoded = Encoded(
        ids=np.concatenate(rows).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        segment_a=np.array(segment_a, dtype=np.int64),
        truncated=int(np.maximum(lengths - MAX_QUESTION, 0).sum()),
    )
    return Windows(
        encoded=encoded,
        example=np.array(owner, dtype=np.int64),
        first=np.array(first, dtype=np.int64),
        question_tokens=np.array(asked, dtype=np.int64),
        contexts=contexts,
    )


def _per_distinct(tokenizer: Tokenizer, contexts: Sequence[str]) -> list[Tokens]:
    """Each distinct context once: SQuAD asks about five questions of each paragraph."""
    distinct = list(dict.fromkeys(contexts))
    tokens = dict(zip(distinct, tokenize_with_offsets(tokenizer, distinct), strict=True))
    return [tokens[context] for context in contexts]


def answer_positions(windows: Windows, examples: Sequence[SquadExample]) -> tuple[np.ndarray, np.ndarray]:
    """Start and end token of the first gold answer in each window, counted from the window's start.

    A window without the complete answer, and an unanswerable question, have (0, 0): `[CLS]` stands for no answer.
    """
    starts, ends = np.zeros(len(windows.example), np.int64), np.zeros(len(windows.example), np.int64)
    for window, number in enumerate(windows.example):
        example, tokens = examples[number], windows.contexts[number]
        if not example.answers or 0 in example.misplaced:
            continue
        begin, end = example.starts[0], example.starts[0] + len(example.answers[0])
        touched = np.flatnonzero((tokens.ends > begin) & (tokens.starts < end))
        if not len(touched):
            continue
        shift = windows.question_tokens[window] + 2 - windows.first[window]
        last = windows.encoded.lengths[window] - 2
        low, high = touched[0] + shift, touched[-1] + shift
        if low >= windows.question_tokens[window] + 2 and high <= last:
            starts[window], ends[window] = low, high
    return starts, ends
