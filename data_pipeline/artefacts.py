"""Writing files so that a final name only ever holds complete bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def atomic_writer(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that appears under `path` when the block ends without an error, and not at all otherwise.

    The bytes are on disk before the name is: written to a temporary name beside it, synced, renamed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file atomically, see `atomic_writer`."""
    with atomic_writer(path) as handle:
        handle.write(data)


def write_text(path: Path, text: str) -> None:
    """Write a whole file as UTF-8 with its line ends as they are, atomically."""
    write_bytes(path, text.encode("utf-8"))
