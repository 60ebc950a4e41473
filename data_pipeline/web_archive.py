"""Web archives: WET files (text that a crawl extracted) and WARC files (pages, their main text extracted here).

https://iipc.github.io/warc-specifications/
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

from fastwarc.warc import ArchiveIterator, WarcRecordType
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import detect_encoding
from resiliparse.parse.html import HTMLTree

from data_pipeline.corpus_files import CorpusError, InputFile
from data_pipeline.records import Document

_HTML = ("text/html", "application/xhtml+xml")
_RECORD = b"WARC/1."
_CHUNK = 1 << 20


def wet_documents(handle: IO[bytes], file: InputFile, counts: Counter[str]) -> Iterator[Document]:
    """One document for each text record, with the id `file name:number of the record`, metadata `url` and `date`.

    A record whose Content-Length does not lead to the next record ends where that one begins: such files exist, with
    lengths in characters or with changed line ends.

    Args:
        handle: uncompressed records.
        counts: receives `dropped:no_text`, `undecodable_bytes` and `records_with_wrong_length`.

    Raises:
        CorpusError: no text record, or the last record is cut off.
    """
    texts = 0
    for number, (headers, body) in enumerate(_records(handle, file, counts), start=1):
        if headers.get("warc-type") != "conversion":
            continue
        texts += 1
        text = _utf8(body, counts)
        if text.strip():
            metadata = {"url": headers.get("warc-target-uri"), "date": headers.get("warc-date")}
            yield Document(text=text, id=f"{file.name}:{number}", metadata=metadata)
        else:
            counts["dropped:no_text"] += 1
    if not texts:
        raise CorpusError(
            f"{file.path}: no text record found; expected a WET file (for WARC set corpus.source = 'warc')"
        )


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


def warc_documents(handle: IO[bytes], file: InputFile, counts: Counter[str]) -> Iterator[Document]:
    """The main text of each page, with the id `file name:number of the response`, metadata `url` and `date`.

    Args:
        handle: uncompressed records.
        counts: receives `dropped:http_status` (not 200), `dropped:not_html` and `dropped:no_text`. Requests, crawl
            information and repeated visits are not documents.

    Raises:
        CorpusError: not a web archive, or damaged.
    """
    kinds = WarcRecordType.response | WarcRecordType.unknown
    number = 0
    try:
        records = ArchiveIterator(handle, record_types=kinds, parse_http=True, auto_decode="all")
        for number, record in enumerate(records, start=1):
            if record.record_type == WarcRecordType.unknown:
                raise CorpusError(f"{file.path}: record {number} has no WARC-Type; expected a WARC file")
            text, reason = _page(record, record.reader.read())
            if reason or not text.strip():
                counts[f"dropped:{reason or 'no_text'}"] += 1
                continue
            metadata = {"url": record.headers.get("WARC-Target-URI"), "date": record.headers.get("WARC-Date")}
            yield Document(text=text, id=f"{file.name}:{number}", metadata=metadata)
    except OSError as error:
        raise CorpusError(f"{file.path}: damaged after response {number}: {error}; download it again") from error
    if not number:
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
