"""SQuAD's JSON files (https://rajpurkar.github.io/SQuAD-explorer/): contexts, questions and answers by code point."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from eval.readers import ReadError, read_bytes
from eval.squad_metrics import Question


@dataclass(frozen=True, kw_only=True, slots=True)
class SquadExample:
    """A question about a context.

    Attributes:
        id: of the question.
        question: without blanks at either end (R37).
        context: untouched: answer offsets count its code points.
        answers: gold texts; none for an unanswerable question.
        starts: offset of each answer in the context.
    """

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]

    @property
    def misplaced(self) -> list[int]:
        """Numbers of the answers whose text does not stand at their offset."""
        pairs = enumerate(zip(self.answers, self.starts, strict=True))
        return [n for n, (text, start) in pairs if self.context[start : start + len(text)] != text]


@dataclass(frozen=True, kw_only=True, slots=True)
class SquadData:
    """A file of questions.

    Attributes:
        version: "1.1" or "2.0", as the file says; a file with unanswerable questions is 2.0.
        misplaced: ids of the questions with an answer that does not stand at its offset; they are kept and scored.
        sha256: of the file's bytes, uncompressed.
    """

    version: str
    examples: list[SquadExample]
    articles: int
    misplaced: list[str] = field(default_factory=list)
    sha256: str = ""

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def malformed(self) -> dict[str, int]:
        """What the reader complains about, by reason."""
        return {"answer not at its offset": len(self.misplaced)} if self.misplaced else {}

    def take(self, rows: np.ndarray) -> SquadData:
        """The questions at these rows, in this order."""
        examples = [self.examples[row] for row in rows]
        return replace(self, examples=examples, misplaced=[example.id for example in examples if example.misplaced])

    def questions(self) -> list[Question]:
        """What the metric needs."""
        return [Question(example.id, example.answers) for example in self.examples]


def read_squad(path: Path) -> SquadData:
    """Read a data file, plain or .gz.

    Raises:
        ReadError: missing, not JSON, a key that is not there, or the same question id twice.
    """
    raw = read_bytes(path) if path.is_file() else _missing(path)
    try:
        tree = json.loads(raw)
        articles = tree["data"]
        examples = [
            _example(question, paragraph["context"])
            for article in articles
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReadError(f"{path}: not a SQuAD file ({type(error).__name__}: {error})") from error
    seen: set[str] = set()
    for example in examples:
        if example.id in seen:
            raise ReadError(f"{path}: the question id {example.id!r} occurs twice")
        seen.add(example.id)
    if not examples:
        raise ReadError(f"{path}: no question in this file")
    second = "2.0" in str(tree.get("version", "")) or any(not example.answers for example in examples)
    return SquadData(
        version="2.0" if second else "1.1",
        examples=examples,
        articles=len(articles),
        misplaced=[example.id for example in examples if example.misplaced],
        sha256=hashlib.sha256(raw).hexdigest(),
    )


def _missing(path: Path) -> bytes:
    raise ReadError(f"{path}: no such file")


def _example(question: dict[str, Any], context: str) -> SquadExample:
    answers = [] if question.get("is_impossible") else question.get("answers", [])
    return SquadExample(
        id=str(question["id"]),
        question=question["question"].strip(),
        context=context,
        answers=tuple(answer["text"] for answer in answers),
        starts=tuple(int(answer["answer_start"]) for answer in answers),
    )
