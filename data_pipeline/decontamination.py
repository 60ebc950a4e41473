"""Texts of evaluation files, found again in a corpus by the n-grams of their words.

As for GPT-3 (Brown et al. 2020, appendix C, https://arxiv.org/abs/2005.14165): a document that shares 13 words in a row
with an evaluation text is contaminated. A text of fewer words counts as a whole, down to `MIN_WORDS`.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.artefacts import atomic_writer
from data_pipeline.corpus_files import CorpusError, InputFile, open_bytes
from data_pipeline.ngrams import ngram_hashes, word_hashes, words_of

MIN_WORDS = 8
"""Shorter texts (labels, names, short questions) occur by chance."""
_TAG = re.compile(r"O|[BIESLU]-\S+")
_DOCUMENT = "-DOCSTART-"


def build_index(files: Sequence[InputFile], words: int, path: Path) -> dict[str, int]:
    """Write the n-grams of all texts in `files`, by their length, as sorted hashes with the first file that has each.

    Returns:
        texts of `MIN_WORDS` words or more in each file, by its name.

    Raises:
        CorpusError: a file cannot be read, or none holds such a text.
    """
    hashes: dict[int, list[np.ndarray]] = {}
    owners: dict[int, list[np.ndarray]] = {}
    texts: dict[str, int] = {}
    for number, file in enumerate(files):
        texts[file.name] = 0
        for text in evaluation_texts(file):
            found = words_of(text)
            if len(found) >= MIN_WORDS:
                n = min(words, len(found))
                grams = ngram_hashes(word_hashes(found), n)
                hashes.setdefault(n, []).append(grams)
                owners.setdefault(n, []).append(np.full(len(grams), number, np.uint32))
                texts[file.name] += 1
    if not any(texts.values()):
        raise CorpusError(
            f"{', '.join(file.path for file in files[:3])}: no text of {MIN_WORDS} words or more to look for "
            "(cleaning.decontaminate)"
        )
    arrays: dict[str, np.ndarray] = {"names": np.array([file.name for file in files], dtype=np.str_)}
    for n in sorted(hashes):
        known, first = np.unique(np.concatenate(hashes.pop(n)), return_index=True)
        arrays |= {f"hashes_{n}": known, f"files_{n}": np.concatenate(owners.pop(n))[first]}
    with atomic_writer(path) as handle:
        np.savez(handle, **arrays)  # type: ignore[arg-type]
    return texts


def evaluation_texts(file: InputFile) -> Iterator[str]:
    """The texts of an evaluation file, labels and numbers among them; what is too short for a text is left to the caller.

    Every string of a JSON or JSON lines file (SQuAD, SWAG, ARC), a list of single words joined; every field of a CSV (SWAG),
    TSV (GLUE) or other text file; every sentence of a CoNLL column file, its first column joined (CoNLL-2003).

    Raises:
        CorpusError: the file cannot be read.
    """
    try:
        with open_bytes(file) as handle:
            content = handle.read().decode("utf-8-sig")
        suffix = Path(file.name).suffix
        if suffix in (".json", ".jsonl"):
            for value in _json_values(content):
                yield from _strings(value)
        elif suffix == ".csv":
            for row in csv.reader(io.StringIO(content, newline="")):
                yield from row
        else:
            lines = content.replace("\r\n", "\n").split("\n")
            if _is_column_file(lines):
                yield from _column_sentences(lines)
            else:
                for line in lines:
                    yield from line.split("\t")
    except (ValueError, csv.Error) as error:
        raise CorpusError(f"{file.path}: cannot read it as an evaluation file: {error}") from error


def _json_values(content: str) -> Iterator[Any]:
    """The value of a JSON file, or the values of its lines, whatever it is called."""
    try:
        yield json.loads(content)
    except json.JSONDecodeError:
        lines = [line for line in content.split("\n") if line.strip()]
        if len(lines) < 2:
            raise
        yield from map(json.loads, lines)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        items = list(value.values()) if isinstance(value, dict) else value
        if isinstance(value, list) and all(isinstance(item, str) and " " not in item for item in items):
            yield " ".join(items)  # words of a sentence
            return
        for item in items:
            yield from _strings(item)


def _is_column_file(lines: Sequence[str]) -> bool:
    """Whether this is the format of CoNLL: a word a line, columns behind it, of which the last is a tag of IOB or its kin."""
    rows = [line.split() for line in lines[:1000] if line.strip()]
    return bool(rows) and all(len(row) > 1 and _TAG.fullmatch(row[-1]) for row in rows)


def _column_sentences(lines: Sequence[str]) -> Iterator[str]:
    words: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            word = line.split()[0]
            words += [] if word == _DOCUMENT else [word]
        elif words:
            yield " ".join(words)
            words = []


class ContaminationIndex:
    """What `build_index` wrote."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self._names: list[str] = arrays["names"].tolist()
            lengths = sorted(int(name.removeprefix("hashes_")) for name in arrays.files if name.startswith("hashes_"))
            self._known = {n: (arrays[f"hashes_{n}"], arrays[f"files_{n}"]) for n in lengths}

    def find(self, words: list[str], hashes: np.ndarray) -> tuple[str, str] | None:
        """(evaluation file, first shared words) of a document, None where it shares none.

        Args:
            words: of the document, as `words_of` gives them.
            hashes: their `word_hashes`.
        """
        for n, (known, files) in self._known.items():
            grams = ngram_hashes(hashes, n)
            at = np.minimum(np.searchsorted(known, grams), len(known) - 1)
            shared = np.flatnonzero(known[at] == grams)
            if len(shared):
                first = int(shared[0])
                return self._names[files[at[first]]], " ".join(words[first : first + n])
        return None
