"""One function: a text to its sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

# Between paragraphs no sentence goes on, also where the first one, such as a heading, has no full stop.
_PARAGRAPH = re.compile(r"\n[ \t\r]*\n")

_WINDOW = 1 << 20  # characters that nupunkt gets at once
_MARGIN = 4096  # what stands at the end of those may look otherwise once the text goes on
_LIST_NUMBER = re.compile(r"\w{1,6}\)?\.")

# The version that punkt.py was compared with; the sentences are the same, found faster.
_COMPARED_NUPUNKT = "0.8.0"


@cache
def _punkt() -> Any:
    """The English model of nupunkt, loaded at the first use (milliseconds) and kept for the life of the process."""
    import nupunkt

    plain = nupunkt.load("default")
    if nupunkt.__version__ != _COMPARED_NUPUNKT:
        return plain
    from data_pipeline.punkt import RememberingPunkt

    return RememberingPunkt(plain.parameters)


def split_sentences(text: str, method: str, keep_lines: bool = False) -> list[str]:
    """Cut a text into sentences without surrounding white space; none is empty.

    Args:
        text: one document. Only LF and CRLF end a line; other separators (U+2028, VT, U+0085, U+001C) are characters.
        method: "line", one sentence a line; "punkt", the Punkt algorithm with nupunkt's English model
            (Kiss and Strunk 2006, https://aclanthology.org/J06-4003/); or a language of ISO 639 such as "de" or "zh", the
            rules and abbreviations of sentencex for it (https://github.com/wikimedia/sentencex; a language it has nothing
            for is cut by general rules).
        keep_lines: a line end ends a sentence too, as in verse, dialogue and lists; otherwise only a blank line does.

    Raises:
        ValueError: another method.
    """
    if method == "line":
        return _stripped(text.split("\n"))
    parts = text.split("\n") if keep_lines else _PARAGRAPH.split(text)
    if method == "punkt":
        return _stripped(sentence for part in parts for sentence in _english(part))
    if not method.isalpha() or len(method) > 3:
        raise ValueError(f"corpus.sentences: expected 'punkt', 'line' or a language code such as 'de', got {method!r}")
    import sentencex

    return _stripped(sentence for part in parts for sentence in sentencex.segment(method, part))


def _english(text: str) -> Iterable[str]:
    return _punkt().tokenize(text) if len(text) <= _WINDOW else _by_windows(text, _WINDOW, _MARGIN)


def _by_windows(text: str, window: int, margin: int) -> Iterator[str]:
    """The sentences of one long text, found a part at a time: nupunkt keeps about a kilobyte for each until it has all.

    A part ends where a sentence begins, at a letter after white space and not at a list number such as `IV.`: only there
    does nupunkt see the same whatever stands before.
    """
    start, size = 0, window
    while len(text) - start > size:
        piece = text[start : start + size]
        spans = list(_punkt().span_tokenize(piece))
        cut = next((at for at, _ in reversed(spans) if 0 < at < size - margin and _can_begin(piece, at)), 0)
        if not cut:  # one sentence is as long as that
            size *= 2
            continue
        yield from (piece[first:end] for first, end in spans if first < cut)
        start, size = start + cut, window
    yield from _punkt().tokenize(text[start:])


def _can_begin(text: str, at: int) -> bool:
    return text[at].isalpha() and text[at - 1].isspace() and not _LIST_NUMBER.match(text, at)


def _stripped(parts: Iterable[str]) -> list[str]:
    return list(filter(None, map(str.strip, parts)))
