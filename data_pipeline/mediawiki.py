"""MediaWiki XML dumps: the articles of a dump or of a part of it.

A dump is cut between its pages: a page belongs to the part in which its tag begins. A bzip2 file is cut where one of its streams
begins, so the multistream dumps of Wikimedia (100 pages a stream) are read by many tasks.
"""

from __future__ import annotations

import bz2
import codecs
import io
import re
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any
from xml.etree import ElementTree

from data_pipeline.corpus_files import CorpusError, FileRange, InputFile, open_bytes, open_stored
from data_pipeline.records import Document
from data_pipeline.wikitext import FILE_NAMESPACES, prose

MAIN_NAMESPACE = "0"
DROPPED_NAMESPACES = ("-2", "6", "14")  # media, files, categories: a link into them shows no running text
_REDIRECT = re.compile(r"\s*#\s?\w+[^\n\[]{0,20}\[\[", re.UNICODE)
_PAGE, _PAGE_END, _END = b"<page>", b"</page>", b"</mediawiki>"
_NAMESPACE = re.compile(r"<namespace\b[^>]*\bkey=\"(-?\d+)\"[^>]*>([^<]*)</namespace>")
_DECLARED = re.compile(rb"""<\?xml[^>]*encoding=["']([A-Za-z0-9._-]+)["']""")
_STREAM = re.compile(rb"BZh[1-9](?:\x31\x41\x59\x26\x53\x59|\x17\x72\x45\x38\x50\x90)")  # begins, or is empty
_STREAM_BYTES = 10
_CHUNK = 1 << 20
_TAIL_BYTES = 256  # of these the closing tag is a part


def dump_documents(part: FileRange, counts: Counter[str]) -> Iterator[Document]:
    """Articles of a part of a dump, one document each, with the id `file name:page id`.

    The encoding is the one that the XML declares (UTF-8, UTF-16); another than UTF-8 is read whole with the first part. Memory
    holds one page at a time.

    Args:
        part: of a file as it is stored where that is bzip2, else of its content.
        counts: receives `dropped:redirect`, `dropped:not_an_article` (talk, files, templates, ...), `dropped:not_wikitext`
            and `dropped:no_prose`; also `dumps_without_end`, dumps that end after a whole page without the closing tag.

    Yields:
        documents with metadata `title` and `page` (the wiki's page id) and paragraphs divided by a blank line.

    Raises:
        CorpusError: not XML, or cut off inside a page.
    """
    file = part.file
    header, encoding = _header(file)
    if encoding != "utf-8" and part.start:
        return
    prefixes = FILE_NAMESPACES | _prefixes(header)
    chunks = _wide_chunks(file, encoding) if encoding != "utf-8" else _chunks(part)
    pages = _pages(chunks, counts, from_start=part.start == 0)
    number = 0
    try:
        for source in pages:
            number += 1
            page = ElementTree.fromstring(source)
            text, reason = _page_text(page, prefixes)
            if reason:
                counts[f"dropped:{reason}"] += 1
                continue
            metadata = {"title": _child(page, "title"), "page": _child(page, "id")}
            yield Document(text=text, id=f"{file.name}:{metadata['page'] or metadata['title']}", metadata=metadata)
    except (ElementTree.ParseError, UnicodeDecodeError, EOFError) as error:
        where = f" of the part that begins at byte {part.start}" if part.start else ""
        raise CorpusError(
            f"{file.path}: not a MediaWiki XML dump, or cut off after page {number}{where}: {error}; download it again"
        ) from error


def _header(file: InputFile) -> tuple[str, str]:
    """(what comes before the first page, encoding) of a dump."""
    with open_bytes(file) as handle:
        start = handle.read(_CHUNK)
    declared = _DECLARED.search(start[:200])
    encoding = declared[1].decode() if declared else "utf-8"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    try:
        encoding = codecs.lookup(encoding).name
        header = start.decode(encoding, "replace").partition("<page>")[0]
    except LookupError as error:
        raise CorpusError(f"{file.path}: declares the encoding {encoding!r}, which Python does not know") from error
    if "<mediawiki" not in header:
        raise CorpusError(
            f"{file.path}: not a MediaWiki XML dump, or cut off after page 0: expected <mediawiki> in front of the first <page>"
        )
    return header, encoding


