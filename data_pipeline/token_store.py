"""The file of stage 1: tokenised documents as columns, with an offset table per group.

One task writes one file, whatever the number of groups (buckets.py), and stage 2 reads the groups of one bucket out of every file by byte range. A
writer holds at most `SEGMENT_TOKENS` ids in memory; then it sorts them by group and appends a *segment*.

Layout, little-endian: segments, the table (segments, groups, 6) int64 of [offset, documents, key bytes, sentences,
tokens, CRC-32], the footer (JSON), its length (uint64), MAGIC. A segment holds for each group: lengths of the document keys
(uint32), sentences per document (uint32), tokens per sentence (uint32), ids (uint16 or uint32), the keys (UTF-8).

Legend: `D` documents, `S` sentences, `N` tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

MAGIC = b"CLZTOK01"
SEGMENT_TOKENS = 4_000_000
"""Ids in memory before a segment is written: about 70 MB at the peak, while they are sorted by group."""

_GATHERED_AT_ONCE = 1 << 19
_TAIL = struct.Struct("<Q8s")
_COLUMNS = 6


class TokenStoreError(ValueError):
    """A stage-1 file that cannot be used; the message names it and says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Tokenised documents as columns.

    Attributes:
        keys: D document keys.
        sentence_counts: (D,) int64, sentences of each document, at least 1.
        sentence_lengths: (S,) int64, tokens of each sentence, at least 1.
        ids: (N,) uint16 or uint32, all sentences end to end, no special tokens.
    """

    keys: list[str]
    sentence_counts: np.ndarray
    sentence_lengths: np.ndarray
    ids: np.ndarray

    def token_counts(self) -> np.ndarray:
        """(D,) int64, tokens of each document."""
        ends = np.concatenate([[0], np.cumsum(self.sentence_lengths)])
        last = np.cumsum(self.sentence_counts)
        return ends[last] - ends[last - self.sentence_counts]

    def take(self, order: np.ndarray) -> Documents:
        """The documents at these places, in this order."""
        sentence_starts = np.cumsum(self.sentence_counts) - self.sentence_counts
        tokens = self.token_counts()
        token_starts = np.cumsum(tokens) - tokens
        return Documents(
            keys=[self.keys[i] for i in order.tolist()],
            sentence_counts=self.sentence_counts[order],
            sentence_lengths=self.sentence_lengths[ranges(sentence_starts[order], self.sentence_counts[order])],
            ids=gather(self.ids, token_starts[order], tokens[order]),
        )


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Indices of `[start, start + length)` end to end: starts [5, 0], lengths [2, 3] give [5, 6, 0, 1, 2]."""
    ends = np.cumsum(lengths)
    indices = np.repeat(starts - (ends - lengths), lengths)
    indices += np.arange(len(indices), dtype=indices.dtype)
    return indices


