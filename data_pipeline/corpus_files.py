"""Files of a corpus: finding them, cutting them into ranges, and reading lines of bytes from them."""

from __future__ import annotations

import io
import itertools
import posixpath
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.utils import infer_compression
from zstandard import ZstdError

MIN_RANGE_BYTES = 1_000_000
"""A file is not cut into ranges below this."""
_CHUNK = 1 << 20


class CorpusError(ValueError):
    """A corpus that cannot be read; the message names the file, what was expected and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file of the corpus.

    Attributes:
        path: local path or fsspec URL.
        name: path below the folder that all files share, without the suffix of a compression: the first part of the
            ids of its documents, so a corpus that moves keeps its ids.
        size: bytes as stored.
        modified: modification time or version as the file system tells it, "" where it does not.
        limit: bytes of the (uncompressed) content to read; None: all.
        rows: of a CSV file that is cut, (offset, number) of some rows, ascending.
    """

    path: str
    name: str
    size: int
    modified: str
    limit: int | None = None
    rows: tuple[tuple[int, int], ...] = field(default=(), compare=False, repr=False)

    @property
    def compression(self) -> str | None:
        """Compression by the suffix, as fsspec knows it."""
        return infer_compression(self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRange:
    """Bytes `start` to `end` (None: to the end) of the uncompressed content of a file; of a bzip2 file of many streams that is
    cut, of the file as it is stored."""

    file: InputFile
    start: int = 0
    end: int | None = None


def find_files(patterns: Sequence[str], key: str = "corpus.paths") -> list[InputFile]:
    """The files that paths, folders (all files below) and globs name, each once, sorted by name.

    Raises:
        CorpusError: no pattern, or one that names nothing; the message names it.
    """
    if not patterns:
        raise CorpusError(f"{key} is empty: name the files, folders or globs of the corpus")
    found: dict[str, tuple[int, str]] = {}
    for pattern in patterns:
        found.update(_match(pattern, key))
    paths = sorted(found)
    shared = (
        posixpath.dirname(paths[0]) if len(paths) == 1 else posixpath.commonpath([posixpath.dirname(p) for p in paths])
    )
    return [
        InputFile(path=path, name=_name(path, shared), size=found[path][0], modified=found[path][1]) for path in paths
    ]


def _match(pattern: str, key: str) -> dict[str, tuple[int, str]]:
    try:
        system, path = url_to_fs(pattern)
        if any(mark in pattern for mark in "*?["):
            details = system.glob(path, detail=True)
        elif system.isdir(path):
            details = system.find(path, detail=True)
        elif system.exists(path):
            details = {path: system.info(path)}
        else:
            raise CorpusError(f"{key}: {pattern}: no such file or folder")
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, CorpusError):
            raise
        raise CorpusError(f"{key}: {pattern}: cannot look it up: {error}") from error
    local = "file" in (system.protocol if isinstance(system.protocol, tuple) else (system.protocol,))
    files = {}
    for path, info in details.items():
        if posixpath.basename(path).startswith("."):
            continue
        if info.get("islink"):
            # A folder's listing tells of the link itself.
            info = system.info(path) if system.exists(path) else {"type": "missing"}
            if info["type"] != "file":
                raise CorpusError(f"{key}: {path}: a link that leads to no file; name what it leads to, or remove it")
        if info["type"] == "file":
            files[path if local else system.unstrip_protocol(path)] = int(info["size"]), _modified(info)
    if not files:
        raise CorpusError(f"{key}: {pattern}: no file matches")
    return files


def _modified(info: dict[str, Any]) -> str:
    for key in ("mtime", "LastModified", "last_modified", "updated", "ETag", "etag"):
        if info.get(key) is not None:
            return str(info[key])
    return ""


def _name(path: str, shared: str) -> str:
    name = posixpath.relpath(path, shared) if shared else path
    return posixpath.splitext(name)[0] if infer_compression(path) else name


def limit_files(files: Sequence[InputFile], max_megabytes: float) -> list[InputFile]:
    """The first files that hold about `max_megabytes` of uncompressed content together, the last of them in part."""
    if not max_megabytes:
        return list(files)
    left, taken = int(max_megabytes * 1e6), []
    for file in files:
        if left <= 0:
            break
        size = file.size if file.compression is None else _content_size(file, left)
        taken.append(replace(file, limit=left) if size > left else file)
        left -= size
    return taken


def _content_size(file: InputFile, at_most: int) -> int:
    """Uncompressed size, counted no further than just above `at_most`."""
    size = 0
    with open_bytes(file) as handle:
        while size <= at_most and (chunk := handle.read(_CHUNK)):
            size += len(chunk)
    return size


def cut(files: Sequence[InputFile], parts: int, divisible: Callable[[InputFile], bool]) -> list[FileRange]:
    """Ranges of about equal size, a file whole where it is small or not `divisible`.

    Which documents there are, and their ids, never depends on the cutting: each belongs to one range by its position.
    """
    target = max(MIN_RANGE_BYTES, -(-sum(file.size for file in files) // max(parts, 1)))
    ranges = []
    for file in files:
        size = file.size if file.limit is None else min(file.size, file.limit)
        pieces = max(1, round(size / target)) if divisible(file) else 1
        edges = [size * piece // pieces for piece in range(pieces)] + [None]
        for start, end in itertools.pairwise(edges):
            ranges.append(FileRange(file=file, start=start or 0, end=file.limit if end is None else end))
    return ranges


@contextmanager
def open_bytes(file: InputFile) -> Iterator[IO[bytes]]:
    """The uncompressed content.

    Raises:
        CorpusError: the file cannot be opened, or its compressed data is damaged.
    """
    try:
        with fsspec.open(file.path, "rb", compression="infer") as handle:
            # zstandard's stream gives no lines, a buffer around it does.
            yield io.BufferedReader(handle) if file.compression else handle
    except (EOFError, zlib.error, ZstdError) as error:
        raise CorpusError(f"{file.path}: damaged or truncated {file.compression} data: {error}") from error
    except OSError as error:
        raise CorpusError(f"{file.path}: cannot read it: {error.strerror or error}") from error


@contextmanager
def open_stored(file: InputFile) -> Iterator[IO[bytes]]:
    """The file as it lies, compressed or not.

    Raises:
        CorpusError: it cannot be opened or read.
    """
    try:
        with fsspec.open(file.path, "rb", compression=None) as handle:
            yield handle
    except OSError as error:
        raise CorpusError(f"{file.path}: cannot read it: {error.strerror or error}") from error


def line_chunks(handle: IO[bytes], start: int, size: int = _CHUNK) -> Iterator[tuple[int, bytes]]:
    """(offset, whole lines, about `size` bytes of them at once) from the first line that begins at `start` or later."""
    offset = 0
    if start:
        handle.seek(start - 1)
        offset = start - 1 + len(handle.readline())
    while lines := handle.read(size) + handle.readline():
        yield offset, lines
        offset += len(lines)


def byte_lines(handle: IO[bytes], start: int) -> Iterator[tuple[int, bytes]]:
    """(offset, line with its LF) of the lines that begin at `start` or later."""
    offset = 0
    if start:
        handle.seek(start - 1)
        offset = start - 1 + len(handle.readline())
    for line in handle:
        yield offset, line
        offset += len(line)


def text_as_utf8(handle: IO[bytes], encoding: str, errors: str) -> Iterator[bytes]:
    """Lines of a file whose encoding does not keep LF a single byte, such as UTF-16, as UTF-8."""
    reader = io.TextIOWrapper(handle, encoding=encoding, errors=errors, newline="\n")
    for line in reader:
        yield line.encode("utf-8", "surrogatepass")
