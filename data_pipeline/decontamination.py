"""Texts of evaluation files, found again in a corpus by the n-grams of their words.

As for GPT-3 (Brown et al. 2020, appendix C, https://arxiv.org/abs/2005.14165): a document that shares 13 words in a row
with an evaluation text is contaminated. A text of fewer words counts as a whole, down to `MIN_WORDS`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.artefacts import atomic_writer
from data_pipeline.corpus_files import CorpusError, InputFile, open_bytes
from data_pipeline.ngrams import ngram_hashes, word_hashes, words_of

MIN_WORDS = 8
"""Shorter texts (labels, names, short questions) occur by chance."""


def build_index(files: Sequence[InputFile], words: int, path: Path) -> int:
    """Write the n-grams of all texts in `files`, by their length, as sorted hashes; the number of texts used.

    Raises:
        CorpusError: a file cannot be read, or holds no text of `MIN_WORDS` words.
    """
    found: dict[int, list[np.ndarray]] = {}
    texts = 0
    for file in files:
        before = texts
        for text in evaluation_texts(file):
            found_words = words_of(text)
            if len(found_words) >= MIN_WORDS:
                n = min(words, len(found_words))
                found.setdefault(n, []).append(ngram_hashes(word_hashes(found_words), n))
                texts += 1
        if texts == before:
            raise CorpusError(f"{file.path}: no text of {MIN_WORDS} words or more to look for (cleaning.decontaminate)")
    arrays = {str(n): np.unique(np.concatenate(parts)) for n, parts in sorted(found.items())}
    with atomic_writer(path) as handle:
        np.savez(handle, **arrays)  # type: ignore[arg-type]
    return texts


def evaluation_texts(file: InputFile) -> Iterator[str]:
    """Every string of a JSON or JSON lines file, every field of a TSV or CSV file, every line of another text file.

    Raises:
        CorpusError: the file cannot be read.
    """
    try:
        with open_bytes(file) as handle:
            content = handle.read().decode("utf-8-sig")
        suffix = Path(file.name).suffix
        if suffix == ".json":
            yield from _strings(json.loads(content))
        elif suffix == ".jsonl":
            for line in content.split("\n"):
                yield from _strings(json.loads(line)) if line.strip() else ()
        elif suffix == ".csv":
            for row in csv.reader(io.StringIO(content, newline="")):
                yield from row
        else:
            for line in content.split("\n"):
                yield from line.split("\t")
    except (ValueError, csv.Error) as error:
        raise CorpusError(f"{file.path}: cannot read it as an evaluation file: {error}") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


class ContaminationIndex:
    """What `build_index` wrote."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self._hashes = {int(n): arrays[n] for n in arrays.files}

    def find(self, words: list[str], hashes: np.ndarray) -> str | None:
        """The first shared words of a document, None where there are none.

        Args:
            words: of the document, as `words_of` gives them.
            hashes: their `word_hashes`.
        """
        for n, known in self._hashes.items():
            grams = ngram_hashes(hashes, n)
            at = np.minimum(np.searchsorted(known, grams), len(known) - 1)
            shared = np.flatnonzero(known[at] == grams)
            if len(shared):
                return " ".join(words[shared[0] : shared[0] + n])
        return None
