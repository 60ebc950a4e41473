"""The prose of wikitext, from the tokens of mwparserfromhell.

As for BERT, only running text is taken: no lists, tables, headings, references or templates
(Devlin et al. 2019, section 3.1, https://aclanthology.org/N19-1423/). The library's tree of nodes takes twice as long to build as
the tokens, and nothing here needs it; a test holds that the text is that of the tree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from mwparserfromhell.nodes import HTMLEntity
from mwparserfromhell.parser import Parser, tokens

FILE_NAMESPACES = frozenset({"file", "image", "media", "category"})
"""English names of the namespaces whose links show no text; every wiki knows them beside its own."""
_DROPPED_TAG = re.compile(
    r"ref|references|table|gallery|math|chem|score|syntaxhighlight|source|code|pre|timeline|imagemap|hiero|graph|mapframe"
    r"|maplink|templatedata|section|indicator|div|noinclude|includeonly|style|script|caption"
)
_INTERWIKI = re.compile(r":?[a-z]{2,3}(?:-[a-z]+)*:")
_LIST_ITEM = "\x01"
_LIST_MARKS = frozenset("*#;:")
_HEADING = re.compile(r"^=+[^=].*=+\s*$")
_STYLE = re.compile(r"'{2,5}")
_SWITCH = re.compile(r"__[A-Z]+__")
# What is left in brackets once their templates are gone: "( ; )", "(, born 1900)".
_HOLLOW = re.compile(r"\s?[(\[（][\s,;:.–—-]*[)\]）]")
_BEFORE = re.compile(r"([(（])[\s,;:]+")
_SPACES = re.compile(r"[ \t\xa0]+")
_SPACE_BEFORE = re.compile(r" ([,.;:!?)])")
_BLANK = re.compile(r"\n[ \t]*\n")
_OPENS_TO_CLOSES = {
    tokens.TemplateOpen: tokens.TemplateClose,
    tokens.ArgumentOpen: tokens.ArgumentClose,
    tokens.HeadingStart: tokens.HeadingEnd,
    tokens.CommentStart: tokens.CommentEnd,
}
_TAG_ENDS = (tokens.TagCloseSelfclose, tokens.TagCloseClose)


def prose(source: str, prefixes: frozenset[str] = FILE_NAMESPACES) -> str:
    """The running text of wikitext: paragraphs divided by a blank line; "" where there is none.

    Args:
        source: wikitext.
        prefixes: lower-case namespaces whose links show no text, such as "file".
    """
    found = Parser()._tokenizer.tokenize(source, 0, True)  # quotes for bold and italics stay text
    parts: list[str] = []
    _Walk(found, prefixes).collect(0, (), parts)
    paragraphs = (_paragraph(block) for block in _BLANK.split("".join(parts).replace("\r", "")))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


class _Walk:
    """One pass over the tokens of a page. Each method takes the place of a token and returns the place behind what it read."""

    def __init__(self, found: Sequence[Any], prefixes: frozenset[str]) -> None:
        self._tokens = found
        self._prefixes = prefixes
        self._handlers: dict[type, Callable[[int, list[str]], int]] = {
            tokens.WikilinkOpen: self._wikilink,
            tokens.ExternalLinkOpen: self._external_link,
            tokens.HTMLEntityStart: self._entity,
            tokens.TagOpenOpen: self._tag,
        }

    def collect(self, at: int, stops: tuple[type, ...], parts: list[str]) -> int:
        """Append the running text up to a token of the types `stops`; the place of that token, or the end."""
        found, handlers = self._tokens, self._handlers
        while at < len(found):
            token = found[at]
            kind = type(token)
            if kind is tokens.Text:
                parts.append(token["text"])
                at += 1
            elif kind in stops:
                return at
            elif handler := handlers.get(kind):
                at = handler(at, parts)
            elif kind in _OPENS_TO_CLOSES:
                at = self._skip(at, kind, (_OPENS_TO_CLOSES[kind],))
            else:
                at += 1
        return at

    def _skip(self, at: int, opens: type, closes: tuple[type, ...]) -> int:
        found, depth = self._tokens, 0
        while at < len(found):
            kind = type(found[at])
            at += 1
            if kind is opens:
                depth += 1
            elif kind in closes:
                depth -= 1
                if not depth:
                    break
        return at

    def _wikilink(self, at: int, parts: list[str]) -> int:
        title: list[str] = []
        label: list[str] | None = None
        at = first = self.collect(at + 1, (tokens.WikilinkSeparator, tokens.WikilinkClose), title)
        if at < len(self._tokens) and type(self._tokens[at]) is tokens.WikilinkSeparator:
            label = []
            at = self.collect(at + 1, (tokens.WikilinkClose,), label)
        target = "".join(title)
        if target.partition(":")[0].strip().lower() in self._prefixes or (label is None and _INTERWIKI.match(target)):
            return at + 1
        empty = label is None or at == first + 1  # `[[title|]]` shows its title
        parts += title if empty else label or []
        return at + 1

    def _external_link(self, at: int, parts: list[str]) -> int:
        url: list[str] = []
        at = self.collect(at + 1, (tokens.ExternalLinkSeparator, tokens.ExternalLinkClose), url)
        if at < len(self._tokens) and type(self._tokens[at]) is tokens.ExternalLinkSeparator:
            at = self.collect(at + 1, (tokens.ExternalLinkClose,), parts)
        return at + 1

    def _entity(self, at: int, parts: list[str]) -> int:
        named = hexadecimal = None
        value = ""
        while type(self._tokens[at]) is not tokens.HTMLEntityEnd:
            kind = type(self._tokens[at])
            named = False if kind is tokens.HTMLEntityNumeric else named
            hexadecimal = True if kind is tokens.HTMLEntityHex else hexadecimal
            value = self._tokens[at]["text"] if kind is tokens.Text else value
            at += 1
        named = named is None
        parts.append(HTMLEntity(value, named=named, hexadecimal=bool(hexadecimal)).normalize())
        return at + 1

    def _tag(self, at: int, parts: list[str]) -> int:
        start, mark = at, self._tokens[at].get("wiki_markup")
        if mark in _LIST_MARKS:
            parts.append(_LIST_ITEM)
            return self._skip(start, tokens.TagOpenOpen, _TAG_ENDS)
        written: list[str] = []
        at = self.collect(at + 1, (tokens.TagAttrStart, tokens.TagCloseOpen, tokens.TagCloseSelfclose), written)
        name = "".join(written).strip().lower()
        if name in ("br", "hr"):
            parts.append("\n")
        elif name == "li":
            parts.append("\n" + _LIST_ITEM)
        elif not _DROPPED_TAG.fullmatch(name):
            at = self.collect(at, (tokens.TagCloseOpen, tokens.TagCloseSelfclose), [])  # attributes
            if at < len(self._tokens) and type(self._tokens[at]) is tokens.TagCloseOpen:
                self.collect(at + 1, (tokens.TagOpenClose,), parts)
        return self._skip(start, tokens.TagOpenOpen, _TAG_ENDS)


def _paragraph(block: str) -> str:
    """One paragraph without lists, headings and the remains of broken tables."""
    lines = []
    for line in block.split("\n"):
        line = line.strip()
        if line and _LIST_ITEM not in line and line[0] not in "|!{}" and not _HEADING.match(line):
            lines.append(line)
    text = _STYLE.sub("", _SWITCH.sub("", " ".join(lines)))
    text = _BEFORE.sub(r"\1", _HOLLOW.sub("", text))
    text = _SPACE_BEFORE.sub(r"\1", _SPACES.sub(" ", text)).strip()
    return text if any(character.isalnum() for character in text) else ""
