"""Task metrics through scikit-learn and scipy, with undefined values said rather than averaged in.

Scores are fractions (0 to 1, correlations -1 to 1), not percentages.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from sklearn import metrics as sk


@dataclass(frozen=True, slots=True)
class Score:
    """One metric: its value, or None and the reason why it has none."""

    value: float | None
    undefined: str = ""


def mcc(gold: np.ndarray, predicted: np.ndarray) -> Score:
    """Matthews correlation (CoLA; the diagnostic's R3 for three classes). 0 for constant predictions, as GLUE has it."""
    return Score(float(sk.matthews_corrcoef(gold, predicted)))


def accuracy(gold: np.ndarray, predicted: np.ndarray) -> Score:
    """Share of equal labels."""
    return Score(float(sk.accuracy_score(gold, predicted)))


def f1(gold: np.ndarray, predicted: np.ndarray) -> Score:
    """F1 of the positive class (id 1), as GLUE has it for MRPC and QQP; 0 where nothing is predicted positive."""
    return Score(float(sk.f1_score(gold, predicted, pos_label=1, average="binary", zero_division=0)))


def pearson(gold: np.ndarray, predicted: np.ndarray) -> Score:
    """Linear correlation; undefined for constant input."""
    return _correlation(gold, predicted, lambda a, b: stats.pearsonr(a, b).statistic)


def spearman(gold: np.ndarray, predicted: np.ndarray) -> Score:
    """Rank correlation; undefined for constant input."""
    return _correlation(gold, predicted, lambda a, b: stats.spearmanr(a, b).statistic)


def _correlation(gold: np.ndarray, predicted: np.ndarray, measure: Callable[..., float]) -> Score:
    if len(gold) < 2:
        return Score(None, f"a correlation needs two examples, got {len(gold)}")
    if not np.isfinite(predicted).all():
        return Score(None, "predictions are not finite")
    for name, values in (("predictions", predicted), ("labels", gold)):
        if np.ptp(values) == 0:
            return Score(None, f"constant {name}")
    value = float(measure(gold, predicted))
    return Score(value) if np.isfinite(value) else Score(None, "not finite")


METRICS: Mapping[str, Callable[[np.ndarray, np.ndarray], Score]] = {
    "mcc": mcc,
    "accuracy": accuracy,
    "f1": f1,
    "pearson": pearson,
    "spearman": spearman,
}
"""Metrics by the name that a task row uses."""


def compute(names: Sequence[str], gold: np.ndarray, predicted: np.ndarray) -> dict[str, Score]:
    """The named metrics of one split, headline first.

    Raises:
        ValueError: different numbers of labels and predictions, or none.
    """
    if len(gold) != len(predicted) or not len(gold):
        raise ValueError(f"{len(gold)} labels and {len(predicted)} predictions; expected as many of both, at least one")
    return {name: METRICS[name](gold, predicted) for name in names}


@dataclass(frozen=True, slots=True)
class Summary:
    """Several runs of one task: mean and sample standard deviation over the runs whose score is defined.

    Attributes:
        mean: None where no run has a score.
        sd: None for fewer than two.
        n: runs that count.
        left_out: runs without a finite score.
    """

    mean: float | None
    sd: float | None
    n: int
    left_out: int


def summarise(values: Sequence[float | None]) -> Summary:
    """Mean and standard deviation without the undefined values, whose number is given beside."""
    defined = [value for value in values if value is not None and np.isfinite(value)]
    mean = statistics.fmean(defined) if defined else None
    sd = statistics.stdev(defined) if len(defined) > 1 else None
    return Summary(mean, sd, len(defined), len(values) - len(defined))


def baseline(names: Sequence[str], train_labels: np.ndarray, gold: np.ndarray) -> dict[str, Score]:
    """What a model that ignores its input reaches: the training set's majority class, or its mean score.

    Where classes tie for the majority, the one that does best counts, so that the baseline is not weak by accident.
    """
    if np.issubdtype(gold.dtype, np.floating):
        return compute(names, gold, np.full(len(gold), train_labels.mean()))
    counts = np.bincount(train_labels)
    largest = np.flatnonzero(counts == counts.max())
    constant = largest[np.argmax([(gold == label).sum() for label in largest])]
    return compute(names, gold, np.full(len(gold), constant, dtype=gold.dtype))
