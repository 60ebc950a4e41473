"""Documents of files that are read whole: one text a file, tables of rows, WikiText, dumps and web archives."""

from __future__ import annotations

import codecs
import io
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import IO, Any

from data_pipeline.config import CorpusConfig
from data_pipeline.corpus_files import CorpusError, FileRange, InputFile, open_bytes
from data_pipeline.csv_rows import csv_rows, is_divisible_table, require_column
from data_pipeline.records import Document

RECORD_SOURCES = frozenset({"file", "csv", "parquet", "wikitext", "mediawiki", "wet", "warc"})
"""Values of `corpus.source` that this module reads."""

_PARQUET_ROWS = 1000
# Lines of Project Gutenberg around the text of a book.
_BOOK_START = re.compile(
    r"^\*\*\* ?START OF (?:THIS|THE) PROJECT GUTENBERG EBOOK.*?\*\*\*[^\n]*\n", re.MULTILINE | re.DOTALL
)
_BOOK_END = re.compile(
    r"^(?:\*\*\* ?END OF (?:THIS|THE) PROJECT GUTENBERG EBOOK|End of (?:the )?Project Gutenberg['’]?s?\b)", re.MULTILINE
)
_CREDITS = re.compile(r"\s*(?:(?:Produced by|E-text prepared by|Transcribed by)(?:[^\n]+\n)+)")
_TITLE = re.compile(r"^ = [^=].* = ?$")
_SUBTITLE = re.compile(r"^ (?:= ){2,}.*(?:= )+$")
_JOINED = re.compile(r" @([-,.])@ ")


def divisible_records(corpus: CorpusConfig, file: InputFile) -> bool:
    """Whether parts of a file can be read by several tasks: tables by rows or row groups, dumps by their pages, crawls by
    their gzip members."""
    if file.limit is not None:
        return False
    if corpus.source == "csv":
        return is_divisible_table(file, corpus.encoding)
    by_source: dict[str, tuple[str | None, ...]] = {
        "parquet": (None,),
        "mediawiki": (None, "bz2"),
        "wet": ("gzip",),
        "warc": ("gzip",),
    }
    return file.compression in by_source.get(corpus.source, ())


def record_documents(corpus: CorpusConfig, part: FileRange, counts: Counter[str], errors: str) -> Iterator[Document]:
    """Documents of one file under `corpus.source`, one of `RECORD_SOURCES`, or of a part of it.

    With `corpus.max_megabytes` they end once the file's share of it is reached, measured in UTF-8 bytes of text.

    Args:
        counts: receives what was dropped, by reason.
        errors: the codec error handler for undecodable bytes.

    Raises:
        CorpusError: the file is damaged, or of another format.
        UnicodeDecodeError: undecodable bytes, where `errors` is strict.
    """
    left = part.file.limit
    if left is not None:
        part = FileRange(file=part.file)  # it ends by the amount of text
    for document in _read(corpus, part, counts, errors):
        if left is not None and left <= 0:
            return
        yield document
        if left is not None:
            left -= len(document.text.encode("utf-8", "surrogatepass"))


def _read(corpus: CorpusConfig, part: FileRange, counts: Counter[str], errors: str) -> Iterator[Document]:
    # The libraries of some formats are loaded by those who read them.
    if corpus.source == "mediawiki":
        from data_pipeline.mediawiki import dump_documents

        yield from dump_documents(part, counts)
        return
    if corpus.source in ("wet", "warc"):
        from data_pipeline.web_archive import warc_documents, wet_documents

        yield from (wet_documents if corpus.source == "wet" else warc_documents)(part, counts)
        return
    with open_bytes(part.file) as handle:
        key = corpus.text_key
        if corpus.source == "parquet":
            yield from _documents_of_rows(_parquet_rows(handle, part, key), key, part.file, counts)
        elif corpus.source == "csv":
            rows = csv_rows(handle, part, corpus.encoding, errors, key)
            yield from _documents_of_rows(rows, key, part.file, counts)
        else:
            yield from _read_whole(corpus, part.file, handle, counts, errors)


