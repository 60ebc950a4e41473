"""Rows of a CSV file, and where they begin, so that several tasks can read one file.

A field in quotes may hold line ends, so no byte tells by itself where a row begins: that depends on all quotes before it.
One pass over the file counts them, many times faster than rows are read.

Legend: `Q` quotes, `L` line ends of a piece of the file.
"""

from __future__ import annotations

import codecs
import csv
import io
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import IO, Any

import numpy as np

from data_pipeline import corpus_files
from data_pipeline.corpus_files import CorpusError, FileRange, InputFile, byte_lines, line_chunks, open_bytes

_MAX_STARTS = 1 << 14
_QUOTE, _LF, _CR = b'"\n\r'


def is_divisible_table(file: InputFile, encoding: str) -> bool:
    """Whether rows can be found in the bytes of a CSV file: it is not compressed, and UTF-8."""
    return file.limit is None and file.compression is None and _is_utf8(encoding)


def _is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


def with_row_starts(files: Iterable[InputFile], encoding: str, note: Callable[[str], object] = str) -> list[InputFile]:
    """The files with places where rows begin, some for each part, where a file is large enough to be cut and divisible.

    Args:
        files: of the corpus.
        encoding: of the files.
        note: told about a file in which no place is known, so that one task reads all of it.

    Raises:
        CorpusError: a file cannot be read.
    """
    found = []
    for file in files:
        if file.size >= 2 * corpus_files.MIN_RANGE_BYTES and is_divisible_table(file, encoding):
            file = replace(file, rows=_row_starts(file))
            if not file.rows:
                note(f"{file.path}: read by one task: a quote out of place, or a lone CR, hides where rows begin")
        found.append(file)
    return found


def _delimiter(file: InputFile) -> str:
    return "\t" if file.name.endswith(".tsv") else ","


def _row_starts(file: InputFile) -> tuple[tuple[int, int], ...]:
    """(offset, number) of some rows; none where a quote stands inside a field that is not quoted, or a lone CR between rows.

    There Python's `csv` reads on by rules that counting quotes does not follow.
    """
    found: list[tuple[int, int]] = []
    number = -1  # of the row that begins next, the header not counted
    inside = 0  # whether a quoted field is open: how many quotes came before, modulo 2
    end = -1  # the last byte of the row before
    delimiter = _delimiter(file).encode()
    allowed = np.zeros((2, 256), bool)  # what stands before a quote that opens a field, and after one that closes it
    allowed[:, [_QUOTE, _LF, *delimiter]] = True
    allowed[1, _CR] = True
    # Finer than parts are, so that those come out about equal.
    size = max(corpus_files.MIN_RANGE_BYTES // 8, file.size // _MAX_STARTS)
    with open_bytes(file) as handle:
        for offset, lines in line_chunks(handle, 0, size):
            if offset == 0 and lines.startswith(codecs.BOM_UTF8):
                lines = lines.replace(codecs.BOM_UTF8, delimiter * len(codecs.BOM_UTF8), 1)
            # Between two line ends; of this copy, byte `i` is byte `offset + i - 1` of the file.
            bytes_ = np.frombuffer(b"\n" + lines + b"\n", np.uint8)
            quotes_Q = np.flatnonzero(bytes_[:-1] == _QUOTE)
            opening, closing = quotes_Q[inside::2], quotes_Q[1 - inside :: 2]
            if not (allowed[0][bytes_[opening - 1]].all() and allowed[1][bytes_[closing + 1]].all()):
                return ()
            ends_L = np.flatnonzero(bytes_[1:-1] == _LF) + 1
            ends_L = ends_L[(np.searchsorted(quotes_Q, ends_L) + inside) % 2 == 0]
            if b"\r" in lines:
                returns = np.flatnonzero((bytes_[:-1] == _CR) & (bytes_[1:] != _LF))
                if ((np.searchsorted(quotes_Q, returns) + inside) % 2 == 0).any():
                    return ()
            inside = (inside + len(quotes_Q)) % 2
            if len(ends_L) == 0:
                continue
            ends = ends_L + (offset - 1)
            lengths = np.diff(ends, prepend=end)
            empty = (lengths == 1) | ((lengths == 2) & (bytes_[ends_L - 1] == _CR))
            found.append((int(ends[0]) + 1, number + int(not empty[0])))
            number += len(ends) - int(empty.sum())
            end = int(ends[-1])
    return tuple(found)


def csv_rows(
    handle: IO[bytes], part: FileRange, encoding: str, errors: str, key: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, row) of the rows of a part, those without a field left out. Where `part.file.rows` is empty, the first part is
    the whole file; otherwise a part begins at the first of those rows that lies at its start or later.

    Args:
        handle: the content of the file.
        part: of the file.
        encoding: of the file.
        errors: the codec error handler for undecodable bytes.
        key: a column that must be there.

    Raises:
        CorpusError: no such column, or not a CSV file.
    """
    csv.field_size_limit(sys.maxsize)  # a field is a whole document
    file, delimiter, number = part.file, _delimiter(part.file), 0
    columns: Sequence[str]
    if file.rows:
        header = _lines(handle, 0, file.rows[0][0], errors if part.start == 0 else "replace")  # counted once
        columns = next(csv.reader(header, delimiter=delimiter), [])
        begins, ends = _first_row(file, part.start), _first_row(file, part.end)
        if begins is None:
            return
        start, number = begins
        rows = csv.DictReader(_lines(handle, start, ends[0] if ends else None, errors), columns, delimiter=delimiter)
    elif part.start:
        return
    else:  # a byte order mark is no text
        text = io.TextIOWrapper(handle, "utf-8-sig" if _is_utf8(encoding) else encoding, errors, newline="")
        rows = csv.DictReader(text, delimiter=delimiter)
        columns = rows.fieldnames or []
    require_column(key, columns, file)
    try:
        for row in rows:
            yield number, {name: value for name, value in row.items() if name is not None}
            number += 1
    except csv.Error as error:
        raise CorpusError(f"{file.path}: not a CSV file after row {number}: {error}") from error


def _lines(handle: IO[bytes], start: int, end: int | None, errors: str) -> Iterator[str]:
    for offset, line in byte_lines(handle, start):
        if end is not None and offset >= end:
            return
        yield (line if offset else line.removeprefix(codecs.BOM_UTF8)).decode("utf-8", errors)


def _first_row(file: InputFile, at: int | None) -> tuple[int, int] | None:
    """(offset, number) of the first known row at a byte or later."""
    place = len(file.rows) if at is None else bisect_left(file.rows, (at,))
    return file.rows[place] if place < len(file.rows) else None


def require_column(key: str, columns: Sequence[str], file: InputFile) -> None:
    """Raises CorpusError where a table has no column of this name."""
    if key not in columns:
        raise CorpusError(
            f"{file.path}: no column {key!r}; set corpus.text_key to the one that holds the text: {', '.join(columns)}"
        )
