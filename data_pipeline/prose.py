"""Prose out of documentation strings: paragraphs of running English, without markup, code or tables."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# A string literal as a statement of its own, at the start of a file or of an indented block; comments may come before it.
_DOCSTRING = re.compile(
    r"""(?:\A|:[ \t]*(?:\#[^\n]*)?\n)(?:[ \t]*(?:\#[^\n]*)?\n)*[ \t]*
    ([rRuU]?(?:"{3}(?:[^"\\]|\\.|"(?!""))*+"{3}|'{3}(?:[^'\\]|\\.|'(?!\'\'))*+'{3}
    |"(?:[^"\\\n]|\\.)++"|'(?:[^'\\\n]|\\.)++'))[ \t]*(?:\#[^\n]*)?$""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_BLANK = re.compile(r"\n[ \t]*\n")
_UNDERLINE = re.compile(r"^([=\-~^*#\"'`+.:])\1{2,}\s*$")
_ROLE = re.compile(r"(?<![\w`]):[\w.+-]+(?::[\w.+-]+)?:`~?\.?([^`<>]*?)\s*(?:<[^`<>]*>)?`")
_LINK = re.compile(r"`([^`<>]+?)\s*<[^`<>]+>`_{0,2}")
_LITERAL = re.compile(r"``?([^`\n]+)``?_{0,2}")
_EMPHASIS = re.compile(r"(?<!\w)(\*\*?)(?=\S)([^*\n]*[^*\s])\1(?!\w)")
_FOOTNOTE = re.compile(r"\s?\[[#*\d\w-]{0,12}\]_")
_WORD = re.compile(r"[A-Za-z][a-z]*(?:['’-][A-Za-z]+)*[,.;:!?)\"'”]*")
_SENTENCE_END = re.compile(r"[.!?][\"'”)]*$")
# The start of a list item, directive, field, doctest, table, definition of a parameter, or reference.
_NOT_PROSE_START = re.compile(
    r"(?:[-*+•|>#@:\\{$%&=~^<_/]|\.\.|\d+[.)]|\(?[a-zA-Z0-9]\)\s|\[\w*\]|[\w.*, ]{1,40}\s:\s|\w+\(.*\)\s*(?:->.*)?$"
    r"|(?:Args|Arguments|Returns?|Raises|Yields?|Parameters?|Examples?|Usage|Copyright|Licen[sc]ed?|Author|SPDX)\b[^.]{0,40}:)"
)
_CODE = re.compile(r"[{}=|<>\\$^_@~#]|://|\(\)|\w\.\w+\.\w|\w\(\w|->|::|\[\w*\]|--")
_SKIPPED_SECTION = re.compile(
    r"^(?:see also|references|examples?|authors?|methods|usage|bibliography)\s*:?$", re.IGNORECASE
)
# `name (type): Text`, `name: Text` or `:param name: Text`: what follows the colon can be prose.
_FIELD = re.compile(
    r"(?::\w[^:]{0,60}|[*`]{0,3}[A-Za-z_][\w.,* ]{0,30}[`]{0,2}(?: ?\([^()]*(?:\([^()]*\)[^()]*)?\))?)(?<! ):\s+(?=[A-Z])"
)

MIN_WORDS = 7
"""Shorter paragraphs are mostly titles and fragments."""
WORD_SHARE = 0.8
"""Smallest share of plain English-looking words in a paragraph."""
CODE_MARKS_PER_WORD = 1 / 16
"""Most marks of code (operators, calls, dotted names) a paragraph may hold for each of its words."""


def docstrings(source: bytes) -> Iterator[str]:
    """Documentation strings of a module, its classes and functions in the order of the source; nothing is imported.

    Found by their place, as the first statement of a block: in installed packages the same strings as with `ast`, for a
    quarter of the time.

    Raises:
        ValueError: the source is not UTF-8.
        SyntaxError: a string with a broken escape.
    """
    for literal in _DOCSTRING.findall(source.decode("utf-8").replace("\r\n", "\n")):
        text = inspect.cleandoc(ast.literal_eval(literal))
        if text:
            yield text