def _read_whole(
    corpus: CorpusConfig, file: InputFile, handle: IO[bytes], counts: Counter[str], errors: str
) -> Iterator[Document]:
    # A byte order mark is no text.
    encoding = "utf-8-sig" if codecs.lookup(corpus.encoding).name == "utf-8" else corpus.encoding
    text = io.TextIOWrapper(handle, encoding=encoding, errors=errors, newline="\n")
    if corpus.source == "wikitext":
        return _wikitext_documents(text, file, counts)
    return _one_document(text.read().replace("\r\n", "\n"), file, counts)


def _one_document(text: str, file: InputFile, counts: Counter[str]) -> Iterator[Document]:
    text = without_gutenberg_frame(text.removeprefix("\ufeff"), counts)  # "utf-16-le" and its kin keep the mark
    if text.strip():
        yield Document(text=text, id=f"{file.name}:0")
    else:
        counts["dropped:blank" if text else "dropped:empty"] += 1


def without_gutenberg_frame(text: str, counts: Counter[str]) -> str:
    """A book of Project Gutenberg without header, credits and licence; any other text as it is.

    Counts `gutenberg_books` and `gutenberg_characters`, the characters taken off.
    """
    start = _BOOK_START.search(text)
    if start is None:
        return text
    end = _BOOK_END.search(text, start.end())
    book = text[start.end() : end.start() if end else len(text)]
    book = book[match.end() :] if (match := _CREDITS.match(book)) else book
    counts["gutenberg_books"] += 1
    counts["gutenberg_characters"] += len(text) - len(book)
    return book.strip("\n") + "\n"


def _wikitext_documents(lines: Iterable[str], file: InputFile, counts: Counter[str]) -> Iterator[Document]:
    """Articles of a WikiText file (Merity et al. 2016, https://arxiv.org/abs/1609.07843) without their headings.

    An article begins at ` = Title = `. `@-@`, `@,@` and `@.@` become the characters they stand for; `<unk>`, a word that
    WikiText has removed, stays and is counted as `wikitext_unknown_words`.
    """
    title, held, number = "", [], 0
    for line in itertools.chain(lines, [" = end = "]):
        line = line.rstrip("\r\n").removesuffix(" ") + " "
        if not _TITLE.match(line):
            if line.strip() and not _SUBTITLE.match(line):
                held.append(_JOINED.sub(r"\1", line.strip()))
            elif line.strip():
                counts["wikitext_headings"] += 1
            continue
        if held:
            joined = "\n\n".join(held)
            counts["wikitext_unknown_words"] += joined.count("<unk>")
            yield Document(text=joined, id=f"{file.name}:{number}", metadata={"title": title})
            number += 1
        elif title:
            counts["dropped:empty"] += 1
        title, held = line.strip(" ="), []


def _documents_of_rows(
    rows: Iterable[tuple[int, dict[str, Any]]], key: str, file: InputFile, counts: Counter[str]
) -> Iterator[Document]:
    """One document a numbered row with text in the column `key`; the other columns are its metadata."""
    for number, row in rows:
        text = row.pop(key, None)
        if not isinstance(text, str) or not text.strip():
            counts["dropped:no_text"] += 1
            continue
        yield Document(text=without_gutenberg_frame(text, counts), id=f"{file.name}:{number}", metadata=row)


def _parquet_rows(handle: IO[bytes], part: FileRange, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number in the file, row) of the row groups that begin in a part."""
    import pyarrow.parquet as pq
    from pyarrow import ArrowException

    try:
        table = pq.ParquetFile(handle)
        require_column(key, table.schema_arrow.names, part.file)
        number = 0
        for group in range(table.num_row_groups):
            about = table.metadata.row_group(group)
            begins = _offset(about.column(0))
            if begins < part.start or (part.end is not None and begins >= part.end):
                number += about.num_rows
                continue
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, row_groups=[group]):
                yield from enumerate(batch.to_pylist(), start=number)
                number += len(batch)
    except ArrowException as error:
        raise CorpusError(f"{part.file.path}: not a Parquet file, or damaged: {error}") from error


def _offset(column: Any) -> int:
    """First byte of a column of a row group in its file."""
    return column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
