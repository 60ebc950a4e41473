"""A random sample of bounded size from a stream of texts."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

import numpy as np

PIECE_CHARACTERS = 4096
"""Sampling unit: consecutive lines up to this length. A longer line is cut at white space, or where there is none."""
_DRAWS = 4096


class TextSample:
    """Takes pieces of texts with equal chance each, until `max_bytes` are held; then a new piece may replace a kept one.

    Every piece gets a random priority from the seed and the lowest ones are kept, so the sample is spread over the
    whole stream however it is ordered, and memory is bounded by `max_bytes`. The same stream, size and seed give the
    same sample.

    Attributes:
        texts_seen, bytes_seen: what the stream held (UTF-8 bytes).
        lines_split: lines over `PIECE_CHARACTERS` characters, cut into pieces rather than dropped.
    """

    def __init__(self, max_bytes: int, seed: int) -> None:
        self.max_bytes = max_bytes
        self.texts_seen = 0
        self.bytes_seen = 0
        self.bytes_kept = 0
        self.lines_split = 0
        self._rng = np.random.Generator(np.random.PCG64DXSM(seed))
        self._heap: list[tuple[float, int, str, int]] = []
        self._priorities: list[float] = []
        self._pieces_seen = 0

    def extend(self, texts: Iterable[str]) -> TextSample:
        """Offer all texts of a stream."""
        for text in texts:
            self.texts_seen += 1
            for piece in self._cut(text):
                self._offer(piece)
        return self

    def pieces(self) -> list[str]:
        """The sampled pieces in the order of the stream."""
        return [piece for _, _, piece, _ in sorted(self._heap, key=lambda entry: entry[1])]

    def _offer(self, piece: str) -> None:
        size = len(piece.encode("utf-8", "surrogatepass"))
        self.bytes_seen += size
        if not self._priorities:
            self._priorities = self._rng.random(_DRAWS).tolist()
        priority = self._priorities.pop()
        self._pieces_seen += 1
        if self.bytes_kept + size > self.max_bytes and self._heap and priority > -self._heap[0][0]:
            return
        heapq.heappush(self._heap, (-priority, self._pieces_seen, piece, size))
        self.bytes_kept += size
        while self.bytes_kept > self.max_bytes and len(self._heap) > 1:
            self.bytes_kept -= heapq.heappop(self._heap)[3]

    def _cut(self, text: str) -> Iterator[str]:
        if len(text) <= PIECE_CHARACTERS:
            if text:
                yield text
            return
        group: list[str] = []
        held = 0
        for line in text.split("\n"):
            parts = [line]
            if len(line) > PIECE_CHARACTERS:
                self.lines_split += 1
                parts = list(split_line(line))
            for part in parts:
                if held + len(part) + 1 > PIECE_CHARACTERS and group:
                    yield "\n".join(group)
                    group, held = [], 0
                group.append(part)
                held += len(part) + 1
        if group:
            yield "\n".join(group)


def split_line(line: str, limit: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cut a long line into parts of at most `limit` characters, at the last space of each where there is one."""
    start = 0
    while len(line) - start > limit:
        end = line.rfind(" ", start + 1, start + limit)
        end = end if end > start else start + limit
        yield line[start:end]
        start = end
    yield line[start:]
