"""Web archives: WET files (text that a crawl extracted) and WARC files (pages, their main text extracted here).

In gzip each record is a member of its own, so a file is cut where a member begins: a record belongs to the part in which its
member does.

https://iipc.github.io/warc-specifications/
"""

from __future__ import annotations

import io
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from fastwarc.warc import ArchiveIterator, WarcRecordType
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import detect_encoding
from resiliparse.parse.html import HTMLTree

from data_pipeline.corpus_files import CorpusError, FileRange, InputFile, open_bytes, open_stored
from data_pipeline.records import Document

_HTML = ("text/html", "application/xhtml+xml")
_RECORD = b"WARC/1."
_CHUNK = 1 << 20
_MEMBER = b"\x1f\x8b\x08"
_PROBE_BYTES = 4096
"""Of a member that is enough to see whether a record begins in it."""


def wet_documents(part: FileRange, counts: Counter[str]) -> Iterator[Document]:
    """One document for each text record, with the id `file name:id of the record`, metadata `url` and `date`.

    A record whose Content-Length does not lead to the next record ends where that one begins: such files exist, with
    lengths in characters or with changed line ends.

    Args:
        part: of a file as it is stored where it does not cover the whole file.
        counts: receives `dropped:no_text`, `undecodable_bytes` and `records_with_wrong_length`.

    Raises:
        CorpusError: no text record in a whole file, or the last record is cut off.
    """
    texts, file = 0, part.file
    with _open_records(part) as handle:
        for number, (headers, body) in enumerate(_records(handle, file, counts), start=1):
            if headers.get("warc-type") != "conversion":
                continue
            texts += 1
            text = _utf8(body, counts)
            if text.strip():
                metadata = {"url": headers.get("warc-target-uri"), "date": headers.get("warc-date")}
                name = headers.get("warc-record-id") or metadata["url"] or str(number)
                yield Document(text=text, id=f"{file.name}:{name.strip('<>')}", metadata=metadata)
            else:
                counts["dropped:no_text"] += 1
    if not texts and _is_whole(part):
        raise CorpusError(
            f"{file.path}: no text record found; expected a WET file (for WARC set corpus.source = 'warc')"
        )


def _is_whole(part: FileRange) -> bool:
    return part.start == 0 and part.end is None


@contextmanager
def _open_records(part: FileRange) -> Iterator[IO[bytes]]:
    """The uncompressed records that begin in a part."""
    if _is_whole(part):
        with open_bytes(part.file) as handle:
            yield handle
        return
    try:
        with open_stored(part.file) as handle:
            yield io.BufferedReader(_Members(handle, part), _CHUNK)
    except (EOFError, zlib.error) as error:
        raise CorpusError(f"{part.file.path}: damaged or truncated gzip data: {error}") from error


class _Members(io.RawIOBase):
    """The content of the gzip members that begin in a part, as a stream. fastwarc skips records by seeking, always forward."""

    def __init__(self, handle: IO[bytes], part: FileRange) -> None:
        self._chunks = _member_chunks(handle, part)
        self._held = b""
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._held = chunk
        size = min(len(buffer), len(self._held))
        buffer[:size] = self._held[:size]
        self._held = self._held[size:]
        self._at += size
        return size

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        target = offset if whence == io.SEEK_SET else self._at + offset
        if whence == io.SEEK_END or target < self._at:
            raise io.UnsupportedOperation("this stream goes forward only")
        while self._at < target and self.read(min(_CHUNK, target - self._at)):
            pass
        return self._at


def _member_chunks(handle: IO[bytes], part: FileRange) -> Iterator[bytes]:
    at, held = _find_member(handle, part)
    taken = at + len(held)  # bytes of the file that were read; `at` is where the next member begins
    while held and (part.end is None or at < part.end):
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            if not held:
                held = handle.read(_CHUNK)
                taken += len(held)
                if not held:
                    raise EOFError("the last member has no end")
            yield member.decompress(held, _CHUNK)
            held = member.unconsumed_tail
        held = member.unused_data.lstrip(b"\0")
        if len(held) < _PROBE_BYTES:
            more = handle.read(_CHUNK)
            held, taken = held + more, taken + len(more)
        at = taken - len(held)


def _find_member(handle: IO[bytes], part: FileRange) -> tuple[int, bytes]:
    """(offset of the first member with a record that begins in the part, the bytes from there that were read)."""
    handle.seek(part.start)
    held, base, seen, chunk = b"", part.start, 0, b"?"
    while chunk and (part.end is None or base + seen < part.end):
        chunk = handle.read(_CHUNK)
        held += chunk
        while (found := held.find(_MEMBER, seen)) >= 0:
            if chunk and len(held) - found < _PROBE_BYTES:
                break  # the next chunk tells
            if _begins_record(held[found : found + _PROBE_BYTES]):
                return base + found, held[found:]
            seen = found + 1
        kept = found if found >= 0 else max(seen, len(held) - len(_MEMBER) + 1)
        base, held, seen = base + kept, held[kept:], 0
    return base, b""


def _begins_record(member: bytes) -> bool:
    try:
        return zlib.decompressobj(wbits=31).decompress(member, len(_RECORD)) == _RECORD
    except zlib.error:
        return False


