"""Metrics against hand-computed literals, and labels by name."""

from __future__ import annotations

import numpy as np
import pytest

from eval.labels import far_below_chance, label_outputs
from eval.metrics import Score, baseline, compute, f1, mcc, pearson, spearman, summarise
from eval.tasks import TASKS, TaskError


def test_r32_correlations() -> None:
    gold, predicted = np.array([0, 1, 2.5, 5]), np.array([0.1, 1.2, 2, 4])
    assert pearson(gold, predicted).value == pytest.approx(0.9953, abs=5e-5)
    assert spearman(gold, predicted).value == pytest.approx(1.0)


def test_r32_undefined_correlations_are_flagged_and_never_averaged() -> None:
    constant = compute(("pearson", "spearman"), np.array([1.0, 2, 3, 4]), np.full(4, 2.0))
    assert constant == {name: Score(None, "constant predictions") for name in ("pearson", "spearman")}
    assert pearson(np.array([1.0]), np.array([1.0])).value is None
    assert pearson(np.array([1.0, 2.0]), np.array([1.0, np.nan])) == Score(None, "predictions are not finite")
    summary = summarise([0.5, None, float("nan"), 0.7])
    assert (summary.mean, summary.n, summary.left_out) == (pytest.approx(0.6), 2, 2)
    assert summary.sd == pytest.approx(0.1414, abs=1e-4)
    assert summarise([None]).mean is None


def test_r34_matthews_and_f1() -> None:
    gold = np.array([1, 1, 0, 0, 1])
    assert mcc(gold, np.array([1, 0, 0, 1, 1])).value == pytest.approx(0.1667, abs=5e-5)
    assert mcc(gold, np.ones(5, dtype=int)).value == 0.0
    scores = compute(TASKS["MRPC"].metrics, np.array([1, 1, 0, 1]), np.array([1, 0, 0, 1]))
    assert list(scores) == ["f1", "accuracy"]
    assert (scores["f1"].value, scores["accuracy"].value) == (pytest.approx(0.8), 0.75)
    assert f1(np.array([1, 1]), np.array([0, 0])).value == 0.0


def test_r34_headlines_and_separate_mnli_splits() -> None:
    assert TASKS["CoLA"].metrics[0] == "mcc"
    assert TASKS["QQP"].metrics == TASKS["MRPC"].metrics == ("f1", "accuracy")
    assert TASKS["MNLI"].dev_splits == ("dev_matched", "dev_mismatched")


def test_baseline_ignores_the_input() -> None:
    assert baseline(("accuracy",), np.array([1, 1, 0]), np.array([1, 0, 0, 0]))["accuracy"].value == 0.25
    # A tie goes to the class that does best.
    assert baseline(("accuracy",), np.array([0, 1, 2]), np.array([0, 2, 2, 1]))["accuracy"].value == 0.5
    assert baseline(("pearson",), np.array([1.0, 3.0]), np.array([1.0, 2.0]))["pearson"].undefined


def test_as_many_predictions_as_labels() -> None:
    with pytest.raises(ValueError, match="3 labels and 2 predictions"):
        compute(("accuracy",), np.arange(3), np.arange(2))


@pytest.mark.parametrize(
    ("id2label", "order"),
    [
        ({0: "contradiction", 1: "entailment", 2: "neutral"}, [1, 2, 0]),
        ({0: "Entailment", 1: "NEUTRAL", 2: "contradiction"}, [0, 1, 2]),
        ({0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}, [0, 1, 2]),
    ],
)
def test_r35_a_perfect_classifier_scores_one_in_any_label_order(id2label: dict[int, str], order: list[int]) -> None:
    names = TASKS["MNLI"].labels
    outputs = label_outputs(id2label, names, task="MNLI")
    assert outputs.tolist() == order
    gold = np.array([0, 1, 2])
    logits = np.full((3, 3), -1.0)
    logits[np.arange(3), np.array(order)[gold]] = 5.0  # the perfect classifier, in its own order of outputs
    assert compute(("accuracy",), gold, logits[:, outputs].argmax(1))["accuracy"].value == 1.0


def test_r35_wrong_heads_are_refused_and_swapped_labels_warned_of() -> None:
    with pytest.raises(TaskError, match=r"has 3 labels .* the model has 2"):
        label_outputs({0: "entailment", 1: "neutral"}, TASKS["MNLI"].labels, task="MNLI")
    with pytest.raises(TaskError, match=r"needs the labels .* the model's are named"):
        label_outputs({0: "yes", 1: "no", 2: "maybe"}, TASKS["MNLI"].labels, task="MNLI")
    assert far_below_chance(40, 277, 2) and not far_below_chance(131, 277, 2)
