"""The demo's task: honest splits, no answer in the question, the same bytes every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_pipeline.readers import is_held_out
from eval.embedded_task import main, make_task, usable_text
from eval.readers import read_split
from eval.tasks import TASKS

SUBJECTS = {"numpy": "arrays", "torch": "tensors", "pandas": "tables"}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """120 documents of three packages in the format of the embedded corpus."""
    rows = []
    for number in range(120):
        package = sorted(SUBJECTS)[number % 3]
        told = (
            f"The {number}th way to work with {SUBJECTS[package]} takes one argument and returns what it was asked for."
        )
        named = f"Like everything in {package.title()}_base it is fast."
        rows.append(
            {"id": f"{package}/m{number}", "text": f"{told} {named}\n\nToo short.", "metadata": {"package": package}}
        )
    (tmp_path / "data" / "corpus").mkdir(parents=True)
    (tmp_path / "data" / "corpus" / "embedded.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"tokens": {"corpus": {"held_out": 0.3}}}
    (tmp_path / "data" / "build.json").write_text(json.dumps(settings))
    return tmp_path / "data"


def test_splits_follow_the_documents_and_names_are_left_out(corpus: Path, tmp_path: Path) -> None:
    counts = make_task(corpus, tmp_path / "tasks")
    train, dev = (read_split(tmp_path / "tasks", TASKS["package"], split) for split in ("train", "dev"))
    assert train.label_names == ("numpy", "pandas", "torch")
    assert len(train) == counts["train"].total() and len(train) + len(dev) == 120
    for examples, held_out in ((train, False), (dev, True)):
        for text, label in zip(examples.texts_a, examples.labels, strict=True):
            package, number = train.label_names[label], text.split()[1].removesuffix("th")
            assert SUBJECTS[package] in text and package not in text.lower()
            assert is_held_out(f"{package}/m{number}", 0.3) is held_out
    before = (tmp_path / "tasks/package/train.tsv").read_bytes()
    make_task(corpus, tmp_path / "again")
    assert (tmp_path / "again/package/train.tsv").read_bytes() == before


def test_text_is_cut_at_a_sentence_and_short_ones_are_dropped() -> None:
    import re

    sentence = "This is a sentence of exactly ten words, no more. "
    assert usable_text(sentence, re.compile("xyz")) == ""
    assert len(usable_text(sentence * 20, re.compile("xyz")).split()) == 80


def test_errors(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "embedded.jsonl: no such file; build with corpus.source = 'embedded'" in capsys.readouterr().err
    (corpus / "build.json").write_text(json.dumps({"tokens": {"corpus": {"held_out": 0}}}))
    assert main(["--data", str(corpus), "--output", str(tmp_path / "out")]) == 2
    assert "0 usable paragraphs for dev" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
