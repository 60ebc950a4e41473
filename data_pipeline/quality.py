"""Why a document is not worth training on: its language, quality, repetition or overlap with evaluation files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.utils.word_tokenizers import WordTokenizer
from resiliparse.parse.lang import detect_fast

from data_pipeline.config import CleaningConfig
from data_pipeline.decontamination import ContaminationIndex

_LANGUAGE_CHARACTERS = 5_000
"""The start of a document tells its language."""
_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")


class _Words(WordTokenizer):
    """Words and marks for datatrove's filters, whose own tokenizers need spaCy."""

    def word_tokenize(self, text: str) -> list[str]:
        return _WORD_OR_MARK.findall(text)

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in _WORD_OR_MARK.finditer(text)]

    def sent_tokenize(self, text: str) -> list[str]:
        return text.split("\n")


_WORDS = _Words()  # one object: datatrove keeps what it makes of each


class Finding(NamedTuple):
    """Why a document is dropped.

    Attributes:
        reason: "language", "quality", "repetition" or "contaminated".
        kind: the language, the rule, or the evaluation file.
        detail: for people, "" where the kind says it all.
    """

    reason: str
    kind: str
    detail: str = ""


class DocumentFilters:
    """The filters that a configuration asks for.

    Args:
        cleaning: `[cleaning]`.
        index: the n-grams of the evaluation files, where there is one.
    """

    def __init__(self, cleaning: CleaningConfig, index: Path | None) -> None:
        self._languages = frozenset(cleaning.languages)
        words: Any = _WORDS  # the parameter's annotation leaves out what the filters take
        self._filters: list[tuple[str, Any]] = []
        if cleaning.quality:
            stop_words = list(cleaning.stop_words)
            quality = GopherQualityFilter(
                min_doc_words=cleaning.min_words,
                stop_words=stop_words,
                min_stop_words=min(2, len(stop_words)),
                language=words,
            )
            self._filters.append(("quality", quality))
        if cleaning.repetition:
            self._filters.append(("repetition", GopherRepetitionFilter(language=words)))
        self._index = ContaminationIndex(index) if index else None

    def finding(self, document: Document, words: list[str], hashes: np.ndarray) -> Finding | None:
        """Why to drop the document, or None: keep it.

        Args:
            words, hashes: of the text, see `ngrams`.
        """
        if self._languages:
            language = detect_fast(document.text[:_LANGUAGE_CHARACTERS])[0]
            if language not in self._languages:
                return Finding("language", language)
        for name, filters in self._filters:
            if not words:
                return Finding(name, "no_words")
            answer = filters.filter(document)
            if answer is not True:
                return Finding(name, answer[1].removeprefix("gopher_") if isinstance(answer, tuple) else "")
        if self._index is not None and (shared := self._index.find(words, hashes)):
            return Finding("contaminated", *shared)
        return None