def _records(handle: IO[bytes], file: InputFile, counts: Counter[str]) -> Iterator[tuple[dict[str, str], bytes]]:
    """(headers with lower-case names, content) of each record."""
    buffer = _Buffer(handle)
    while version := buffer.skip_blank():
        if not version.startswith(_RECORD):
            raise CorpusError(
                f"{file.path}: expected a line {_RECORD.decode()}x at byte {buffer.offset}, got {version[:40]!r}"
            )
        headers: dict[str, str] = {}
        buffer.line()
        while line := buffer.line().strip():
            name, _, value = line.decode("utf-8", "replace").partition(":")
            headers[name.strip().lower()] = value.strip()
        length = headers.get("content-length", "")
        if not length.isdecimal():
            raise CorpusError(f"{file.path}: a record before byte {buffer.offset} has no Content-Length")
        body, right = buffer.content(int(length))
        if body is None:
            raise CorpusError(f"{file.path}: cut off inside its last record; download it again")
        counts["records_with_wrong_length"] += not right
        yield headers, body


class _Buffer:
    """A window of a stream; records are taken from its front."""

    def __init__(self, handle: IO[bytes]) -> None:
        self.offset = 0
        self._handle = handle
        self._held = b""
        self._ended = False

    def _hold(self, size: int) -> bool:
        """Whether `size` bytes could be made ready."""
        while len(self._held) < size and not self._ended:
            chunk = self._handle.read(max(_CHUNK, size - len(self._held)))
            self._ended = not chunk
            self._held += chunk
        return len(self._held) >= size

    def _take(self, size: int) -> bytes:
        taken, self._held = self._held[:size], self._held[size:]
        self.offset += len(taken)
        return taken

    def skip_blank(self) -> bytes:
        """Skip empty lines; the bytes that follow, none at the end."""
        while self._hold(1) and self._held[:1] in b"\r\n":
            self._take(len(self._held) - len(self._held.lstrip(b"\r\n")))
        self._hold(64)
        return self._held[:64]

    def line(self) -> bytes:
        """The next line."""
        size = 1024
        while b"\n" not in self._held[:size] and self._hold(size):
            size *= 2
        return self._take(self._held.find(b"\n") + 1 or len(self._held))

    def content(self, length: int) -> tuple[bytes | None, bool]:
        """Content of a record and whether `length` was right; None where the stream ends inside it."""
        whole = self._hold(length)
        self._hold(length + 64)
        after = self._held[length : length + 64].lstrip(b"\r\n")
        if whole and (not after or after.startswith(_RECORD)):
            return self._take(length), True
        size = _CHUNK
        while (found := self._held.find(b"\n" + _RECORD)) < 0 and self._hold(size):
            size += len(self._held)
        if found < 0 and not whole:
            return None, False
        return self._take(found + 1 if found >= 0 else len(self._held)), False


def _utf8(body: bytes, counts: Counter[str]) -> str:
    text = body.decode("utf-8", "replace").replace("\r\n", "\n")
    if "\ufffd" in text:
        counts["undecodable_bytes"] += len(body) - len(body.decode("utf-8", "ignore").encode())
    return text


def warc_documents(part: FileRange, counts: Counter[str]) -> Iterator[Document]:
    """The main text of each page, with the id `file name:id of the record`, metadata `url` and `date`.

    Args:
        part: of a file as it is stored where it does not cover the whole file.
        counts: receives `dropped:http_status` (not 200), `dropped:not_html` and `dropped:no_text`. Requests, crawl
            information and repeated visits are not documents.

    Raises:
        CorpusError: not a web archive, or damaged.
    """
    number, file = 0, part.file
    kinds = WarcRecordType.response | WarcRecordType.unknown
    try:
        with _open_records(part) as handle:
            records = ArchiveIterator(handle, record_types=kinds, parse_http=True, auto_decode="all")
            for number, record in enumerate(records, start=1):
                if record.record_type == WarcRecordType.unknown:
                    raise CorpusError(f"{file.path}: record {number} has no WARC-Type; expected a WARC file")
                text, reason = _page(record, record.reader.read())
                if reason or not text.strip():
                    counts[f"dropped:{reason or 'no_text'}"] += 1
                    continue
                metadata = {"url": record.headers.get("WARC-Target-URI"), "date": record.headers.get("WARC-Date")}
                name = record.record_id or metadata["url"] or str(number)
                yield Document(text=text, id=f"{file.name}:{name.strip('<>')}", metadata=metadata)
    except OSError as error:
        raise CorpusError(f"{file.path}: damaged after response {number}: {error}; download it again") from error
    if not number and _is_whole(part):
        raise CorpusError(
            f"{file.path}: no response found; expected a WARC file (for a WET file set corpus.source = 'wet')"
        )


def _page(record: Any, body: bytes) -> tuple[str, str]:
    """(main text, "") of an HTML page, or ("", reason to drop it)."""
    if record.is_http and record.http_headers is not None and record.http_headers.status_code not in (200, None):
        return "", "http_status"
    kind = record.headers.get("WARC-Identified-Payload-Type") or record.http_content_type or ""
    if not kind.lower().startswith(_HTML):
        return "", "not_html"
    charset: str = record.http_charset or detect_encoding(body) or "utf-8"
    tree = HTMLTree.parse_from_bytes(body, charset)
    return extract_plain_text(tree, main_content=True, alt_texts=False, list_bullets=False, noscript=False), ""
