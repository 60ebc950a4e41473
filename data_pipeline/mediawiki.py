"""MediaWiki XML dumps: the prose of their articles.

As for BERT, only running text is taken: no lists, tables, headings, references or templates
(Devlin et al. 2019, section 3.1, https://aclanthology.org/N19-1423/).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any
from xml.etree import ElementTree
from xml.parsers import expat

import mwparserfromhell
from mwparserfromhell import nodes

from data_pipeline.corpus_files import CorpusError, InputFile
from data_pipeline.records import Document

MAIN_NAMESPACE = "0"
DROPPED_NAMESPACES = ("-2", "6", "14")  # media, files, categories: a link into them shows no running text
_CANONICAL = frozenset({"file", "image", "media", "category"})
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
_REDIRECT = re.compile(r"\s*#\s?\w+[^\n\[]{0,20}\[\[", re.UNICODE)
# What is left in brackets once their templates are gone: "( ; )", "(, born 1900)".
_HOLLOW = re.compile(r"\s?[(\[（][\s,;:.–—-]*[)\]）]")
_BEFORE = re.compile(r"([(（])[\s,;:]+")
_SPACES = re.compile(r"[ \t\xa0]+")
_SPACE_BEFORE = re.compile(r" ([,.;:!?)])")
_BLANK = re.compile(r"\n[ \t]*\n")


def dump_documents(handle: IO[bytes], file: InputFile, counts: Counter[str]) -> Iterator[Document]:
    """Articles of a dump, one document each, with the id `file name:number of the page in the dump`.

    The encoding is the one that the XML declares (UTF-8, UTF-16). Memory holds one page at a time.

    Args:
        handle: uncompressed XML.
        counts: receives `dropped:redirect`, `dropped:not_an_article` (talk, files, templates, ...), `dropped:not_wikitext`
            and `dropped:no_prose`; also `dumps_without_end`, dumps that end after a whole page without the closing tag.

    Yields:
        documents with metadata `title` and `page` (the wiki's page id) and paragraphs divided by a blank line.

    Raises:
        CorpusError: not XML, or cut off inside a page.
    """
    prefixes = _CANONICAL
    number = depth = 0
    root: Any = None
    try:
        for event, element in ElementTree.iterparse(handle, ("start", "end")):
            depth += 1 if event == "start" else -1
            if root is None:
                root = element
            name = element.tag.rpartition("}")[2]
            if event == "start" or name not in ("namespaces", "page"):
                continue
            if name == "namespaces":
                prefixes = _CANONICAL | _prefixes(element)
                continue
            number += 1
            text, reason = _page_text(element, prefixes)
            if reason:
                counts[f"dropped:{reason}"] += 1
            else:
                metadata = {"title": _child(element, "title"), "page": _child(element, "id")}
                yield Document(text=text, id=f"{file.name}:{number}", metadata=metadata)
            root.clear()  # the pages that are done
    except ElementTree.ParseError as error:
        if error.code == expat.errors.codes[expat.errors.XML_ERROR_NO_ELEMENTS] and number and depth == 1:
            counts["dumps_without_end"] += 1  # all pages are whole, the last tag alone is missing
            return
        raise CorpusError(
            f"{file.path}: not a MediaWiki XML dump, or cut off after page {number}: {error}; download it again"
        ) from error


def _page_text(page: Any, prefixes: frozenset[str]) -> tuple[str, str]:
    """(prose, "") of a page, or ("", reason to drop it)."""
    children = {child.tag.rpartition("}")[2]: child for child in page}
    if "redirect" in children:
        return "", "redirect"
    if _child(page, "ns") not in ("", MAIN_NAMESPACE):
        return "", "not_an_article"
    revision = children.get("revision")
    if revision is None:
        return "", "no_prose"
    if _child(revision, "model") not in ("", "wikitext"):
        return "", "not_wikitext"
    source = _child(revision, "text")
    if _REDIRECT.match(source):
        return "", "redirect"
    text = prose(source, prefixes)
    return text, "" if text else "no_prose"


def _child(element: Any, name: str) -> str:
    for child in element:
        if child.tag.rpartition("}")[2] == name:
            return child.text or ""
    return ""


def _prefixes(namespaces: Any) -> frozenset[str]:
    """Lower-case names, in the wiki's language, of the namespaces whose links are dropped."""
    return frozenset((n.text or "").lower() for n in namespaces if n.get("key") in DROPPED_NAMESPACES and n.text)


def prose(source: str, prefixes: frozenset[str] = _CANONICAL) -> str:
    """The running text of wikitext: paragraphs divided by a blank line; "" where there is none.

    Args:
        source: wikitext.
        prefixes: lower-case namespaces whose links show no text, such as "file".
    """
    code = mwparserfromhell.parse(source, skip_style_tags=True)
    parts: list[str] = []
    _collect(code.nodes, prefixes, parts)
    paragraphs = (_paragraph(block) for block in _BLANK.split("".join(parts).replace("\r", "")))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _collect(items: Any, prefixes: frozenset[str], parts: list[str]) -> None:
    for node in items:
        if isinstance(node, nodes.Text):
            parts.append(str(node.value))
        elif isinstance(node, nodes.Wikilink):
            target = str(node.title)
            if target.partition(":")[0].strip().lower() in prefixes or (node.text is None and _INTERWIKI.match(target)):
                continue
            _collect((node.text or node.title).nodes, prefixes, parts)
        elif isinstance(node, nodes.ExternalLink):
            if node.title is not None:
                _collect(node.title.nodes, prefixes, parts)
        elif isinstance(node, nodes.HTMLEntity):
            parts.append(node.normalize())
        elif isinstance(node, nodes.Tag):
            _collect_tag(node, prefixes, parts)


def _collect_tag(node: Any, prefixes: frozenset[str], parts: list[str]) -> None:
    if node.wiki_markup in _LIST_MARKS:
        parts.append(_LIST_ITEM)
        return
    name = str(node.tag).strip().lower()
    if name in ("br", "hr"):
        parts.append("\n")
    elif name == "li":
        parts.append("\n" + _LIST_ITEM)
    elif not _DROPPED_TAG.fullmatch(name) and node.contents is not None:
        _collect(node.contents.nodes, prefixes, parts)


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
