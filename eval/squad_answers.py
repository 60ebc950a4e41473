"""Span logits to answer texts, as arXiv 1810.04805 sections 4.2 and 4.3 have it.

Legend: `W` windows, `N` ids of all windows. Scores are sums of a start and an end logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from data_pipeline.tokenizer import Tokenizer
from eval.metrics import Score
from eval.problems import SpanProblem
from eval.squad_data import SquadData, SquadExample
from eval.squad_metrics import score_v1, score_v2
from eval.squad_windows import Windows, answer_positions, make_windows

N_BEST = 20
"""Starts and ends looked at in each window, and answers kept of each question."""
MAX_ANSWER = 30
"""Most tokens of an answer, as in the original BERT code."""


@dataclass(kw_only=True)
class SquadProblem(SpanProblem):
    """Windows of questions with the places of their answers.

    Attributes:
        windows: what `encoded` was cut from.
        examples: the questions.
    """

    windows: Windows
    examples: Sequence[SquadExample]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model says to one question.

    Attributes:
        n_best: (text, score), best first, each text once; never empty.
        null_odds: score of "no answer" minus that of the best text; the lowest over the windows counts.
    """

    n_best: list[tuple[str, float]]
    null_odds: float

    @property
    def text(self) -> str:
        """The best text, whatever "no answer" scores."""
        return self.n_best[0][0]


def squad_problem(tokenizer: Tokenizer, data: SquadData, max_length: int, overlap: int) -> SquadProblem:
    """Windows and answer places of a file of questions.

    Raises:
        TaskError: no room for context, or an overlap that does not fit.
    """
    windows = make_windows(tokenizer, data.examples, max_length, overlap)
    starts, ends = answer_positions(windows, data.examples)
    return SquadProblem(encoded=windows.encoded, starts=starts, ends=ends, windows=windows, examples=data.examples)


def decode(windows: Windows, examples: Sequence[SquadExample], logits: np.ndarray) -> dict[str, Answer]:
    """The best answers of every question.

    A span lies in the context, ends at most `MAX_ANSWER` tokens after its start, and starts at a token for which the
    window is the one with the most context on both sides.

    Args:
        windows: of the examples.
        examples: the questions.
        logits: (N, 2), start and end.
    """
    found: list[list[tuple[float, int, int]]] = [[] for _ in examples]
    nulls = np.full(len(examples), np.inf)
    offsets, lengths = windows.encoded.offsets, windows.encoded.lengths
    owned = owned_tokens(windows)
    for window, number in enumerate(windows.example):
        begin = int(offsets[window])
        nulls[number] = min(nulls[number], float(logits[begin].sum()))
        begin += int(windows.question_tokens[window]) + 2
        pieces = int(lengths[window] - windows.question_tokens[window]) - 3
        start, end = logits[begin : begin + pieces].astype(np.float64).T
        firsts = np.argsort(-np.where(owned[window], start, -np.inf), kind="stable")[:N_BEST]
        lasts = np.argsort(-end, kind="stable")[:N_BEST]
        scores = start[firsts][:, None] + end[lasts][None]
        span = lasts[None] - firsts[:, None]
        usable = (span >= 0) & (span < MAX_ANSWER) & owned[window][firsts][:, None]
        rows, columns = np.nonzero(usable)
        order = np.argsort(-scores[rows, columns], kind="stable")[:N_BEST]
        context, shift = windows.contexts[number], windows.first[window]
        for row, column in zip(rows[order], columns[order], strict=True):
            left, right = context.starts[firsts[row] + shift], context.ends[lasts[column] + shift]
            found[number].append((float(scores[row, column]), int(left), int(right)))
    return {
        example.id: _answer(example.context, spans, float(null))
        for example, spans, null in zip(examples, found, nulls, strict=True)
    }


def _answer(context: str, spans: list[tuple[float, int, int]], null: float) -> Answer:
    best: dict[str, float] = {}
    for score, left, right in sorted(spans, key=lambda span: -span[0]):
        best.setdefault(context[left:right], score)
        if len(best) == N_BEST:
            break
    n_best = list(best.items()) or [("", null)]
    return Answer(n_best, null - n_best[0][1])


def owned_tokens(windows: Windows) -> list[np.ndarray]:
    """For each window, which of its context tokens it may answer for: of all windows that hold a token, the one where
    the smaller of its contexts to the left and to the right is largest; longer windows win, then earlier ones.

    Worked example: windows [0, 114) and [50, 157): tokens up to 81 belong to the first one.
    """
    pieces = windows.encoded.lengths - windows.question_tokens - 3
    owned = [np.ones(int(count), dtype=bool) for count in pieces]
    borders = np.flatnonzero(np.diff(windows.example, prepend=-1, append=-1))
    for low, high in pairwise(borders.tolist()):
        if high - low == 1:
            continue
        tokens = np.arange(int(windows.first[high - 1] + pieces[high - 1]))
        left = tokens - windows.first[low:high, None]
        right = windows.first[low:high, None] + pieces[low:high, None] - 1 - tokens
        context = np.minimum(left, right) + 0.01 * pieces[low:high, None]
        best = np.where((left >= 0) & (right >= 0), context, -np.inf).argmax(0)
        for window in range(low, high):
            first = int(windows.first[window])
            owned[window] = best[first : first + int(pieces[window])] == window - low
    return owned


def predictions(answers: dict[str, Answer], version: str, threshold: float = 0.0) -> dict[str, str]:
    """Question id to text as the official programs read it; for 2.0 "" where the null odds are above the threshold."""
    return {
        key: "" if version == "2.0" and answer.null_odds > threshold else answer.text for key, answer in answers.items()
    }


def score_answers(data: SquadData, answers: dict[str, Answer]) -> tuple[dict[str, Score], dict[str, float]]:
    """The task's metrics as fractions, and all official values.

    For 2.0 the headline takes the threshold 0, which nothing was tuned on; `best_f1` is the paper's way, with the
    threshold that is best on these very questions. The search for it sees the text of every question.
    """
    given = predictions(answers, data.version)
    if data.version == "1.1":
        official = score_v1(data.questions(), given)
        return {name: Score(official[key] / 100) for name, key in (("f1", "f1"), ("exact", "exact_match"))}, official
    official = score_v2(data.questions(), given)
    texts = {key: answer.text for key, answer in answers.items()}
    odds = {key: answer.null_odds for key, answer in answers.items()}
    searched = score_v2(data.questions(), texts, odds)
    official |= {key: value for key, value in searched.items() if key.startswith("best_")}
    names = ("f1", "exact", "best_f1", "best_exact")
    return {name: Score(official[name] / 100) for name in names}, official


def baseline_answers(data: SquadData) -> dict[str, Score]:
    """Scores of "no answer" to every question: 0 in version 1.1, the share of unanswerable questions in 2.0."""
    none = {example.id: Answer([("", 0.0)], 1.0) for example in data.examples}
    return score_answers(data, none)[0]


def answer_files(answers: dict[str, Answer], version: str) -> dict[str, Any]:
    """The JSON files that the original BERT code writes, by name."""
    files: dict[str, Any] = {
        "predictions.json": predictions(answers, version),
        "nbest_predictions.json": {
            key: [{"text": text, "score": round(score, 6)} for text, score in answer.n_best]
            for key, answer in answers.items()
        },
    }
    if version == "2.0":
        files["null_odds.json"] = {key: answer.null_odds for key, answer in answers.items()}
    return files
