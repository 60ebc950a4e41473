"""The index: what it lists, and a message of its own for each fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.records import Block
from data_pipeline.shard_index import BLOCK_DTYPE, DatasetInfo, ShardIndex, verify_shards, write_index
from data_pipeline.shards import ShardError, ShardRecord, ShardWriter, decode_block, scan_shard

WriteDataset = Callable[..., ShardIndex]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_dataset: WriteDataset) -> Path:
    path = tmp_path_factory.mktemp("index") / "data"
    write_dataset(path, shards=3, blocks=4)
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_the_index_says_what_the_shards_hold(folder: Path) -> None:
    index = ShardIndex.open(folder)
    records = [scan_shard(path) for path in sorted(folder.glob("*.tar"))]
    content = json.loads((folder / "index.json").read_text())
    assert content["totals"] == {
        "shards": 3,
        "blocks": 12,
        "examples": sum(record.examples for record in records),
        "tokens": sum(record.tokens for record in records),
        "bytes": sum(record.bytes for record in records),
    }
    assert [(s.name, s.sha256, s.bytes) for s in index.shards] == [(r.name, r.sha256, r.bytes) for r in records]
    rows = [(shard, row.offset, row.length, row.examples) for shard, r in enumerate(records) for row in r.rows]
    assert index.blocks.tolist() == rows
    assert index.blocks.dtype == BLOCK_DTYPE
    assert isinstance(index.blocks, np.memmap), "4 million blocks must not be read to open an index"
    assert (index.examples, index.tokens) == (content["totals"]["examples"], content["totals"]["tokens"])
    assert index.info.special_ids["mask"] == 4
    for row, key in ((0, "00000-000000"), (11, "00002-000003")):
        assert f"key '{key}'" in index.where(row)
        assert decode_block(index.read_block(row), where="x").examples == index.blocks[row]["examples"]
    index.close()


def test_a_second_build_has_the_same_bytes_and_other_content_another_fingerprint(
    tmp_path: Path, folder: Path, write_dataset: WriteDataset
) -> None:
    same = write_dataset(tmp_path / "same", shards=3, blocks=4)
    for name in ("index.json", "blocks.npy"):
        assert (tmp_path / "same" / name).read_bytes() == (folder / name).read_bytes()
    other = write_dataset(tmp_path / "other", shards=3, blocks=4, seed=1)
    assert len({same.fingerprint, ShardIndex.open(folder).fingerprint, other.fingerprint}) == 2


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def damage_missing(path: Path) -> None:
    (path / "index.json").unlink()


def damage_not_json(path: Path) -> None:
    text = (path / "index.json").read_text()
    (path / "index.json").write_text(text[: len(text) // 2])


def damage_other_format(path: Path) -> None:
    edit(path / "index.json", magic="else")


def damage_newer(path: Path) -> None:
    edit(path / "index.json", version=2)


def damage_edited(path: Path) -> None:
    edit(path / "index.json", vocab_size=50)


def damage_no_table(path: Path) -> None:
    (path / "blocks.npy").unlink()


def damage_other_table(path: Path) -> None:
    table = np.load(path / "blocks.npy")
    table["offset"][1] += 512
    np.save(path / "blocks.npy", table)


def damage_no_shard(path: Path) -> None:
    (path / "shard-00001.tar").unlink()


def damage_short_shard(path: Path) -> None:
    with open(path / "shard-00001.tar", "rb+") as file:
        file.truncate(5000)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, r"index\.json: missing: no data set here"),
        (damage_not_json, r"index\.json: not JSON"),
        (damage_other_format, r"index\.json: not an index of this project"),
        (damage_newer, r"index\.json: format version 2, this program reads 1"),
        (damage_edited, r"index\.json: edited after it was written"),
        (damage_no_table, r"blocks\.npy: missing"),
        (damage_other_table, r"blocks\.npy: not the table that index\.json names"),
        (damage_no_shard, r"shard-00001\.tar: missing"),
        (damage_short_shard, r"shard-00001\.tar: 5000 bytes, index\.json says \d+"),
    ],
)
def test_each_fault_has_its_message(copy: Path, damage: Callable[[Path], None], message: str) -> None:
    ShardIndex.open(copy)
    damage(copy)
    with pytest.raises(ShardError, match=message):
        ShardIndex.open(copy)


def test_a_folder_that_is_not_there_has_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="no data set here"):
        ShardIndex.open(tmp_path / "nowhere")


def test_a_changed_byte_is_found_by_its_sha256(copy: Path) -> None:
    index = ShardIndex.open(copy)
    assert verify_shards(index) == ("shard-00000.tar", "shard-00001.tar", "shard-00002.tar")
    assert len(verify_shards(index, sample=1)) == 1
    assert {verify_shards(index, sample=1, seed=seed) for seed in range(20)} == {
        (shard.name,) for shard in index.shards
    }, "other ranks look at other shards"
    data = bytearray((copy / "shard-00001.tar").read_bytes())
    data[-1] ^= 1  # padding: no block notices
    (copy / "shard-00001.tar").write_bytes(data)
    with pytest.raises(ShardError, match=r"shard-00001\.tar: its bytes are not those"):
        verify_shards(ShardIndex.open(copy))


def records_of(folder: Path) -> tuple[list[ShardRecord], DatasetInfo]:
    return [scan_shard(path) for path in sorted(folder.glob("*.tar"))], ShardIndex.open(folder).info


def test_r15_the_index_lists_only_complete_shards(copy: Path) -> None:
    records, info = records_of(copy)
    (copy / "index.json").unlink()
    (copy / "shard-00002.tar").rename(copy / ".shard-00002.tar.tmp")
    with pytest.raises(ShardError, match=r"shard-00002\.tar: expected a complete shard"):
        write_index(copy, records, info)
    assert not (copy / "index.json").exists()
    with pytest.raises(ShardError, match="no shards"):
        write_index(copy, [], info)
    index = write_index(copy, records[1::-1], info)
    assert [shard.name for shard in index.shards] == ["shard-00000.tar", "shard-00001.tar"], "in the order of names"


def test_r17_keys_are_unique_across_shards(tmp_path: Path, make_block: Callable[..., Block], folder: Path) -> None:
    records = []
    for name in ("shard-0.tar", "shard-1.tar"):
        with ShardWriter(tmp_path, name) as writer:
            writer.add("9", make_block(np.random.default_rng(0), 2, 2))
        records.append(writer.close())
    with pytest.raises(ShardError, match=r"key '9' is in shard-0\.tar and in shard-1\.tar"):
        write_index(tmp_path, records, ShardIndex.open(folder).info)


def test_what_cannot_be_an_index_is_refused(folder: Path) -> None:
    info = ShardIndex.open(folder).info
    for changes, message in (
        ({"tokenizer": "abc"}, "fingerprint"),
        ({"mask_sets": -1}, "not negative"),
        ({"special_ids": {"pad": 0}}, "'unk' needs an id"),
        ({"vocab_size": 4}, "'mask' needs an id below 4"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(info, **changes)
