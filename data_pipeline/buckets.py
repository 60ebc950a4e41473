"""From the hash of a document key to its bucket.

Stage 1 sorts documents into *groups*, equal ranges of the hash of their key; a *bucket* of stage 2 is some groups in a row.
So the same stage 1 serves any number of buckets that divides its groups, and that number can be chosen from what the corpus
turned out to hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from data_pipeline.token_store import key_hash

SPLITS = ("train", "validation")
BUCKET_TOKENS = 8_000_000
"""Most tokens of a bucket on average where `data.buckets` leaves it open; a few hundred MB in memory."""
GROUP_BYTES = 16_000_000
"""Text of a group on average, at most: half a bucket's, so that choosing among powers of two is possible."""
MAX_GROUPS = 1 << 16


class BucketError(ValueError):
    """A number of buckets that the groups of stage 1 cannot be joined to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Which group of the stage-1 files a document belongs to: training groups first, then held-out ones.

    Attributes:
        train: groups of the training part.
        validation: groups of the held-out part.
        held_out: share of documents held out.
    """

    train: int
    validation: int
    held_out: float

    @classmethod
    def of(cls, buckets: int, held_out: float, text_bytes: float = 0) -> Groups:
        """Groups for a corpus of this size: `buckets` (0 as 1) times a power of two, for each split."""
        validation = held_out_buckets(buckets, held_out)
        return cls(
            train=_enough(max(1, buckets), text_bytes * (1 - held_out)),
            validation=_enough(validation, text_bytes * held_out),
            held_out=held_out,
        )

    @property
    def count(self) -> int:
        """All groups."""
        return self.train + self.validation

    def of_split(self, split: str) -> range:
        """The groups of a split."""
        return range(self.train) if split == "train" else range(self.train, self.count)

    def find(self, key: str, is_held_out: Callable[[str, float], bool]) -> int:
        """The group of a document key."""
        if self.held_out and is_held_out(key, self.held_out):
            return self.train + (key_hash(key) * self.validation >> 64)
        return key_hash(key) * self.train >> 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """The tasks of stage 2: training buckets first, then held-out ones.

    Attributes:
        groups: of stage 1.
        train, validation: buckets of each split; they divide its groups.
    """

    groups: Groups
    train: int
    validation: int

    @property
    def count(self) -> int:
        """All buckets."""
        return self.train + self.validation

    def number(self, split: str) -> int:
        """Buckets of a split."""
        return self.train if split == "train" else self.validation

    def place(self, task: int) -> tuple[str, int]:
        """Split ("train" or "validation") and bucket of a task."""
        return ("train", task) if task < self.train else ("validation", task - self.train)

    def groups_of(self, split: str, bucket: int) -> range:
        """The groups that make a bucket."""
        groups = self.groups.of_split(split)
        each = len(groups) // self.number(split)
        return groups[bucket * each : (bucket + 1) * each]


def choose_buckets(
    groups: Groups, documents: np.ndarray, tokens: np.ndarray, *, buckets: int, least_documents: int
) -> Buckets:
    """The buckets of a corpus that stage 1 has read.

    With `buckets` 0, each split gets the smallest power of two that leaves at most `BUCKET_TOKENS` tokens to a bucket on
    average, and fewer where a bucket would have documents, but less than `least_documents`.

    Args:
        groups: of stage 1.
        documents: (groups,) documents of each.
        tokens: (groups,) tokens of each.
        buckets: of the training part, 0 to choose.
        least_documents: 2 where a pair needs another document, else 1.

    Raises:
        BucketError: the groups cannot be joined to that many buckets.
    """
    if not buckets:
        numbers = [
            _fitting(documents[list(groups.of_split(split))], tokens[list(groups.of_split(split))], least_documents)
            for split in SPLITS
        ]
        return Buckets(groups=groups, train=numbers[0], validation=numbers[1])
    numbers = [buckets, held_out_buckets(buckets, groups.held_out)]
    for split, number in zip(SPLITS, numbers, strict=True):
        if len(groups.of_split(split)) % number:
            raise BucketError(
                f"stage 1 has {groups.train} training and {groups.validation} held-out groups, which data.buckets = "
                f"{buckets} ({numbers[0]} and {numbers[1]}) does not divide: set data.buckets to a divisor, or 0 to choose, "
                "or remove the stage-1 folder to build it again"
            )
    return Buckets(groups=groups, train=numbers[0], validation=numbers[1])


def held_out_buckets(buckets: int, held_out: float) -> int:
    """As many held-out buckets as keep them about as large as the training ones, at least one."""
    return max(1, round(buckets * held_out))


def _enough(base: int, text_bytes: float) -> int:
    number = base
    while number * GROUP_BYTES < text_bytes and number * 2 <= MAX_GROUPS:
        number *= 2
    return number


def _fitting(documents: np.ndarray, tokens: np.ndarray, least_documents: int) -> int:
    number, total = 1, int(tokens.sum())
    while total > number * BUCKET_TOKENS and len(tokens) % (2 * number) == 0:
        number *= 2
    while number > 1:
        found = documents.reshape(number, -1).sum(axis=1)
        if not ((found > 0) & (found < least_documents)).any():
            break
        number //= 2
    return number
