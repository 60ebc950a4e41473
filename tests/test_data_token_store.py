"""The file of stage 1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_pipeline import token_store
from data_pipeline.token_store import (
    Documents,
    TokenFile,
    TokenStoreError,
    TokenWriter,
    concatenate,
    gather,
    id_dtype,
    key_hash,
    ranges,
)

UINT16 = np.dtype("<u2")


def documents_of(rows: dict[str, list[list[int]]]) -> Documents:
    """Documents given as key -> sentences -> ids."""
    sentences = [sentence for document in rows.values() for sentence in document]
    return Documents(
        keys=list(rows),
        sentence_counts=np.array([len(document) for document in rows.values()], np.int64),
        sentence_lengths=np.array([len(sentence) for sentence in sentences], np.int64),
        ids=np.array([i for sentence in sentences for i in sentence], UINT16),
    )


def rows_of(documents: Documents) -> dict[str, list[list[int]]]:
    """The reverse of `documents_of`."""
    sentences = np.split(documents.ids, np.cumsum(documents.sentence_lengths)[:-1])
    rows, at = {}, 0
    for key, count in zip(documents.keys, documents.sentence_counts.tolist(), strict=True):
        rows[key] = [sentence.tolist() for sentence in sentences[at : at + count]]
        at += count
    return rows


def random_rows(count: int) -> dict[str, list[list[int]]]:
    """Documents with awkward keys."""
    rng = np.random.default_rng(0)
    names = ["wiki.v1", "wiki.v2", "a/b\\c", "Ünï", "\u4e2d", "lone \ud800", ""]
    keys = names + [f"doc-{i}" for i in range(count - len(names))]
    return {
        key: [rng.integers(0, 65536, rng.integers(1, 9)).tolist() for _ in range(rng.integers(1, 6))] for key in keys
    }


def write(path: Path, rows: dict[str, list[list[int]]], groups: dict[str, int], segment_tokens: int) -> TokenFile:
    """A stage-1 file of these rows, written a few documents at a time."""
    keys = list(rows)
    with path.open("wb") as file:
        writer = TokenWriter(file, groups=5, dtype=UINT16, segment_tokens=segment_tokens)
        for start in range(0, len(keys), 7):
            part = keys[start : start + 7]
            writer.add(documents_of({key: rows[key] for key in part}), np.array([groups[key] for key in part]))
        writer.close({"counts": {"documents": len(rows)}})
    return TokenFile(path)


@pytest.mark.parametrize("segment_tokens", [1, 100, 10**9])
def test_r16_every_document_comes_back_under_its_own_key(tmp_path: Path, segment_tokens: int) -> None:
    rows = random_rows(60)
    groups = {key: key_hash(key) % 4 for key in rows}  # group 4 stays empty
    file = write(tmp_path / "t.tokens", rows, groups, segment_tokens)
    assert (file.footer["segments"] > 1) == (segment_tokens < 10**9)
    seen: dict[str, list[list[int]]] = {}
    for group in range(4):
        found = rows_of(file.read(range(group, group + 1)))
        assert {groups[key] for key in found} == {group}
        seen |= found
    assert seen == rows
    assert rows_of(file.read(range(1, 3))) == {key: rows[key] for key in rows if groups[key] in (1, 2)}
    assert file.read(range(4, 5)).keys == []
    documents, tokens = file.per_group()
    assert documents.tolist() == [sum(g == group for g in groups.values()) for group in range(5)]
    assert tokens.sum() == sum(len(s) for document in rows.values() for s in document)
    assert file.footer["counts"] == {"documents": 60}


def test_a_cut_or_foreign_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.tokens"
    write(path, random_rows(20), dict.fromkeys(random_rows(20), 1), 50)
    whole = path.read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(TokenStoreError, match=r"t\.tokens: not a complete stage-1 file"):
            TokenFile(path)
    path.write_bytes(whole[:100] + b"\xff" + whole[101:])
    with pytest.raises(TokenStoreError, match="bytes at 0 were changed"):
        TokenFile(path).read(range(5))
    with pytest.raises(TokenStoreError, match="No such file"):
        TokenFile(tmp_path / "absent")


def test_take_and_concatenate() -> None:
    rows = random_rows(12)
    documents = documents_of(rows)
    order = np.array([5, 0, 11, 3])
    keys = list(rows)
    assert rows_of(documents.take(order)) == {keys[i]: rows[keys[i]] for i in order}
    assert rows_of(concatenate([documents.take(order[:1]), documents.take(order[1:])], UINT16)) == rows_of(
        documents.take(order)
    )
    assert concatenate([], UINT16).take(np.zeros(0, np.int64)).keys == []
    assert documents.token_counts().tolist() == [sum(map(len, rows[key])) for key in keys]


def test_ranges() -> None:
    assert ranges(np.array([5, 9, 0]), np.array([2, 0, 3])).tolist() == [5, 6, 0, 1, 2]
    assert ranges(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


@pytest.mark.parametrize("at_once", [1, 7, 40, 10**6])
def test_gather_is_the_same_in_parts(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(token_store, "_GATHERED_AT_ONCE", at_once)
    values = np.arange(100, dtype=np.uint16)
    lengths = np.array([3, 0, 30, 1, 0, 9, 50])
    starts = np.array([97, 5, 0, 44, 99, 10, 50])
    assert gather(values, starts, lengths).tolist() == ranges(starts, lengths).tolist()
    assert gather(values, starts[:0], lengths[:0]).tolist() == []


def test_id_dtype() -> None:
    assert id_dtype(65536) == np.uint16
    assert id_dtype(65537) == np.uint32


def test_key_hash_is_the_same_in_every_process() -> None:
    code = "from data_pipeline.token_store import key_hash; print(key_hash('wiki.v1'))"
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True
    )
    assert run.stdout == f"{key_hash('wiki.v1')}\n"
