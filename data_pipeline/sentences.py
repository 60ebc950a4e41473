"""One function: a text to its sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

# Between paragraphs no sentence goes on, also where the first one, such as a heading, has no full stop.
_PARAGRAPH = re.compile(r"\n[ \t\r]*\n")

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
        tokenize = _punkt().tokenize
        return _stripped(sentence for part in parts for sentence in tokenize(part))
    if not method.isalpha() or len(method) > 3:
        raise ValueError(f"corpus.sentences: expected 'punkt', 'line' or a language code such as 'de', got {method!r}")
    import sentencex

    return _stripped(sentence for part in parts for sentence in sentencex.segment(method, part))


def _stripped(parts: Iterable[str]) -> list[str]:
    return list(filter(None, map(str.strip, parts)))
