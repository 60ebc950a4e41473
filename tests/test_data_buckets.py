"""Groups of stage 1, and the buckets that they are joined to."""

from __future__ import annotations

import numpy as np
import pytest

from data_pipeline.buckets import BUCKET_TOKENS, BucketError, Buckets, Groups, choose_buckets
from data_pipeline.token_store import key_hash


def test_groups_keep_splits_apart() -> None:
    groups = Groups.of(20, 0.1)
    assert (groups.train, groups.validation, groups.count) == (20, 2, 22)
    held = {"held"}
    places = {key: groups.find(key, lambda key, share: key in held) for key in ["held", "a", "b"]}
    assert places["held"] in groups.of_split("validation")
    assert places["a"] in groups.of_split("train")
    assert list(groups.of_split("validation")) == [20, 21]


def test_bucket_of_a_document_does_not_depend_on_the_number_of_groups() -> None:
    keys = [f"document {i}" for i in range(500)]
    seen = []
    for train in (6, 12, 48):
        groups = Groups(train=train, validation=4, held_out=0.1)
        buckets = Buckets(groups=groups, train=6, validation=2)
        of_group = {
            group: buckets.place(task)
            for task in range(buckets.count)
            for group in buckets.groups_of(*buckets.place(task))
        }
        assert sorted(of_group) == list(range(groups.count))
        seen.append([of_group[groups.find(key, lambda key, share: False)] for key in keys])
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0])) == 6
    assert seen[0] == [("train", key_hash(key) * 6 >> 64) for key in keys]


def test_automatic_number_follows_the_tokens() -> None:
    groups = Groups(train=64, validation=8, held_out=0.1)
    documents = np.full(72, 10)
    for tokens, expected in [
        (BUCKET_TOKENS, 1),
        (BUCKET_TOKENS + 64, 2),
        (5 * BUCKET_TOKENS, 8),
        (999 * BUCKET_TOKENS, 64),
    ]:
        per_group = np.array([tokens // 64] * 64 + [1] * 8)
        found = choose_buckets(groups, documents, per_group, buckets=0, least_documents=2)
        assert (found.train, found.validation) == (expected, 1)


def test_automatic_number_leaves_no_document_alone() -> None:
    groups = Groups(train=8, validation=1, held_out=0.0)
    tokens = np.array([BUCKET_TOKENS] * 8 + [0])
    documents = np.array([1, 0, 0, 2, 5, 5, 5, 5, 0])
    assert choose_buckets(groups, documents, tokens, buckets=0, least_documents=1).train == 8
    assert choose_buckets(groups, documents, tokens, buckets=0, least_documents=2).train == 2


def test_number_that_does_not_divide_the_groups_is_refused() -> None:
    groups = Groups.of(6, 0.0, 6 * 16_000_000 * 3)
    assert groups.train == 24
    ones = np.ones(groups.count, int)
    assert choose_buckets(groups, ones, ones, buckets=12, least_documents=1).train == 12
    with pytest.raises(BucketError, match=r"24 training and 1 held-out groups, which data\.buckets = 5"):
        choose_buckets(groups, ones, ones, buckets=5, least_documents=1)
