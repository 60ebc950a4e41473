"""Evaluation tasks as data: one row per task. Adding a task is adding a row and, at most, a reader.

File and column names are those of the official releases (https://gluebenchmark.com/tasks); recipes are the BERT paper's
(arXiv 1810.04805, sections 4.1 to 4.4 and appendix A.3). Nothing here imports torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from eval.task import Recipe, Split, Task, TaskError


def _tsv(train: str = "train.tsv", dev: str = "dev.tsv", test: str = "test.tsv") -> dict[str, Split]:
    return {"train": Split(file=train), "dev": Split(file=dev), "test": Split(file=test, labelled=False)}


_PAIR = ("sentence1", "sentence2")
_COLA_COLUMNS = ("source", "label", "star", "sentence")
_QQP_COLUMNS = ("id", "qid1", "qid2", "question1", "question2", "is_duplicate")
_STS_COLUMNS = ("genre", "filename", "year", "old_index", "score", "sentence1", "sentence2")
_NLI = ("entailment", "neutral", "contradiction")


def _squad(name: str, train: str, dev: Split, metrics: tuple[str, ...], recipe: Recipe, about: str) -> Task:
    return Task(
        name=name,
        folder="squad",
        head="span",
        reader="squad",
        splits={"train": Split(file=train), "dev": dev},
        text_columns=("question", "context"),
        label_column="answers",
        metrics=metrics,
        recipe=recipe,
        grid=(5e-5, 3e-5, 2e-5),
        about=about,
    )


_SQUAD_1 = Recipe(batch_size=32, learning_rate=5e-5, epochs=3, max_length=384)
_SQUAD_2 = Recipe(batch_size=48, learning_rate=5e-5, epochs=2, max_length=384)
_DEV_1 = Split(file="dev-v1.1.json")
_DEV_2 = Split(file="dev-v2.0.json", other_names=("dev-v2.0.rebuilt.json",))
_XQUAD = ("en", "de", "zh", "ar", "hi", "ru")
_SQUAD_ROWS = (
    _squad("SQuAD1.1", "train-v1.1.json", _DEV_1, ("f1", "exact"), _SQUAD_1, "the answer as a span of a paragraph"),
    _squad(
        "SQuAD2.0",
        "train-v2.0.json",
        _DEV_2,
        ("f1", "exact", "best_f1", "best_exact"),
        _SQUAD_2,
        "the same, half of the questions without answer; best_*: threshold chosen on dev, as in the paper",
    ),
    _squad(
        "SQuAD-44",
        "train-v1.1.part-44-articles.json",
        _DEV_1,
        ("f1", "exact"),
        _SQUAD_1,
        "SQuAD 1.1 trained on 44 of its 442 articles, scored on the full dev set",
    ),
    Task(
        name="XQuAD",
        folder="xquad",
        head="span",
        reader="squad",
        splits={language: Split(file=f"xquad.{language}.json") for language in _XQUAD},
        dev_splits=_XQUAD,
        text_columns=("question", "context"),
        label_column="answers",
        metrics=("f1", "exact"),
        recipe=_SQUAD_1,
        train_task="SQuAD1.1",
        about="SQuAD 1.1 questions in six languages, trained on the English ones",
    ),
)

NER_FEATURES = (
    "embeddings",
    "second-to-last",
    "last",
    "weighted-last-four",
    "concat-last-four",
    "weighted-all",
)
"""The feature-based rows of arXiv 1810.04805, table 7: which hidden states feed the BiLSTM."""
_NER_LABELS = ("O", *(f"{place}-{kind}" for kind in ("PER", "ORG", "LOC", "MISC") for place in "BI"))


def _ner(name: str, features: str, recipe: Recipe, grid: tuple[float, ...], about: str) -> Task:
    return Task(
        name=name,
        folder="conll2003",
        head="tagging",
        reader="conll",
        splits={
            "train": Split(file="eng.train"),
            "dev": Split(file="eng.testa"),
            "test": Split(file="eng.testb"),
        },
        dev_splits=("dev", "test"),
        text_columns=("word",),
        label_column="tag",
        labels=_NER_LABELS,
        metrics=("f1", "precision", "recall"),
        recipe=recipe,
        grid=grid,
        features=features,
        version=2 if features else 1,  # the BiLSTM runs over words; in version 1 it ran over all pieces
        about=about,
    )


_NER_ROWS = (
    _ner(
        "CoNLL",
        "",
        Recipe(batch_size=16, learning_rate=5e-5, epochs=3),
        (5e-5, 3e-5, 2e-5),
        "names of persons, organisations, places and others; sentences with their neighbours, case kept by the model",
    ),
    *(
        _ner(
            f"CoNLL-{features}",
            features,
            Recipe(batch_size=16, learning_rate=1e-3, epochs=5),
            (1e-3, 5e-4),
            f"the same, a two-layer BiLSTM on frozen states: {features.replace('-', ' ')}",
        )
        for features in NER_FEATURES
    ),
)

_ROWS = (
    Task(
        name="CoLA",
        folder="CoLA",
        head="classification",
        splits={
            "train": Split(file="train.tsv", columns=_COLA_COLUMNS),
            "dev": Split(file="dev.tsv", columns=_COLA_COLUMNS),
            "test": Split(file="test.tsv", labelled=False),
        },
        text_columns=("sentence",),
        label_column="label",
        labels=("unacceptable", "acceptable"),
        label_values=("0", "1"),
        metrics=("mcc", "accuracy"),
        about="is the sentence acceptable English",
    ),
    Task(
        name="SST-2",
        folder="SST-2",
        head="classification",
        splits=_tsv(),
        text_columns=("sentence",),
        label_column="label",
        labels=("negative", "positive"),
        label_values=("0", "1"),
        metrics=("accuracy",),
        about="sentiment of a film review sentence",
    ),
    Task(
        name="MRPC",
        folder="MRPC",
        head="classification",
        splits=_tsv(),
        text_columns=("#1 String", "#2 String"),
        label_column="Quality",
        labels=("not_equivalent", "equivalent"),
        label_values=("0", "1"),
        metrics=("f1", "accuracy"),
        about="do two news sentences say the same",
    ),
    Task(
        name="STS-B",
        folder="STS-B",
        head="regression",
        splits={
            **_tsv(),
            "test_gold": Split(file="original/sts-test.tsv", columns=_STS_COLUMNS, extra_columns=True),
        },
        text_columns=_PAIR,
        label_column="score",
        metrics=("pearson", "spearman"),
        about="similarity of two sentences, 0 to 5",
    ),
    Task(
        name="QQP",
        folder="QQP",
        head="classification",
        splits={**_tsv(), "dev_part": Split(file="dev.part.noheader.tsv", columns=_QQP_COLUMNS)},
        text_columns=("question1", "question2"),
        label_column="is_duplicate",
        labels=("not_duplicate", "duplicate"),
        label_values=("0", "1"),
        metrics=("f1", "accuracy"),
        about="are two questions the same",
    ),
    Task(
        name="MNLI",
        folder="MNLI",
        head="classification",
        splits={
            "train": Split(file="train.tsv"),
            "dev_matched": Split(file="dev_matched.tsv"),
            "dev_mismatched": Split(file="dev_mismatched.tsv"),
            "test_matched": Split(file="test_matched.tsv", labelled=False),
            "test_mismatched": Split(file="test_mismatched.tsv", labelled=False),
        },
        dev_splits=("dev_matched", "dev_mismatched"),
        text_columns=_PAIR,
        label_column="gold_label",
        labels=_NLI,
        metrics=("accuracy",),
        about="does the premise entail the hypothesis (3 classes); matched and mismatched genres",
    ),
    Task(
        name="QNLI",
        folder="QNLI",
        head="classification",
        splits=_tsv(),
        text_columns=("question", "sentence"),
        label_column="label",
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        about="does the sentence answer the question (v2)",
    ),
    Task(
        name="RTE",
        folder="RTE",
        head="classification",
        splits=_tsv(),
        text_columns=_PAIR,
        label_column="label",
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        about="does the text entail the hypothesis",
    ),
    Task(
        name="WNLI",
        folder="WNLI",
        head="classification",
        splits=_tsv(),
        text_columns=_PAIR,
        label_column="label",
        labels=("not_entailment", "entailment"),
        label_values=("0", "1"),
        metrics=("accuracy",),
        about="pronoun resolution as entailment; train and dev disagree on purpose, the paper leaves it out",
    ),
    Task(
        name="diagnostic",
        folder="diagnostic",
        head="classification",
        splits={
            "dev": Split(
                file="diagnostic-full.tsv",
                renamed={"sentence1": "Premise", "sentence2": "Hypothesis", "label": "Label"},
            ),
            "test": Split(file="diagnostic.tsv", labelled=False),
        },
        text_columns=_PAIR,
        label_column="label",
        labels=_NLI,
        metrics=("mcc", "accuracy"),
        train_task="MNLI",
        about="GLUE's hand-made entailment cases, scored by a model fine-tuned on MNLI",
    ),
    Task(
        name="SICK-E",
        folder="sick",
        head="classification",
        splits={
            "train": Split(file="SICK_train.txt"),
            "dev": Split(file="SICK_trial.txt"),
            "test": Split(file="SICK_test_annotated.txt"),
        },
        dev_splits=("dev", "test"),
        text_columns=("sentence_A", "sentence_B"),
        label_column="entailment_judgment",
        labels=_NLI,
        label_values=("ENTAILMENT", "NEUTRAL", "CONTRADICTION"),
        metrics=("accuracy",),
        about="three-way entailment of image captions",
    ),
    Task(
        name="SICK-R",
        folder="sick",
        head="regression",
        splits={
            "train": Split(file="SICK_train.txt"),
            "dev": Split(file="SICK_trial.txt"),
            "test": Split(file="SICK_test_annotated.txt"),
        },
        dev_splits=("dev", "test"),
        text_columns=("sentence_A", "sentence_B"),
        label_column="relatedness_score",
        metrics=("pearson", "spearman"),
        about="relatedness of image captions, 1 to 5",
    ),
    Task(
        name="SWAG",
        folder="swag",
        head="choice",
        reader="swag",
        splits={
            "train": Split(file="train.csv"),
            "dev": Split(file="val.csv"),
            "test": Split(file="test.csv", labelled=False),
        },
        text_columns=("sent1", "sent2"),
        label_column="label",
        metrics=("accuracy",),
        recipe=Recipe(batch_size=16, learning_rate=2e-5),
        about="which of four endings follows",
    ),
    Task(
        name="ARC-easy",
        folder="arc",
        head="choice",
        reader="arc",
        splits={"dev": Split(file="arc_easy.jsonl"), "train": Split(file="arc_challenge.jsonl")},
        text_columns=("query", "choices"),
        label_column="gold",
        metrics=("accuracy",),
        recipe=Recipe(batch_size=16, learning_rate=2e-5),
        about="school science questions with four answers, trained on the challenge set",
    ),
    *_SQUAD_ROWS,
    *_NER_ROWS,
    Task(
        name="package",
        folder="package",
        head="classification",
        splits={"train": Split(file="train.tsv"), "dev": Split(file="dev.tsv")},
        text_columns=("sentence",),
        label_column="label",
        labels_file="labels.txt",
        metrics=("accuracy",),
        recipe=Recipe(batch_size=32, learning_rate=1e-3, epochs=2, max_length=64),
        grid=(1e-3, 5e-4, 2e-4),
        about="the demo's own task: which Python package a documentation paragraph is from (eval.embedded_task)",
    ),
)

TASKS: Mapping[str, Task] = {task.name: task for task in _ROWS}
"""All tasks by name."""

GLUE = ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE", "WNLI")
"""The nine tasks of GLUE, in the order of its leaderboard."""


def select_tasks(names: Sequence[str]) -> list[Task]:
    """Tasks by name, ignoring case; `glue` stands for all nine. Commas separate names too.

    Raises:
        TaskError: an unknown name; the nearest one is named. Or no name at all.
    """
    known = {name.lower(): name for name in TASKS}
    chosen: dict[str, Task] = {}
    for word in (part.strip() for name in names for part in name.split(",")):
        if word.lower() == "glue":
            chosen.update({name: TASKS[name] for name in GLUE})
        elif word.lower() in known:
            chosen[known[word.lower()]] = TASKS[known[word.lower()]]
        elif word:
            near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.4)
            hint = f"did you mean {known[near[0]]!r}? " if near else ""
            raise TaskError(f"unknown task {word!r}; {hint}known: glue, {', '.join(TASKS)}")
    if not chosen:
        raise TaskError(f"no task named; known: glue, {', '.join(TASKS)}")
    return list(chosen.values())
