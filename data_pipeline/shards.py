"""Shards: plain WebDataset tars whose members are blocks, `<key>.npz`. Specified in docs/data-format.md.

Writing goes through a temporary name, fsync and rename, so a shard under its final name is complete. Tar headers come
from the standard library's `tarfile`, not from `webdataset`, whose import pulls in torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from data_pipeline.block_codec import ShardError, decode_block, encode_block
from data_pipeline.records import Block

__all__ = ["BlockRow", "ShardError", "ShardRecord", "ShardWriter", "decode_block", "encode_block", "scan_shard"]

TAR_BLOCK = tarfile.BLOCKSIZE
_KEY = re.compile(r"[0-9a-z-]{1,80}")
_SHARD_NAME = re.compile(r"[0-9A-Za-z_-]{1,80}\.tar")
_READ_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRow:
    """Where one block lies: `offset` and `length` are the bytes of its `.npz` payload in the tar."""

    key: str
    offset: int
    length: int
    examples: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """A complete shard: what the index says about it. `to_json` and `from_json` carry it in a completion marker."""

    name: str
    sha256: str
    bytes: int
    rows: tuple[BlockRow, ...]

    @property
    def examples(self) -> int:
        """Examples of all blocks."""
        return sum(row.examples for row in self.rows)

    @property
    def tokens(self) -> int:
        """Token ids of all blocks."""
        return sum(row.tokens for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShardRecord:
        """The reverse of `to_json`."""
        return cls(**{**data, "rows": tuple(BlockRow(**row) for row in data["rows"])})


class ShardWriter:
    """Write one shard: `add` blocks, then `close`. As a context manager it abandons the shard when an error leaves it.

    The tar is `directory/name`; until `close` it has a temporary name beside it, which a rerun writes over.

        with ShardWriter(folder, "shard-00000-0000.tar") as writer:
            writer.add("00000-000000", block)
        record = writer.record
    """

    def __init__(self, directory: Path, name: str) -> None:
        """Raises ValueError for a name that is not `[0-9A-Za-z_-]+.tar`."""
        if not _SHARD_NAME.fullmatch(name):
            raise ValueError(f"shard name {name!r}: expected letters, digits, '-' and '_', then '.tar'")
        self.name = name
        self.path = Path(directory) / name
        self.temporary = self.path.with_name(f".{name}.tmp")
        self.bytes = 0
        """Bytes of the tar so far, its end excluded: roll over to the next shard when this is large enough."""
        self.record: ShardRecord | None = None
        self._rows: dict[str, BlockRow] = {}
        self._hash = hashlib.sha256()
        self._file: BinaryIO | None = open(self.temporary, "wb")  # noqa: SIM115 (closed by close and abandon)

    def add(self, key: str, block: Block) -> None:
        """Append one block under a key that is unique in the whole data set, `[0-9a-z-]+`.

        Raises:
            ValueError: a key of another form (a dot would end the key in a WebDataset tar).
            ShardError: the key is in this shard already, or the block breaks a rule of `Block`.
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"{self.name}: key {key!r}: expected 1 to 80 of 0-9, a-z and '-'")
        if key in self._rows:
            raise ShardError(f"{self.name}: key {key!r} is in this shard already; keys are unique in a data set")
        payload = encode_block(block)
        member = tarfile.TarInfo(f"{key}.npz")  # mtime, uid and gid are 0, names empty: bytes are reproducible
        member.size = len(payload)
        offset = self.bytes + TAR_BLOCK
        self._rows[key] = BlockRow(
            key=key, offset=offset, length=len(payload), examples=block.examples, tokens=block.tokens
        )
        self._write(member.tobuf(tarfile.USTAR_FORMAT) + payload + bytes(-len(payload) % TAR_BLOCK))

    def _write(self, data: bytes) -> None:
        if self._file is None:
            raise ValueError(f"{self.name}: the shard is closed")
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def close(self) -> ShardRecord:
        """End the tar, make it durable, give it its final name.

        Raises:
            ShardError: no block was added.
        """
        if self.record is not None:
            return self.record
        if not self._rows:
            self.abandon()
            raise ShardError(f"{self.name}: no block was added; an empty shard is not written")
        self._write(bytes(2 * TAR_BLOCK))
        self._write(bytes(-self.bytes % tarfile.RECORDSIZE))
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        os.replace(self.temporary, self.path)
        sync_directory(self.path.parent)
        self.record = ShardRecord(
            name=self.name, sha256=self._hash.hexdigest(), bytes=self.bytes, rows=tuple(self._rows.values())
        )
        return self.record

    def abandon(self) -> None:
        """Drop what was written; the final name does not appear."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self.temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def sync_directory(directory: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def iter_members(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """Every block of a tar as (key, offset of the payload, payload), and nothing but blocks.

    Raises:
        ShardError: cut short, a member that is not `<key>.npz`, a key that comes twice, no end mark.
    """
    seen: set[str] = set()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while True:
            at = file.tell()
            header = file.read(TAR_BLOCK)
            if header == bytes(TAR_BLOCK):
                break
            member = _member(path, header, at)
            key = member.name.removesuffix(".npz")
            if not member.isreg() or key == member.name or not _KEY.fullmatch(key):
                raise ShardError(
                    f"{path}: member {member.name!r} is not a block; expected one <key>.npz a key, its parts together"
                )
            if key in seen:
                raise ShardError(f"{path}: key {key!r} comes twice; the tar was put together by hand, build it again")
            seen.add(key)
            payload = file.read(member.size)
            if len(payload) < member.size:
                raise ShardError(f"{path}: truncated in key {key!r} at byte {size}; copy or build the shard again")
            yield key, at + TAR_BLOCK, payload
            file.seek(-member.size % TAR_BLOCK, os.SEEK_CUR)
        rest = file.read()
        if len(rest) < TAR_BLOCK or any(rest) or size % tarfile.RECORDSIZE:
            raise ShardError(f"{path}: damaged end mark at byte {at} of {size}; copy or build the shard again")


def _member(path: Path, header: bytes, at: int) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise ShardError(
            f"{path}: no tar header at byte {at} ({error}): truncated or damaged; copy or build the shard again"
        ) from error


def scan_shard(path: Path) -> ShardRecord:
    """Read a whole shard, check every rule of the format, and say what the index should say about it.

    Raises:
        ShardError: as `iter_members` and `decode_block`; shard and key are named.
    """
    rows = []
    for key, offset, payload in iter_members(path):
        block = decode_block(payload, where=f"{path}: key {key!r}", deep=True)
        rows.append(BlockRow(key=key, offset=offset, length=len(payload), examples=block.examples, tokens=block.tokens))
    if not rows:
        raise ShardError(f"{path}: no blocks")
    return ShardRecord(name=path.name, sha256=file_sha256(path), bytes=path.stat().st_size, rows=tuple(rows))


def file_sha256(path: Path) -> str:
    """sha256 of a file as hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