def paragraphs(text: str, drops: Counter[str]) -> Iterator[str]:
    """The paragraphs of a text that read as prose, each on one line, in order; the others are counted by reason.

    Descriptions in lists of parameters are taken where they are whole sentences; their names and types are not.
    """
    skipping = False
    for block in _BLANK.split(inspect.cleandoc(text).replace("\r", "")):
        lines = [line for line in block.split("\n") if line.strip()]
        title = _section_title(lines)
        if title is not None:
            skipping = _SKIPPED_SECTION.match(title) is not None
            lines = lines[2:]
        if skipping and lines:
            drops["dropped:reference_section"] += 1
            continue
        for run in _runs(lines):
            reason = _layout_reason(run)
            paragraph = "" if reason else _plain(" ".join(run))
            reason = reason or _wording_reason(paragraph)
            if reason:
                drops[f"dropped:{reason}"] += 1
            else:
                yield paragraph


def module_prose(path: Path, document_id: str) -> tuple[list[tuple[str, list[str]]], Counter[str]]:
    """Documents of one Python file: (id, paragraphs) each, and what was left out by reason.

    A file is one document, but `pydoc_data.topics`, a table of texts, is one document a topic.
    """
    drops: Counter[str] = Counter()
    found: list[tuple[str, list[str]]] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code
            source = path.read_bytes()
            if path.parts[-2:] == ("pydoc_data", "topics.py"):
                texts = [(f"{document_id}/{name}", [text]) for name, text in sorted(_topics(source).items())]
            else:
                texts = [(document_id, list(docstrings(source)))]
    except (SyntaxError, ValueError, RecursionError, OSError):
        # Python 2 code and templates lie in some packages.
        drops["dropped:unreadable_module"] += 1
        texts = []
    for name, strings in texts:
        found.append((name, [paragraph for text in strings for paragraph in paragraphs(text, drops)]))
    return found, drops


def _topics(source: bytes) -> dict[str, str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            return ast.literal_eval(node.value)
    return {}


def _section_title(lines: list[str]) -> str | None:
    """The title of a block that begins with an underlined line."""
    if len(lines) >= 2 and _UNDERLINE.match(lines[1]) and not lines[0][:1].isspace():
        return lines[0].strip()
    return None


def _runs(lines: list[str]) -> Iterator[list[str]]:
    """Consecutive lines of one indentation, stripped; a field's text goes with the deeper lines below it."""
    run: list[str] = []
    depth = 0
    hanging = False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        content = line.strip()
        field = _FIELD.match(content)
        if run and (field or (indent <= depth if hanging else indent != depth)):
            yield run
            run = []
        if not run:
            depth, hanging = indent, field is not None
            content = content[field.end() :] if field else content
        run.append(content)
    if run:
        yield run


def _layout_reason(lines: list[str]) -> str | None:
    if any(line.startswith((">>>", "...")) for line in lines):
        return "doctest"
    if any(_UNDERLINE.match(line) for line in lines):
        return "table_or_heading"
    if any(_NOT_PROSE_START.match(line) for line in lines):
        return "list_or_field"
    return None


def _wording_reason(paragraph: str) -> str | None:
    words = paragraph.split()
    if len(words) < MIN_WORDS:
        return "short"
    if not _SENTENCE_END.search(paragraph) or not (paragraph[0].isupper() or paragraph[0] in "\"'“("):
        return "not_a_sentence"
    if len(_CODE.findall(paragraph)) > CODE_MARKS_PER_WORD * len(words):
        return "code_like"
    if sum(_WORD.fullmatch(word.lstrip("(\"'“")) is not None for word in words) < WORD_SHARE * len(words):
        return "code_like"
    return None


def _plain(text: str) -> str:
    """Running text without reStructuredText markup."""
    if "`" in text:
        text = _LITERAL.sub(r"\1", _LINK.sub(r"\1", _ROLE.sub(r"\1", text)))
    if "*" in text:
        text = _EMPHASIS.sub(r"\2", text)
    if "]_" in text:
        text = _FOOTNOTE.sub("", text)
    return " ".join(text.split())
