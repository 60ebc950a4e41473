"""`python -m data_pipeline.verify`: a whole data set passes, and each damage is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest

from data_pipeline.inspect import main as inspect
from data_pipeline.records import Block
from data_pipeline.shard_index import ShardIndex, write_index
from data_pipeline.shards import ShardWriter, scan_shard
from data_pipeline.verify import find_faults, main

WriteDataset = Callable[..., ShardIndex]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, write_dataset: WriteDataset) -> Path:
    path = tmp_path_factory.mktemp("verify") / "data"
    write_dataset(path, shards=3, blocks=3)
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_a_whole_data_set_passes(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(find_faults(whole)) == []
    for path in (whole, whole / "index.json"):
        assert main([str(path)]) == 0
        assert "whole: 3 shards, 9 blocks" in capsys.readouterr().out


def test_a_data_set_behind_a_url(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any file system of fsspec, here the one in memory; damage is named by its URL; inspect reads it too."""
    system = fsspec.filesystem("memory")
    try:
        system.put(str(whole), "/verify-set", recursive=True)
        for path in ("memory://verify-set", "memory://verify-set/index.json"):
            assert main([path]) == 0
            assert "memory://verify-set: whole: 3 shards, 9 blocks" in capsys.readouterr().out
            assert inspect([path, "--start", "9", "--count", "1"]) == 0
            assert "example 9 (shard-00000.tar" in capsys.readouterr().out
        assert inspect(["memory://verify-set/shard-00001.tar", "--count", "1"]) == 0
        data = bytearray(system.cat_file("/verify-set/shard-00001.tar"))
        data[len(data) // 2] ^= 1
        system.pipe_file("/verify-set/shard-00001.tar", bytes(data))
        system.pipe_file("/verify-set/stranger.tar", b"x")
        capsys.readouterr()
        assert main(["memory://verify-set"]) == 1
        errors = capsys.readouterr().err.splitlines()
        assert errors[0].startswith("memory://verify-set/shard-00001.tar: ")
        assert errors[1].startswith("memory://verify-set/stranger.tar: not in index.json") and len(errors) == 3
        assert main(["memory://nowhere"]) == 1
        assert "no data set here" in capsys.readouterr().err
    finally:
        system.rm("/verify-set", recursive=True)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_damage_in_two_shards_is_told_in_one_go(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = scan_shard(copy / "shard-00002.tar").rows[1]
    # The date in a zip header: nothing reads it, only the sha256 of the shard tells.
    flip(copy / "shard-00000.tar", scan_shard(copy / "shard-00000.tar").rows[0].offset + 12)
    flip(copy / "shard-00002.tar", row.offset + 300)
    assert main([str(copy)]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert "shard-00000.tar: sha256 differs" in errors[0]
    assert f"shard-00002.tar: key '{row.key}'" in errors[1]
    assert errors[2].endswith("2 faults")


def test_a_shard_cut_anywhere_is_named(copy: Path) -> None:
    path = copy / "shard-00001.tar"
    data = path.read_bytes()
    for size in (0, 100, 512, 3000, len(data) - 1024, len(data) - 1):
        path.write_bytes(data[:size])
        assert any("shard-00001.tar" in fault for fault in find_faults(copy))


def test_leftovers_of_other_builds_are_named(copy: Path) -> None:
    shutil.copy(copy / "shard-00000.tar", copy / "shard-00007.tar")
    (copy / ".shard-00008.tar.tmp").write_bytes(b"")
    faults = list(find_faults(copy))
    assert len(faults) == 2
    assert any("shard-00007.tar: not in index.json" in fault for fault in faults)
    assert any(".shard-00008.tar.tmp: unfinished" in fault for fault in faults)


def test_a_stale_shard_of_the_same_size_is_named(copy: Path) -> None:
    # Blocks in another order: the same bytes in all, and every block in itself is right.
    path = copy / "shard-00001.tar"
    data, rows = path.read_bytes(), scan_shard(path).rows
    starts = [row.offset - 512 for row in rows]
    ends = [*starts[1:], starts[-1] + 512 + -(-rows[-1].length // 512) * 512]
    parts = [data[start:end] for start, end in zip(starts, ends, strict=True)]
    path.write_bytes(b"".join([*parts[::-1], data[ends[-1] :]]))
    (fault,) = find_faults(copy)
    assert "shard-00001.tar" in fault
    assert "reordered" in fault or "sha256" in fault


def reindex(folder: Path, **changes: object) -> None:
    """An index that fits the files, changed: what a faulty writer would leave."""
    info = ShardIndex.open(folder).info
    records = [scan_shard(path) for path in sorted(folder.glob("*.tar"))]
    write_index(folder, records, replace(info, **changes))


def test_r17_a_key_in_two_shards_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ShardWriter(copy, "shard-00002.tar") as writer:
        for key, block in read_blocks(copy / "shard-00001.tar"):
            writer.add(key, block)
    monkeypatch.setattr("data_pipeline.shard_index._check_records", lambda directory, records: None)
    reindex(copy)
    faults = list(find_faults(copy))
    assert len(faults) == 3
    assert "shard-00002.tar: key '00001-000000' is in shard-00001.tar too" in faults[0]


def read_blocks(path: Path) -> list[tuple[str, Block]]:
    from data_pipeline.inspect import iter_blocks

    return [(where.split()[1], block) for where, _, block in iter_blocks(path, 0)]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"vocab_size": 50}, "an id of 50 or more"),
        ({"max_seq_length": 9}, "longer than 9 tokens"),
        ({"mask_sets": 1}, "2 mask sets, index.json says 1"),
    ],
)
def test_blocks_that_the_index_does_not_describe_are_named(copy: Path, changes: dict, rule: str) -> None:
    reindex(copy, **changes)
    faults = list(find_faults(copy))
    assert len(faults) == 3
    assert all(rule in fault and "key '0000" in fault for fault in faults)


@pytest.mark.parametrize(
    ("place", "value", "rule"),
    [
        (0, 9, "does not begin with [CLS]"),
        (-1, 9, "does not end with [SEP]"),
        (1, 4, "[PAD] or [MASK] in the text"),
        (1, 0, "[PAD] or [MASK] in the text"),
        ("predicted", 2, "a special token is to be predicted"),
    ],
)
def test_r04_a_special_token_out_of_place_is_named(
    tmp_path: Path, copy: Path, make_block: Callable[..., Block], place: int | str, value: int, rule: str
) -> None:
    block = make_block(np.random.default_rng(0), 3, 2)
    ids = block.input_ids.copy()
    ids[int(block.mask_positions[0]) if place == "predicted" else place] = value
    with ShardWriter(tmp_path, "shard-0.tar") as writer:
        writer.add("0", replace(block, input_ids=ids))
    write_index(tmp_path, [writer.close()], ShardIndex.open(copy).info)
    (fault,) = find_faults(tmp_path)
    assert "shard-0.tar: key '0'" in fault
    assert rule in fault


def test_counts_of_another_build_are_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads((copy / "index.json").read_text())
    content["shards"][1]["tokens"] += 1
    monkeypatch.setattr("data_pipeline.shard_index._fingerprint", lambda content: content.get("fingerprint"))
    (copy / "index.json").write_text(json.dumps(content))
    (fault,) = find_faults(copy)
    assert "shard-00001.tar: blocks, examples and tokens" in fault


def test_a_wrong_path_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 1
    assert "no data set here" in capsys.readouterr().err
