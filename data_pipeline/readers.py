"""Documents of a corpus, partitioned into tasks: plain text, JSON lines, the embedded corpus and what `record_readers` has.

The documents, their order inside a file and their ids depend on the files only, never on the number of tasks.
"""

from __future__ import annotations

import codecs
import hashlib
import heapq
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import orjson
from datatrove.pipeline.base import PipelineStep

from data_pipeline.clean_stage import DroppedDocuments
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus_files import (
    CorpusError,
    FileRange,
    InputFile,
    byte_lines,
    cut,
    find_files,
    limit_files,
    line_chunks,
    open_bytes,
    text_as_utf8,
)
from data_pipeline.embedded import FILE_NAME, materialise_embedded
from data_pipeline.record_readers import RECORD_SOURCES, divisible_records, record_documents, without_gutenberg_frame
from data_pipeline.records import Document

__all__ = ["CorpusError", "InputFile", "ReadStep", "find_inputs", "is_held_out", "read_documents"]

_COUNTING = "clozeworks.count"
# One search for two line ends in a row is several times as fast as looking at every line.
_BLANK_LINES = re.compile(rb"\n[ \t\r\v\f]*\n(?:[ \t\r\v\f]*\n)*")
_undecodable = 0


def _count_and_replace(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler: each undecodable sequence becomes U+FFFD, its bytes are counted."""
    global _undecodable
    if not isinstance(error, UnicodeDecodeError):
        raise error
    _undecodable += error.end - error.start
    return "\ufffd", error.end


codecs.register_error(_COUNTING, _count_and_replace)


def is_held_out(document_id: str, share: float) -> bool:
    """Whether a document belongs to the held-out part: a hash of its id alone decides."""
    digest = hashlib.blake2b(document_id.encode("utf-8", "surrogatepass"), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(digest, "big") < share * 2**64


def find_inputs(corpus: CorpusConfig, corpus_dir: Path, materialise: bool = True) -> list[InputFile]:
    """The files to read.

    Args:
        corpus: `[corpus]`.
        corpus_dir: where the embedded corpus is written, once.
        materialise: false: do not write it; where it is missing its size is what was asked for.

    Raises:
        CorpusError: nothing there, or an encoding that Python does not know.
    """
    try:
        codecs.lookup(corpus.encoding)
    except LookupError as error:
        raise CorpusError(f"corpus.encoding: {corpus.encoding!r} is not an encoding that Python knows") from error
    if corpus.source != "embedded":
        return limit_files(find_files(corpus.paths), corpus.max_megabytes)
    path = Path(corpus_dir) / FILE_NAME
    if materialise:
        path = materialise_embedded(corpus_dir, corpus.max_megabytes)
    if not path.exists():
        return [InputFile(path=str(path), name=path.name, size=int(corpus.max_megabytes * 1e6), modified="")]
    # Its content is a function of the signature that is kept with it, so its time does not matter.
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return [InputFile(path=str(path), name=path.name, size=path.stat().st_size, modified=digest)]


def read_documents(
    corpus: CorpusConfig,
    inputs: Sequence[InputFile],
    task: int = 0,
    tasks: int = 1,
    counts: Counter[str] | None = None,
) -> Iterator[Document]:
    """Documents of one task out of `tasks`; all tasks together yield every document once.

    Ids are `file name:byte offset` and unique; those of the embedded corpus are its own. A document of a JSON line has
    the line's other fields as metadata, its `id` among them.

    Args:
        counts: receives `dropped:blank` (text: documents of white space only), `dropped:not_json`, `dropped:no_text`
            (JSON lines), `undecodable_bytes`, and what the reader of another format counts.

    Raises:
        CorpusError: a file cannot be read, or holds undecodable bytes where `corpus.encoding_errors` is "strict".
    """
    counts = Counter() if counts is None else counts
    # More ranges than tasks, so that tasks of unequal files come out about even.
    ranges = cut(inputs, 1 if tasks == 1 else 4 * tasks, partial(is_divisible, corpus))
    if corpus.source in RECORD_SOURCES:
        for part in _share(ranges, task, tasks):
            yield from _records(corpus, part, counts)
        return
    wide = _wide(corpus.encoding)
    for part in ranges[task::tasks]:
        decoder = _Decoder(corpus, part.file, counts)
        with open_bytes(part.file) as handle:
            if corpus.source == "text":
                yield from _text_documents(decoder.chunks(handle, part, wide), part, decoder)
            else:
                lines = decoder.lines(handle, part, wide)
                yield from _json_documents(lines, part, decoder, corpus)


def is_divisible(corpus: CorpusConfig, file: InputFile) -> bool:
    """Whether several tasks can read parts of a file; otherwise one task reads it whole."""
    if corpus.source in RECORD_SOURCES:
        return divisible_records(corpus, file)
    return file.compression is None and not _wide(corpus.encoding)


def _share(ranges: Sequence[FileRange], task: int, tasks: int) -> list[FileRange]:
    """The parts of one task: each goes, the largest first, to the task that has the least so far."""
    loads = [(0, number) for number in range(tasks)]
    mine = []
    sizes = {part: (part.file.size if part.end is None else part.end) - part.start for part in ranges}
    for part in sorted(ranges, key=lambda part: (-sizes[part], part.file.path, part.start)):
        load, number = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[part] + 1, number))
        if number == task:
            mine.append(part)
    return sorted(mine, key=lambda part: (part.file.path, part.start))


def _records(corpus: CorpusConfig, part: FileRange, counts: Counter[str]) -> Iterator[Document]:
    strict = corpus.encoding_errors == "strict"
    before = _undecodable
    try:
        yield from record_documents(corpus, part, counts, "strict" if strict else _COUNTING)
    except UnicodeError as error:
        raise CorpusError(_not_decodable(part.file, corpus.encoding, error)) from error
    finally:
        counts["undecodable_bytes"] += _undecodable - before


def _not_decodable(file: InputFile, encoding: str, error: UnicodeError, at: str = "") -> str:
    return (
        f"{file.path}: not {encoding}{at}: {error}; set corpus.encoding, or "
        "corpus.encoding_errors = 'replace' to replace and count such bytes"
    )


class _Decoder:
    """Bytes of one file to text under the corpus's encoding and policy."""

    def __init__(self, corpus: CorpusConfig, file: InputFile, counts: Counter[str]) -> None:
        self.counts = counts
        self._encoding = corpus.encoding
        self._strict = corpus.encoding_errors == "strict"
        self._file = file

    def lines(self, handle: IO[bytes], part: FileRange, wide: bool) -> Iterator[tuple[int, bytes]]:
        """Lines from the start of a range, the byte order mark of UTF-8 removed."""
        if wide:
            lines = self._wide_lines(handle)
        else:
            lines = byte_lines(handle, part.start)
        for offset, line in lines:
            if offset == 0 and line.startswith(codecs.BOM_UTF8):
                line = line[len(codecs.BOM_UTF8) :]
            yield offset, line

    def chunks(self, handle: IO[bytes], part: FileRange, wide: bool) -> Iterator[tuple[int, bytes]]:
        """Whole lines from the start of a range, many at once: (offset, lines). The byte order mark is still there."""
        return self._wide_lines(handle) if wide else line_chunks(handle, part.start)

    def _wide_lines(self, handle: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        encoding, self._encoding = self._encoding, "utf-8"
        offset = 0
        before = _undecodable
        try:
            for line in text_as_utf8(handle, encoding, "strict" if self._strict else _COUNTING):
                yield offset, line
                offset += len(line)
        except UnicodeError as error:
            raise CorpusError(self._explain(error, offset)) from error
        finally:
            self.counts["undecodable_bytes"] += _undecodable - before

    def text(self, raw: bytes, offset: int) -> str:
        """Decoded text of bytes that begin at `offset`."""
        try:
            return raw.decode(self._encoding)
        except UnicodeDecodeError as error:
            if self._strict:
                raise CorpusError(self._explain(error, offset + error.start)) from error
        before = _undecodable
        text = raw.decode(self._encoding, _COUNTING)
        self.counts["undecodable_bytes"] += _undecodable - before
        return text

    def _explain(self, error: UnicodeError, offset: int) -> str:
        return _not_decodable(self._file, self._encoding, error, f" at byte {offset}")


def _text_documents(chunks: Iterator[tuple[int, bytes]], part: FileRange, decoder: _Decoder) -> Iterator[Document]:
    """Documents divided by blank lines. A document belongs to the range that holds the blank line before it."""
    held: list[bytes] = []
    start = 0
    inside = part.start == 0  # otherwise what comes before the first blank line is another range's
    blank_at = part.start
    for offset, lines in chunks:
        mark = len(codecs.BOM_UTF8) if offset == 0 and lines.startswith(codecs.BOM_UTF8) else 0
        lines = b"\n" + lines[mark:]  # between two line ends, the first line is found like all others
        if lines[lines.rfind(b"\n") + 1 :].isspace():  # and so is a last one without an end
            lines += b"\n"
        begin = 1
        for blank in [*_BLANK_LINES.finditer(lines), None]:
            end = len(lines) if blank is None else blank.start() + 1
            if begin < end and (held or inside):
                if not held:
                    if part.end is not None and blank_at >= part.end:
                        return
                    start = offset + mark + begin - 1 if begin > 1 else offset
                held.append(lines[begin:end])
            if blank is None:
                break
            for line in lines[end : blank.end() - 1].split(b"\n"):
                if held:
                    yield _text_document(held, start, part, decoder)
                    held = []
                elif inside and line.strip(b"\r") and (part.end is None or blank_at < part.end):
                    decoder.counts["dropped:blank"] += 1
                inside, blank_at = True, offset + mark + end - 1
                end += len(line) + 1
            begin = end
    if held:
        yield _text_document(held, start, part, decoder)


def _text_document(held: list[bytes], start: int, part: FileRange, decoder: _Decoder) -> Document:
    raw = b"".join(held)
    if b"\r" in raw:  # looking for one byte is much faster than looking for two
        raw = raw.replace(b"\r\n", b"\n")
    return Document(text=decoder.text(raw.removesuffix(b"\n"), start), id=f"{part.file.name}:{start}")


def _json_documents(
    lines: Iterator[tuple[int, bytes]], part: FileRange, decoder: _Decoder, corpus: CorpusConfig
) -> Iterator[Document]:
    """One document a line; a line belongs to the range in which it begins."""
    for offset, line in lines:
        if part.end is not None and offset >= part.end:
            return
        if not line.strip():
            continue
        row = _parse(decoder.text(line, offset))
        text = row.pop(corpus.text_key, None) if isinstance(row, dict) else None
        if not isinstance(text, str):
            decoder.counts["dropped:not_json" if row is None else "dropped:no_text"] += 1
            continue
        metadata = row.pop("metadata", {})
        metadata = metadata if isinstance(metadata, dict) else {"metadata": metadata}
        document_id = str(row.pop("id")) if corpus.source == "embedded" else f"{part.file.name}:{offset}"
        yield Document(text=without_gutenberg_frame(text, decoder.counts), id=document_id, metadata=metadata | row)


def _parse(line: str) -> Any:
    """The JSON value of a line, None where it is not JSON (or null)."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return None


def _wide(encoding: str) -> bool:
    """Whether a line end of this encoding is not the single byte LF."""
    return "\n".encode(encoding) != b"\n"


class ReadStep(PipelineStep):
    """`read_documents` as the first step of a datatrove pipeline.

    Attributes:
        counts: what was counted in the last task this object ran, complete once its documents are consumed.
    """

    name = "Read"
    type = "Clozeworks"

    def __init__(self, corpus: CorpusConfig, inputs: Sequence[InputFile], dropped: Path | None = None) -> None:
        super().__init__()
        self.corpus = corpus
        self.dropped = dropped
        self.inputs = list(inputs)
        self.counts: Counter[str] = Counter()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of task `rank` of `world_size`."""
        self.counts.clear()
        documents = read_documents(self.corpus, self.inputs, rank, world_size, self.counts)
        if self.dropped is not None:
            documents = DroppedDocuments(self.dropped).kept(documents, self.counts)
        for document in documents:
            self.update_doc_stats(document)
            yield document
        for name, value in self.counts.items():
            self.stat_update(name, value=value)