def gather(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The values of `[start, start + length)` end to end, a part at a time: an index is four times as large as an id."""
    ends = np.cumsum(lengths)
    out = np.empty(int(ends[-1]) if len(ends) else 0, values.dtype)
    first = done = 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, done + _GATHERED_AT_ONCE, side="right")))
        here = slice(done, int(ends[last - 1]))
        if last == first + 1:  # perhaps one huge document
            out[here] = values[int(starts[first]) : int(starts[first] + lengths[first])]
        else:
            out[here] = values[ranges(starts[first:last], lengths[first:last])]
        first, done = last, here.stop
    return out


def concatenate(parts: Sequence[Documents], dtype: np.dtype) -> Documents:
    """All documents of the parts, in order; ids in `dtype` when there are none."""
    if not parts:
        none = np.zeros(0, np.int64)
        return Documents(keys=[], sentence_counts=none, sentence_lengths=none, ids=np.zeros(0, dtype))
    return Documents(
        keys=[key for part in parts for key in part.keys],
        sentence_counts=np.concatenate([part.sentence_counts for part in parts]),
        sentence_lengths=np.concatenate([part.sentence_lengths for part in parts]),
        ids=np.concatenate([part.ids for part in parts]),
    )


def read_groups(files: Sequence[TokenFile], groups: range, dtype: np.dtype) -> Documents:
    """All documents of groups in a row, file by file. The ids are in memory once, whatever they are read from.

    Raises:
        TokenStoreError: a file is shorter than its table says, or its bytes were changed.
    """
    keys: list[str] = []
    counts, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    ids = bytearray()
    for file in files:
        for part in file.parts(groups):
            keys += part.keys
            counts.append(part.sentence_counts)
            lengths.append(part.sentence_lengths)
            ids += part.ids.astype(dtype, copy=False).data
    return Documents(
        keys=keys,
        sentence_counts=np.concatenate(counts),
        sentence_lengths=np.concatenate(lengths),
        ids=np.frombuffer(ids, dtype),
    )


def key_hash(key: str) -> int:
    """64 bits of a document key, the same in every process and on every machine."""
    return int.from_bytes(
        hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"bucket").digest(), "little"
    )


def id_dtype(vocab_size: int) -> np.dtype:
    """The narrowest unsigned type that holds every id of a vocabulary, at least 16 bits."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class TokenWriter:
    """Appends documents to an open stage-1 file; `close` writes table and footer.

    Args:
        file: open for binary writing, at position 0.
        groups: number of groups of all splits.
        dtype: of the stored ids, see `id_dtype`.
        segment_tokens: ids held in memory before a segment is written.
    """

    def __init__(self, file: IO[bytes], *, groups: int, dtype: np.dtype, segment_tokens: int = SEGMENT_TOKENS) -> None:
        self._file = file
        self._groups = groups
        self._dtype = dtype
        self._segment_tokens = segment_tokens
        self._held: list[Documents] = []
        self._held_groups: list[np.ndarray] = []
        self._held_tokens = 0
        self._table: list[np.ndarray] = []

    def add(self, documents: Documents, groups: np.ndarray) -> None:
        """Append documents; `groups` (D,) names the group of each."""
        self._held.append(documents)
        self._held_groups.append(groups)
        self._held_tokens += len(documents.ids)
        if self._held_tokens >= self._segment_tokens:
            self._write_segment()

    def close(self, footer: dict[str, Any]) -> None:
        """Write what is held, the table and the footer. The file stays open, for the caller to sync."""
        self._write_segment()
        table = np.array(self._table, "<i8").reshape(len(self._table), self._groups, _COLUMNS)
        self._file.write(table.tobytes())
        own = {"dtype": self._dtype.str, "groups": self._groups, "segments": len(self._table)}
        text = json.dumps(footer | own, sort_keys=True).encode()
        self._file.write(text + _TAIL.pack(len(text), MAGIC))

    def _write_segment(self) -> None:
        if not self._held:
            return
        documents = concatenate(self._held, self._dtype)
        groups = np.concatenate(self._held_groups)
        self._held, self._held_groups, self._held_tokens = [], [], 0
        order = np.argsort(groups, kind="stable")
        documents = documents.take(order)
        per_group = np.bincount(groups, minlength=self._groups)
        document_ends = np.cumsum(per_group)
        sentence_ends = np.concatenate([[0], np.cumsum(documents.sentence_counts)])
        token_ends = np.concatenate([[0], np.cumsum(documents.sentence_lengths)])
        rows = np.zeros((self._groups, _COLUMNS), np.int64)
        for group in np.flatnonzero(per_group).tolist():  # most groups of a small corpus are empty
            d0, d1 = int(document_ends[group - 1]) if group else 0, int(document_ends[group])
            s0, s1 = int(sentence_ends[d0]), int(sentence_ends[d1])
            n0, n1 = int(token_ends[s0]), int(token_ends[s1])
            keys = [key.encode("utf-8", "surrogatepass") for key in documents.keys[d0:d1]]
            text = b"".join(keys)
            data = b"".join(
                (
                    np.array([len(key) for key in keys], "<u4").tobytes(),
                    documents.sentence_counts[d0:d1].astype("<u4").tobytes(),
                    documents.sentence_lengths[s0:s1].astype("<u4").tobytes(),
                    documents.ids[n0:n1].astype(self._dtype, copy=False).tobytes(),
                    text,
                )
            )
            rows[group] = self._file.tell(), d1 - d0, len(text), s1 - s0, n1 - n0, zlib.crc32(data)
            self._file.write(data)
        self._table.append(rows)


class TokenFile:
    """A finished stage-1 file.

    Args:
        path: what `TokenWriter` wrote.

    Raises:
        TokenStoreError: missing, truncated or of another kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                tail = self._at(file, size - _TAIL.size, _TAIL.size)
                length, magic = _TAIL.unpack(tail)
                if magic != MAGIC:
                    raise self._damaged("it does not end with the mark of such a file")
                self.footer: dict[str, Any] = json.loads(self._at(file, size - _TAIL.size - length, length))
                self.segments, self.groups = int(self.footer["segments"]), int(self.footer["groups"])
                self._table_at = size - _TAIL.size - length - 8 * _COLUMNS * self.segments * self.groups
                if self._table_at < 0:
                    raise self._damaged("it is too short")
        except (OSError, json.JSONDecodeError, KeyError) as error:
            raise self._damaged(str(error)) from error
        self.dtype = np.dtype(self.footer["dtype"])

    def per_group(self) -> tuple[np.ndarray, np.ndarray]:
        """(groups,) int64 documents of each group, and (groups,) int64 tokens of each."""
        with self.path.open("rb") as file:
            data = self._at(file, self._table_at, 8 * _COLUMNS * self.segments * self.groups)
        table = np.frombuffer(data, "<i8").reshape(self.segments, self.groups, _COLUMNS)
        return table[:, :, 1].sum(axis=0), table[:, :, 4].sum(axis=0)

    def read(self, groups: range) -> Documents:
        """All documents of groups in a row, see `read_groups`."""
        return read_groups([self], groups, self.dtype)

    def parts(self, groups: range) -> Iterator[Documents]:
        """The documents of groups in a row, in the order of segments and groups, those of each together.

        Raises:
            TokenStoreError: the file is shorter than its table says, or its bytes were changed.
        """
        with self.path.open("rb") as file:
            for segment in range(self.segments):
                # Only these rows: the tables of all files together are as large as the square of the corpus.
                at = self._table_at + 8 * _COLUMNS * (segment * self.groups + groups.start)
                rows = np.frombuffer(self._at(file, at, 8 * _COLUMNS * len(groups)), "<i8").reshape(-1, _COLUMNS)
                for row in rows[rows[:, 1] > 0].tolist():
                    yield self._read_group(file, *row)

    def _read_group(
        self, file: IO[bytes], offset: int, documents: int, key_bytes: int, sentences: int, tokens: int, crc: int
    ) -> Documents:
        sizes = (4 * documents, 4 * documents, 4 * sentences, self.dtype.itemsize * tokens, key_bytes)
        data = memoryview(self._at(file, offset, sum(sizes)))
        if zlib.crc32(data) != crc:
            raise self._damaged(f"bytes at {offset} were changed")
        ends = list(itertools.accumulate(sizes))
        text = bytes(data[ends[3] :])
        keys, start = [], 0
        for key_length in np.frombuffer(data[: ends[0]], "<u4").tolist():
            keys.append(text[start : start + key_length].decode("utf-8", "surrogatepass"))
            start += key_length
        return Documents(
            keys=keys,
            sentence_counts=np.frombuffer(data[ends[0] : ends[1]], "<u4").astype(np.int64),
            sentence_lengths=np.frombuffer(data[ends[1] : ends[2]], "<u4").astype(np.int64),
            ids=np.frombuffer(data[ends[2] : ends[3]], self.dtype),
        )

    def _at(self, file: IO[bytes], offset: int, length: int) -> bytes:
        if offset < 0:
            raise self._damaged("it is too short")
        file.seek(offset)
        data = file.read(length)
        if len(data) != length:
            raise self._damaged("it is too short")
        return data

    def _damaged(self, why: str) -> TokenStoreError:
        return TokenStoreError(f"{self.path}: not a complete stage-1 file ({why}); remove it and build again")
