"""SQuAD's official scores: exact match and F1 for version 1.1, and with unanswerable questions for 2.0.

Written from the published definitions (arXiv 1606.05250, section 6.1; arXiv 1806.03822) and held against official scores
of real prediction files by a test. Scores are percentages, as the official programs print them.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Question:
    """What a question accepts: the gold answers' texts; none for an unanswerable one."""

    id: str
    answers: tuple[str, ...]


def normalise(text: str) -> str:
    """Lower-cased, without ASCII punctuation and English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> float:
    """1.0 where both are the same after normalising."""
    return float(normalise(prediction) == normalise(gold))


def token_f1(prediction: str, gold: str, *, version: str) -> float:
    """Harmonic mean of precision and recall of the tokens.

    Where one side has no token left, 2.0 asks for equality and 1.1 gives 0.
    """
    predicted, wanted = normalise(prediction).split(), normalise(gold).split()
    if version == "2.0" and not (predicted and wanted):
        return float(predicted == wanted)
    common = (Counter(predicted) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def score_v1(questions: Sequence[Question], predictions: Mapping[str, str]) -> dict[str, float]:
    """`exact_match`, `f1` and `total` of version 1.1; a missing prediction is wrong."""
    exact, f1 = _raw_scores(questions, predictions, version="1.1")
    total = len(questions)
    return {
        "exact_match": 100.0 * sum(exact.values()) / total,
        "f1": 100.0 * sum(f1.values()) / total,
        "total": total,
        "missing": sum(question.id not in predictions for question in questions),
    }


def score_v2(
    questions: Sequence[Question],
    predictions: Mapping[str, str],
    null_scores: Mapping[str, float] | None = None,
    threshold: float | None = None,
) -> dict[str, float]:
    """The official keys of version 2.0; a missing prediction is wrong.

    Args:
        questions: of the data set.
        predictions: answer text by question id, "" for no answer.
        null_scores: by question id, how strongly the model holds that there is no answer: the best thresholds over
            them are searched and reported.
        threshold: questions whose null score is above it are taken as predicted "no answer"; None applies none.
    """
    exact, f1 = _raw_scores(questions, predictions, version="2.0")
    answerable = {question.id: bool(question.answers) for question in questions}
    if threshold is not None and null_scores is not None:
        for scores in (exact, f1):
            for key in scores:
                if null_scores.get(key, 0.0) > threshold and key in predictions:
                    scores[key] = float(not answerable[key])
    out = _averages(exact, f1, list(answerable), "")
    for prefix, kind in (("HasAns_", True), ("NoAns_", False)):
        keys = [key for key in answerable if answerable[key] is kind]
        if keys:
            out |= _averages(exact, f1, keys, prefix)
    out["missing"] = sum(question.id not in predictions for question in questions)
    if null_scores is not None:
        raw = _raw_scores(questions, predictions, version="2.0")
        for name, scores in zip(("exact", "f1"), raw, strict=True):
            out[f"best_{name}"], out[f"best_{name}_thresh"] = best_threshold(
                predictions, scores, null_scores, answerable
            )
    return out


def best_threshold(
    predictions: Mapping[str, str],
    scores: Mapping[str, float],
    null_scores: Mapping[str, float],
    answerable: Mapping[str, bool],
) -> tuple[float, float]:
    """The best score over all thresholds on the null score, and the lowest threshold that reaches it.

    From "no answer to anything", questions are answered in the order of their null scores: an answerable one adds its
    score, an unanswerable one with a text loses a point.
    """
    current = best = float(sum(not kind for kind in answerable.values()))
    threshold = 0.0
    for key in sorted((key for key in answerable if key in null_scores), key=lambda key: null_scores[key]):
        if key not in scores or key not in predictions:
            continue
        current += scores[key] if answerable[key] else -float(bool(predictions[key]))
        if current > best:
            best, threshold = current, null_scores[key]
    return 100.0 * best / len(answerable), threshold


def _raw_scores(
    questions: Sequence[Question], predictions: Mapping[str, str], *, version: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Exact match and F1 of each question: the best over its gold answers."""
    exact: dict[str, float] = {}
    f1: dict[str, float] = {}
    for question in questions:
        prediction = predictions.get(question.id)
        # 2.0 leaves out gold answers of which nothing is left; without any, "" is right.
        golds = list(question.answers)
        if version == "2.0":
            golds = [gold for gold in golds if normalise(gold)] or [""]
        if prediction is None:
            exact[question.id] = f1[question.id] = 0.0
            continue
        exact[question.id] = max((exact_match(prediction, gold) for gold in golds), default=0.0)
        f1[question.id] = max((token_f1(prediction, gold, version=version) for gold in golds), default=0.0)
    return exact, f1


def _averages(
    exact: Mapping[str, float], f1: Mapping[str, float], keys: Sequence[str], prefix: str
) -> dict[str, float]:
    return {
        f"{prefix}exact": 100.0 * sum(exact[key] for key in keys) / len(keys),
        f"{prefix}f1": 100.0 * sum(f1[key] for key in keys) / len(keys),
        f"{prefix}total": len(keys),
    }
