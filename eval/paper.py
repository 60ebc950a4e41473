"""What BERT-base reached, to be printed beside our scores: arXiv 1810.04805. Per cent."""

from __future__ import annotations

from collections.abc import Mapping

BERT_BASE: Mapping[tuple[str, str, str], tuple[float, str]] = {
    ("CoLA", "dev", "mcc"): (52.1, "test"),
    ("SST-2", "dev", "accuracy"): (92.7, "dev"),
    ("MRPC", "dev", "accuracy"): (86.7, "dev"),
    ("MRPC", "dev", "f1"): (88.9, "test"),
    ("STS-B", "dev", "spearman"): (85.8, "test"),
    ("QQP", "dev", "f1"): (71.2, "test"),
    ("MNLI", "dev_matched", "accuracy"): (84.4, "dev"),
    ("MNLI", "dev_mismatched", "accuracy"): (83.4, "test"),
    ("QNLI", "dev", "accuracy"): (88.4, "dev"),
    ("RTE", "dev", "accuracy"): (66.4, "test"),
    ("SQuAD1.1", "dev", "f1"): (88.5, "dev"),
    ("SQuAD1.1", "dev", "exact"): (80.8, "dev"),
    ("SWAG", "dev", "accuracy"): (81.6, "dev"),
    ("CoNLL", "dev", "f1"): (96.4, "dev"),
    ("CoNLL", "test", "f1"): (92.4, "test"),
    ("CoNLL-embeddings", "dev", "f1"): (91.0, "dev"),
    ("CoNLL-second-to-last", "dev", "f1"): (95.6, "dev"),
    ("CoNLL-last", "dev", "f1"): (94.9, "dev"),
    ("CoNLL-weighted-last-four", "dev", "f1"): (95.9, "dev"),
    ("CoNLL-concat-last-four", "dev", "f1"): (96.1, "dev"),
    ("CoNLL-weighted-all", "dev", "f1"): (95.5, "dev"),
}
"""(task, split, metric) -> (score, the split that the paper scored): tables 1, 2, 4, 5 and 7. GLUE's test scores stand
in where the paper has none on dev; SQuAD 2.0 it gives for BERT-large only."""


def paper_score(task: str, split: str, metric: str) -> str:
    """In words: `66.4 (test)`; a dash where the paper has none."""
    found = BERT_BASE.get((task, split, metric))
    if found is None:
        return "–"
    score, where = found
    return f"{score}" if where in split else f"{score} ({where})"