def _chunks(part: FileRange) -> Iterator[tuple[bytes, bool]]:
    """(bytes of the content, whether they are the part's own) from the start of a part to the end of the file."""
    if part.file.compression == "bz2":
        yield from _bzip2_chunks(part)
        return
    with open_bytes(part.file) as handle:
        at = part.start
        if at:
            handle.seek(at)
        while chunk := handle.read(_CHUNK if part.end is None or at >= part.end else min(_CHUNK, part.end - at)):
            yield chunk, part.end is None or at < part.end
            at += len(chunk)


def _bzip2_chunks(part: FileRange) -> Iterator[tuple[bytes, bool]]:
    """The content of the streams that begin in a part, and what follows."""
    with open_stored(part.file) as handle:
        at, held = _find_stream(handle, part)
        if part.end is not None and at >= part.end:
            return
        taken = at + len(held)  # bytes of the file that were read; `at` is where the next stream begins
        while held.startswith(b"BZh"):
            own = part.end is None or at < part.end
            stream = bz2.BZ2Decompressor()
            while not stream.eof:
                if stream.needs_input and not held:
                    held = handle.read(_CHUNK)
                    taken += len(held)
                    if not held:
                        raise CorpusError(
                            f"{part.file.path}: damaged or truncated bz2 data: the last stream has no end"
                        )
                try:
                    yield stream.decompress(held, max_length=_CHUNK), own
                except OSError as error:
                    raise CorpusError(f"{part.file.path}: damaged or truncated bz2 data: {error}") from error
                held = b""
            held = stream.unused_data
            if len(held) < _STREAM_BYTES:
                more = handle.read(_CHUNK)
                held, taken = held + more, taken + len(more)
            at = taken - len(held)


def _find_stream(handle: IO[bytes], part: FileRange) -> tuple[int, bytes]:
    """(offset of the first stream that begins in the part, the bytes from there that were read)."""
    handle.seek(part.start)
    held, base = b"", part.start
    while (part.end is None or base < part.end) and (chunk := handle.read(_CHUNK)):
        held += chunk
        if found := _STREAM.search(held):
            return base + found.start(), held[found.start() :]
        kept = held[-_STREAM_BYTES:]
        base, held = base + len(held) - len(kept), kept
    return base, b""


def _wide_chunks(file: InputFile, encoding: str) -> Iterator[tuple[bytes, bool]]:
    with open_bytes(file) as handle:
        text = io.TextIOWrapper(handle, encoding=encoding, newline="")
        while chunk := text.read(_CHUNK):
            yield chunk.encode("utf-8", "surrogatepass"), True


def _pages(chunks: Iterator[tuple[bytes, bool]], counts: Counter[str], from_start: bool) -> Iterator[bytes]:
    """The XML of each page whose tag begins in the part's own bytes.

    Raises:
        EOFError: the content ends inside a page.
    """
    held = b""
    own = seen = 0  # bytes of `held` that are the part's own; those searched already
    begun = -1  # where the page that is being read begins
    for chunk, is_own in chunks:
        held += chunk
        own += len(chunk) if is_own else 0
        while True:
            if begun < 0:
                begun = held.find(_PAGE, seen)
                if begun < 0:
                    seen = max(seen, len(held) - len(_PAGE) + 1)
                    break
                if begun >= own:
                    return
                seen = begun
            end = held.find(_PAGE_END, seen)
            if end < 0:
                seen = max(seen, len(held) - len(_PAGE_END) + 1)
                break
            seen = end + len(_PAGE_END)
            yield held[begun:seen]
            begun = -1
        if begun < 0 and not is_own and seen >= own:
            return
        kept = begun if begun >= 0 else max(0, min(seen, len(held) - _TAIL_BYTES))
        held, own, seen, begun = held[kept:], max(0, own - kept), seen - kept, min(begun, 0)
    if begun >= 0:
        raise EOFError("the file ends inside a page")
    # A part shorter than the tail may begin inside the closing tag.
    if _END not in held and (len(held) >= _TAIL_BYTES or from_start):
        counts["dumps_without_end"] += 1


def _page_text(page: Any, prefixes: frozenset[str]) -> tuple[str, str]:
    """(prose, "") of a page, or ("", reason to drop it)."""
    children = {child.tag: child for child in page}
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
        if child.tag == name:
            return child.text or ""
    return ""


def _prefixes(header: str) -> frozenset[str]:
    """Lower-case names, in the wiki's language, of the namespaces whose links are dropped."""
    return frozenset(name.lower() for key, name in _NAMESPACE.findall(header) if key in DROPPED_NAMESPACES and name)
