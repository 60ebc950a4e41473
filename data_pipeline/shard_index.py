"""The index of a data set: `blocks.npy`, one row a block, and `index.json`, written last. See docs/data-format.md.

A data set exists once its `index.json` does. Local folders and any fsspec URL can be read; writing is local.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from data_pipeline.artefacts import write_bytes
from data_pipeline.block_codec import ShardError
from data_pipeline.shards import TAR_BLOCK, ShardRecord

MAGIC = "clozeworks-shards"
VERSION = 1
BLOCK_DTYPE = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("examples", "<u4")])
"""A row of `blocks.npy`: 20 bytes. `shard` counts in the order of `index.json`."""
_HASH_BYTES = 1 << 22
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """What the index says about a shard."""

    name: str
    sha256: str
    bytes: int
    blocks: int
    examples: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetInfo:
    """`index.json` without its shards: what a consumer must know before reading.

    Attributes:
        settings: the pipeline's settings as they were given, for people and for comparison.
        tokenizer: fingerprint of the tokenizer, 64 hexadecimal digits.
        vocab_size: number of ids; every stored id is smaller.
        special_ids: name to id: pad, unk, cls, sep, mask.
        max_seq_length: longest example in tokens, specials included.
        mask_sets: precomputed mask sets; 0 means that masks are drawn at load time.
    """

    settings: Mapping[str, Any]
    tokenizer: str
    vocab_size: int
    special_ids: Mapping[str, int]
    max_seq_length: int
    mask_sets: int

    def __post_init__(self) -> None:
        if not _FINGERPRINT.fullmatch(self.tokenizer):
            raise ValueError(f"tokenizer fingerprint {self.tokenizer!r}: expected 64 hexadecimal digits")
        if self.vocab_size < 1 or self.max_seq_length < 1 or self.mask_sets < 0:
            raise ValueError("vocab_size and max_seq_length must be positive, mask_sets not negative")
        for name in ("pad", "unk", "cls", "sep", "mask"):
            if not 0 <= self.special_ids.get(name, -1) < self.vocab_size:
                raise ValueError(f"special_ids: {name!r} needs an id below {self.vocab_size}")


def write_index(directory: Path, records: Iterable[ShardRecord], info: DatasetInfo) -> ShardIndex:
    """Write `blocks.npy` and then `index.json` for complete shards, in the order of their names.

    Raises:
        ShardError: no shard, a shard missing or of another size than its record, or a key in two shards.
    """
    directory = Path(directory)
    records = sorted(records, key=lambda record: record.name)
    _check_records(directory, records)
    blocks = np.empty(sum(len(record.rows) for record in records), BLOCK_DTYPE)
    columns = ("offset", "length", "examples")
    at = 0
    for shard, record in enumerate(records):
        part = blocks[at : at + len(record.rows)]
        part["shard"] = shard
        for column in columns:
            part[column] = [getattr(row, column) for row in record.rows]
        at += len(record.rows)
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, blocks, version=(1, 0))
    write_bytes(directory / "blocks.npy", buffer.getvalue())
    content: dict[str, Any] = {
        "magic": MAGIC,
        "version": VERSION,
        "settings": dict(info.settings),
        "tokenizer": info.tokenizer,
        "vocab_size": info.vocab_size,
        "special_ids": dict(info.special_ids),
        "max_seq_length": info.max_seq_length,
        "mask_sets": info.mask_sets,
        "blocks_sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
        "totals": {
            "shards": len(records),
            "blocks": len(blocks),
            "examples": sum(record.examples for record in records),
            "tokens": sum(record.tokens for record in records),
            "bytes": sum(record.bytes for record in records),
        },
        "shards": [
            {
                "name": record.name,
                "sha256": record.sha256,
                "bytes": record.bytes,
                "blocks": len(record.rows),
                "examples": record.examples,
                "tokens": record.tokens,
            }
            for record in records
        ],
    }
    content["fingerprint"] = _fingerprint(content)
    write_bytes(directory / "index.json", json.dumps(content, indent=1, sort_keys=True).encode() + b"\n")
    return ShardIndex.open(directory)


def _check_records(directory: Path, records: list[ShardRecord]) -> None:
    if not records:
        raise ShardError(f"{directory}: no shards, so there is nothing to index; did every document get dropped?")
    owners: dict[str, str] = {}
    for record in records:
        path = directory / record.name
        size = path.stat().st_size if path.is_file() else None
        if size != record.bytes:
            raise ShardError(f"{path}: expected a complete shard of {record.bytes} bytes, found {size}; build it again")
        for row in record.rows:
            if row.key in owners:
                raise ShardError(f"{directory}: key {row.key!r} is in {owners[row.key]} and in {record.name}")
            owners[row.key] = record.name


def _fingerprint(content: Mapping[str, Any]) -> str:
    """sha256 of the index without this field; shards and `blocks.npy` are in it by their own sha256."""
    plain = {key: value for key, value in content.items() if key != "fingerprint"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class ShardIndex:
    """An opened data set: what it holds, and byte ranges of its blocks. Safe to read from several threads.

    Attributes:
        directory: folder or URL.
        info: what a consumer checks.
        shards: in the order of `blocks["shard"]`.
        blocks: (number of blocks,) of `BLOCK_DTYPE`, read-only.
        fingerprint: 64 hexadecimal digits over everything, shard contents included.
        examples, tokens: totals.
        remote: read through fsspec, so that each read takes a round trip.
    """

    def __init__(
        self,
        directory: str,
        info: DatasetInfo,
        shards: tuple[ShardInfo, ...],
        blocks: np.ndarray,
        fingerprint: str,
        filesystem: fsspec.AbstractFileSystem | None = None,
    ) -> None:
        self.directory = directory
        self.info = info
        self.shards = shards
        self.blocks = blocks
        self.fingerprint = fingerprint
        self.examples = sum(shard.examples for shard in shards)
        self.tokens = sum(shard.tokens for shard in shards)
        self._filesystem = filesystem
        self.remote = filesystem is not None
        self._descriptors: dict[int, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, directory: str | Path) -> ShardIndex:
        """Read and check the index; shard contents are not read, their sizes are compared.

        Raises:
            ShardError: a message of its own for each fault: no index, not JSON, another format, a newer version, an
                edited index, `blocks.npy` missing or of another content, a shard missing or of another size.
        """
        directory = str(directory)
        filesystem = None
        if "://" in directory:
            filesystem, root = fsspec.core.url_to_fs(directory)
        else:
            root = directory
        content = _read_content(_read(filesystem, f"{root}/index.json"), f"{directory}/index.json")
        shards = tuple(ShardInfo(**shard) for shard in content["shards"])
        names = ("settings", "tokenizer", "vocab_size", "special_ids", "max_seq_length", "mask_sets")
        info = DatasetInfo(**{name: content[name] for name in names})
        raw = _read(filesystem, f"{root}/blocks.npy")
        if raw is None:
            raise ShardError(f"{directory}/blocks.npy: missing; copy the whole folder or build the data set again")
        if hashlib.sha256(raw).hexdigest() != content["blocks_sha256"]:
            raise ShardError(
                f"{directory}/blocks.npy: not the table that index.json names (sha256 differs): "
                "parts of two builds are mixed; copy the whole folder or build again"
            )
        if filesystem is None:
            blocks = np.load(f"{root}/blocks.npy", mmap_mode="r")
        else:
            blocks = np.load(io.BytesIO(raw))
            blocks.setflags(write=False)
        if blocks.dtype != BLOCK_DTYPE or blocks.ndim != 1 or not len(blocks):
            raise ShardError(f"{directory}/blocks.npy: expected a table of {BLOCK_DTYPE}, found {blocks.dtype}")
        index = cls(root, info, shards, blocks, content["fingerprint"], filesystem)
        index._check_sizes()
        return index

    def _check_sizes(self) -> None:
        found: dict[str, int] = {}
        if self._filesystem is None:
            found = {entry.name: entry.stat().st_size for entry in os.scandir(self.directory) if entry.is_file()}
        else:
            for entry in self._filesystem.ls(self.directory, detail=True):
                found[entry["name"].rsplit("/", 1)[-1]] = entry["size"]
        for shard in self.shards:
            path = f"{self.directory}/{shard.name}"
            if shard.name not in found:
                raise ShardError(f"{path}: missing, index.json lists it; copy the whole folder or build again")
            if found[shard.name] != shard.bytes:
                raise ShardError(
                    f"{path}: {found[shard.name]} bytes, index.json says {shard.bytes}: truncated or of another build; "
                    "copy or build it again"
                )

    def read_range(self, shard: int, offset: int, length: int) -> bytes:
        """Bytes of a shard; fewer than asked for where the shard ends.

        Raises:
            ShardError: the shard cannot be read.
        """
        path = f"{self.directory}/{self.shards[shard].name}"
        try:
            if self._filesystem is not None:
                return self._filesystem.cat_file(path, start=offset, end=offset + length)
            with self._lock:
                if shard not in self._descriptors:
                    if len(self._descriptors) >= 128:
                        os.close(self._descriptors.pop(next(iter(self._descriptors))))
                    self._descriptors[shard] = os.open(path, os.O_RDONLY)
                return os.pread(self._descriptors[shard], length, offset)
        except OSError as error:
            raise ShardError(f"{path}: cannot read {length} bytes at {offset}: {error.strerror or error}") from error

    def read_block(self, row: int) -> bytes:
        """The `.npz` bytes of a block, `row` counting in `blocks`.

        Raises:
            ShardError: the shard is shorter than the table says or cannot be read.
        """
        shard, offset, length, _ = self.blocks[row].item()
        data = self.read_range(shard, offset, length)
        if len(data) != length:
            raise ShardError(f"{self.where(row)}: truncated, {len(data)} of {length} bytes; copy the shard again")
        return data

    def where(self, row: int) -> str:
        """A block in words, for messages: its shard, key and place."""
        shard, offset, _, _ = self.blocks[row].item()
        name = self.read_range(shard, offset - TAR_BLOCK, 100).rstrip(b"\0").decode("ascii", "replace")
        path = f"{self.directory}/{self.shards[shard].name}"
        key = repr(name.removesuffix(".npz")) if name else "beyond the end of the file"
        return f"{path}: key {key} (block {row}, byte {offset})"

    def close(self) -> None:
        """Close the shards' files."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])


