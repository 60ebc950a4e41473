"""CoNLL-2003 files (https://www.clips.uantwerpen.be/conll2003/ner/): sentences with name tags, and their score.

Tags are IOB2 from here on: every name begins with B-. The files are IOB1 (B- only between two touching names of a kind);
both spellings are read.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from eval.metrics import Score
from eval.readers import ReadError, read_bytes

DOCUMENT = "-DOCSTART-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentences:
    """A file of tagged sentences.

    Attributes:
        words: of each sentence; document lines are no words.
        tags: IOB2, one for each word.
        documents: (sentences,) int64, number of the document that a sentence is in.
        label_names: tags in the order of their ids.
        sha256: of the file's bytes, uncompressed.
    """

    words: list[list[str]]
    tags: list[list[str]]
    documents: np.ndarray
    label_names: tuple[str, ...]
    sha256: str = ""
    malformed: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.words)

    def take(self, rows: np.ndarray) -> Sentences:
        """The sentences at these rows, in this order."""
        return replace(
            self,
            words=[self.words[row] for row in rows],
            tags=[self.tags[row] for row in rows],
            documents=self.documents[rows],
        )


def read_conll(path: Path, label_names: Sequence[str] = (), *, tag_column: int = -1) -> Sentences:
    """Read a file of one word a line with its tag in the last column, blank lines between sentences; .gz accepted.

    Args:
        path: the file.
        label_names: tags that may occur; empty: any.
        tag_column: which column is the tag; the first one is the word.

    Raises:
        ReadError: missing, not UTF-8, a line with a word alone, or an unknown tag; the line is named.
    """
    raw = read_bytes(path)
    try:
        lines = raw.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ReadError(f"{path}: not UTF-8 at byte {error.start}") from error
    words: list[list[str]] = []
    tags: list[list[str]] = []
    documents: list[int] = []
    document, open_sentence = 0, False
    for number, line in enumerate(lines, 1):
        columns = line.split()
        if not columns or columns[0] == DOCUMENT:
            document += bool(columns and words)
            open_sentence = False
            continue
        if len(columns) < 2:
            raise ReadError(f"{path}: line {number} has one column, expected a word and its tag in the last one")
        if not open_sentence:
            words.append([])
            tags.append([])
            documents.append(document)
            open_sentence = True
        tag = columns[tag_column]
        if tag != "O" and (tag[:2] not in ("B-", "I-") or (label_names and tag not in label_names)):
            raise ReadError(
                f"{path}: line {number} has the tag {tag!r}; expected one of {list(label_names) or 'O, B-X, I-X'}"
            )
        words[-1].append(columns[0])
        tags[-1].append(tag)
    if not words:
        raise ReadError(f"{path}: no sentence in this file")
    return Sentences(
        words=words,
        tags=[to_iob2(sentence) for sentence in tags],
        documents=np.array(documents, dtype=np.int64),
        label_names=tuple(label_names),
        sha256=hashlib.sha256(raw).hexdigest(),
    )


def to_iob2(tags: Sequence[str]) -> list[str]:
    """The same names with B- on every first word, whether the tags were IOB1, IOB2, or a model's own mixture.

    A name goes on with I- of the same kind, as the official `conlleval` reads it.
    """
    out, before = [], "O"
    for tag in tags:
        begins = tag.startswith("I-") and before[2:] != tag[2:]
        out.append(f"B-{tag[2:]}" if begins else tag)
        before = tag
    return out


def score_tags(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> tuple[dict[str, Score], dict[str, float]]:
    """Entity precision, recall and F1 over all kinds as fractions, and the figures of each kind, as `conlleval`.

    Raises:
        ValueError: different numbers of sentences or of words.
    """
    from seqeval.metrics import accuracy_score, classification_report

    if [len(tags) for tags in gold] != [len(tags) for tags in predicted]:
        raise ValueError("gold and predicted tags have different numbers of sentences or words")
    gold, predicted = [to_iob2(tags) for tags in gold], [to_iob2(tags) for tags in predicted]
    with warnings.catch_warnings():
        # A kind that is never predicted has no precision: 0, as conlleval prints it, is what zero_division says.
        warnings.simplefilter("ignore")
        report = classification_report(gold, predicted, output_dict=True, zero_division=0)
    whole = report["micro avg"]
    names = {"f1": "f1-score", "precision": "precision", "recall": "recall"}
    kinds = sorted(kind for kind in report if not kind.endswith(" avg"))
    details = {"accuracy": float(accuracy_score(gold, predicted))}
    for kind in kinds:
        details |= {f"{kind}_{name}": float(report[kind][key]) for name, key in names.items()}
        details[f"{kind}_total"] = int(report[kind]["support"])
    return {name: Score(float(whole[key])) for name, key in names.items()}, details


def baseline_tags(train: Sentences, scored: Sentences) -> list[list[str]]:
    """The baseline of CoNLL-2003: names of the training data with their most frequent kind, the longest name first.

    Published (arXiv cs/0306050, table 5): F1 59.61 on the English test file.
    """
    kinds: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for words, tags in zip(train.words, train.tags, strict=True):
        for first, end, kind in spans(tags):
            kinds[tuple(words[first:end])][kind] += 1
    known = {name: found.most_common(1)[0][0] for name, found in kinds.items()}
    longest = max(map(len, known), default=0)
    out = []
    for words in scored.words:
        tags, place = ["O"] * len(words), 0
        while place < len(words):
            for size in range(min(longest, len(words) - place), 0, -1):
                name = tuple(words[place : place + size])
                if name in known:
                    kind = known[name]
                    tags[place : place + size] = [f"B-{kind}"] + [f"I-{kind}"] * (size - 1)
                    place += size - 1
                    break
            place += 1
        out.append(tags)
    return out


def spans(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """(first word, end, kind) of each name in IOB2 tags."""
    found: list[tuple[int, int, str]] = []
    for place, tag in enumerate(tags):
        if tag.startswith("B-"):
            found.append((place, place + 1, tag[2:]))
        elif tag.startswith("I-"):
            first, _, kind = found.pop()
            found.append((first, place + 1, kind))
    return found
