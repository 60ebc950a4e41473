"""One function: a text to its sentences."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Literal

# Between paragraphs no sentence goes on, also where the first one, such as a heading, has no full stop.
_PARAGRAPH = re.compile(r"\n[ \t\r]*\n")


@cache
def _punkt() -> Any:
    """The English model of nupunkt, loaded at the first use (milliseconds) and kept for the life of the process."""
    import nupunkt

    return nupunkt.load("default")


def split_sentences(text: str, method: Literal["punkt", "line"]) -> list[str]:
    """Cut a text into sentences without surrounding white space; none is empty.

    Args:
        text: one document. Only LF and CRLF end a line; other separators (U+2028, VT, U+0085, U+001C) are characters.
        method: "punkt", the Punkt algorithm with nupunkt's English model inside each paragraph
            (Kiss and Strunk 2006, https://aclanthology.org/J06-4003/); "line", one sentence a line.

    Raises:
        ValueError: another method.
    """
    if method == "line":
        return [line for line in map(str.strip, text.split("\n")) if line]
    if method != "punkt":
        raise ValueError(f"corpus.sentences: expected 'punkt' or 'line', got {method!r}")
    tokenize = _punkt().tokenize
    sentences: list[str] = []
    for paragraph in _PARAGRAPH.split(text):
        sentences.extend(part for part in (sentence.strip() for sentence in tokenize(paragraph)) if part)
    return sentences