def verify_shards(index: ShardIndex, *, sample: int | None = None, seed: int = 0) -> tuple[str, ...]:
    """Compare the sha256 of shards with the index, and hand back the names of those that were read.

    Args:
        index: an opened data set.
        sample: read only this many, chosen by `seed`; None: all.
        seed: let every rank take another one, and together they look at more.

    Raises:
        ShardError: a shard whose bytes are not those that were written.
    """
    numbers = list(range(len(index.shards)))
    if sample is not None and sample < len(numbers):
        rng = np.random.default_rng(seed)
        numbers = sorted(rng.choice(len(index.shards), sample, replace=False).tolist())
    for number in numbers:
        shard = index.shards[number]
        digest = hashlib.sha256()
        for offset in range(0, shard.bytes, _HASH_BYTES):
            digest.update(index.read_range(number, offset, min(_HASH_BYTES, shard.bytes - offset)))
        if digest.hexdigest() != shard.sha256:
            raise ShardError(
                f"{index.directory}/{shard.name}: its bytes are not those that were written (sha256 differs from "
                "index.json); copy or build it again"
            )
    return tuple(index.shards[number].name for number in numbers)


def _read(filesystem: fsspec.AbstractFileSystem | None, path: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if filesystem is None else filesystem.cat_file(path)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return None


def _read_content(raw: bytes | None, path: str) -> dict[str, Any]:
    if raw is None:
        raise ShardError(f"{path}: missing: no data set here, or its build did not finish; run data_pipeline.build")
    try:
        content = json.loads(raw)
    except ValueError as error:
        raise ShardError(f"{path}: not JSON ({error}); copy it again or build again") from error
    if not isinstance(content, dict) or content.get("magic") != MAGIC:
        raise ShardError(f"{path}: not an index of this project (no magic {MAGIC!r}); name the folder with the shards")
    if content.get("version") != VERSION:
        raise ShardError(
            f"{path}: format version {content.get('version')}, this program reads {VERSION}; "
            "use the program that wrote it or build again"
        )
    if content.get("fingerprint") != _fingerprint(content):
        raise ShardError(f"{path}: edited after it was written (its fingerprint differs); build again")
    return content
