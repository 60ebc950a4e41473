"""Blocks as bytes, tars of blocks, and what happens to damaged ones."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.block_codec import MEMBERS
from data_pipeline.records import Block
from data_pipeline.shards import ShardError, ShardRecord, ShardWriter, decode_block, encode_block, scan_shard

ROOT = Path(__file__).resolve().parent.parent
MakeBlock = Callable[..., Block]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def assert_equal(found: Block, expected: Block) -> None:
    for name in MEMBERS:
        left, right = getattr(found, name), getattr(expected, name)
        assert left.dtype == right.dtype, name
        np.testing.assert_array_equal(left, right, err_msg=name)


def tiny_block() -> Block:
    """`[CLS] 7 [SEP] 8 [SEP]` and `[CLS] 9 [SEP] 6 5 [SEP]`, one mask set."""
    return Block(
        input_ids=np.array([2, 7, 3, 8, 3, 2, 9, 3, 6, 5, 3], np.uint16),
        lengths=np.array([5, 6], np.uint16),
        segment_a_lengths=np.array([3, 3], np.uint16),
        nsp_labels=np.array([0, 1], np.int8),
        mask_counts=np.array([[1, 2]], np.uint16),
        mask_positions=np.array([3, 1, 4], np.uint16),
        mask_inputs=np.array([4, 4, 11], np.uint16),
    )


@pytest.mark.parametrize("mask_sets", [0, 1, 3])
@pytest.mark.parametrize("wide", [False, True])
def test_a_block_comes_back_as_it_was(make_block: MakeBlock, mask_sets: int, wide: bool) -> None:
    for examples in (1, 2, 37):
        block = make_block(rng(examples), examples, mask_sets)
        if wide:
            block = replace(
                block, input_ids=block.input_ids.astype(np.uint32) + 70_000, mask_inputs=block.mask_inputs.astype("u4")
            )
        data = encode_block(block)
        assert_equal(decode_block(data, where="x", deep=True), block)
        with np.load(io.BytesIO(data)) as arrays:
            assert arrays.files == list(MEMBERS)
            assert_equal(Block(**arrays), block)


def test_block_bytes_are_pinned() -> None:
    # A change here is a change of the format: a new version in shard_index.py and docs/data-format.md.
    data = encode_block(tiny_block())
    assert len(data) == 1712
    assert hashlib.sha256(data).hexdigest() == "1fe39e448680518767c5f48b857f5284e12c305962a9d17295480827df42a7c8"


def test_blocks_written_by_numpy_are_read() -> None:
    block = tiny_block()
    buffer = io.BytesIO()
    np.savez(buffer, **{name: getattr(block, name) for name in MEMBERS})
    assert_equal(decode_block(buffer.getvalue(), where="x"), block)


def test_every_cut_and_every_changed_byte_of_a_block_is_found_or_harmless() -> None:
    block = tiny_block()
    data = encode_block(block)
    for size in range(len(data)):
        with pytest.raises(ShardError, match="a\\.tar: key 'k'"):
            decode_block(data[:size], where="a.tar: key 'k'")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        bodies = {
            place
            for member in archive.infolist()
            for start in [member.header_offset + 30 + len(member.filename)]
            for place in range(start, start + member.file_size)
        }
    harmless = set()
    for place in range(len(data)):
        edited = bytearray(data)
        edited[place] ^= 0x10
        try:
            assert_equal(decode_block(bytes(edited), where="a.tar: key 'k'"), block)
            harmless.add(place)
        except ShardError as error:
            assert "a.tar: key 'k'" in str(error)
    # Harmless are fields of the zip that nothing reads: dates, versions, the copies of sizes in local headers.
    assert len(bodies) == 944
    assert not harmless & bodies


def broken(name: str, values: list[int] | np.ndarray, dtype: str | None = None) -> Block:
    block = tiny_block()
    return replace(block, **{name: np.array(values, dtype or getattr(block, name).dtype)})


@pytest.mark.parametrize(
    ("block", "rule"),
    [
        (broken("input_ids", [1] * 11, "i8"), "input_ids is int64"),
        (broken("lengths", [5, 5]), "lengths sum to 10, input_ids holds 11"),
        (broken("lengths", [11, 0]), "no tokens"),
        (broken("segment_a_lengths", [6, 3]), "segment A is longer"),
        (broken("segment_a_lengths", [3]), "segment_a_lengths and lengths differ"),
        (broken("nsp_labels", [0]), "nsp_labels and lengths differ"),
        (broken("nsp_labels", [0, 2]), "other than -1, 0, 1"),
        (broken("nsp_labels", [-2, 1]), "other than -1, 0, 1"),
        (broken("mask_counts", [1, 2]), "1 dimensions, expected 2"),
        (broken("mask_counts", [[3]]), "another number of examples"),
        (broken("mask_counts", [[1, 1]]), "mask_positions differ"),
        (broken("mask_inputs", [4, 4]), "mask_inputs differ in number"),
        (broken("mask_inputs", [4, 4, 4], "u4"), "differ in type"),
        (broken("mask_positions", [5, 1, 4]), "outside its example"),
        (broken("mask_positions", [3, 4, 4]), "do not ascend"),
        (broken("mask_positions", [3, 4, 1]), "do not ascend"),
    ],
)
def test_a_block_that_breaks_a_rule_is_not_written(block: Block, rule: str) -> None:
    with pytest.raises(ShardError, match=rule):
        encode_block(block)


def test_a_compressed_or_foreign_block_is_refused() -> None:
    arrays = {name: getattr(tiny_block(), name) for name in MEMBERS}
    for written, message in (
        (lambda to: np.savez_compressed(to, **arrays), "compressed"),
        (lambda to: np.savez(to, **{k: v for k, v in arrays.items() if k != "lengths"}), "lacks lengths"),
        (lambda to: np.savez(to, **arrays, other=np.zeros(1)), "'other' is unknown"),
        (lambda to: np.savez(to, **{**arrays, "mask_counts": np.asfortranarray(np.ones((3, 2), "u2"))}), "form"),
    ):
        buffer = io.BytesIO()
        written(buffer)
        with pytest.raises(ShardError, match=message):
            decode_block(buffer.getvalue(), where="x")


def test_shard_bytes_depend_on_the_blocks_alone(tmp_path: Path, make_block: MakeBlock) -> None:
    records = []
    for folder, mask in (("a", 0o022), ("b", 0o077)):
        (tmp_path / folder).mkdir()
        old = os.umask(mask)
        with ShardWriter(tmp_path / folder, "shard-0.tar") as writer:
            for number in range(3):
                writer.add(f"k-{number}", make_block(rng(number), 4, 2))
        os.umask(old)
        records.append(writer.record)
    assert records[0] == records[1] == scan_shard(tmp_path / "a" / "shard-0.tar")
    assert ShardRecord.from_json(records[0].to_json()) == records[0]
    data = (tmp_path / "a" / "shard-0.tar").read_bytes()
    assert data == (tmp_path / "b" / "shard-0.tar").read_bytes()
    assert hashlib.sha256(data).hexdigest() == records[0].sha256
    with tarfile.open(tmp_path / "a" / "shard-0.tar") as tar:
        members = tar.getmembers()
        assert [(m.name, m.mtime, m.uid, m.gid, m.uname, m.mode) for m in members] == [
            (f"k-{number}.npz", 0, 0, 0, "", 0o644) for number in range(3)
        ]
        for member, row in zip(members, records[0].rows, strict=True):
            assert (member.offset_data, member.size) == (row.offset, row.length)


def test_stock_webdataset_reads_shards_as_they_are(tmp_path: Path, make_block: MakeBlock) -> None:
    import webdataset

    blocks = {f"{shard}-{number}": make_block(rng(10 * shard + number), 4, 2) for shard in (0, 1) for number in (0, 1)}
    for shard in (0, 1):
        with ShardWriter(tmp_path, f"shard-{shard}.tar") as writer:
            for number in (0, 1):
                writer.add(f"{shard}-{number}", blocks[f"{shard}-{number}"])
    urls = [str(tmp_path / f"shard-{shard}.tar") for shard in (0, 1)]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode())
    assert [sample["__key__"] for sample in samples] == list(blocks)
    for sample in samples:
        assert_equal(Block(**sample["npz"]), blocks[sample["__key__"]])


def test_r15_a_shard_has_its_final_name_only_when_complete(tmp_path: Path) -> None:
    script = tmp_path / "writer.py"
    script.write_text(
        "import os, signal, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from data_pipeline.records import Block\n"
        "from data_pipeline.shards import ShardWriter\n"
        "def sample(i):\n"
        "    one, none = np.array([4], np.uint16), np.zeros(0, np.uint16)\n"
        "    return Block(input_ids=np.array([2, i + 5, 3, 3], np.uint16), lengths=one, segment_a_lengths=one,\n"
        "                 nsp_labels=np.array([-1], np.int8), mask_counts=np.zeros((0, 1), np.uint16),\n"
        "                 mask_positions=none, mask_inputs=none)\n"
        "writer = None\n"
        "for i in range(12):\n"
        "    if i % 5 == 0:\n"
        "        if writer: writer.close()\n"
        "        writer = ShardWriter(Path(sys.argv[2]), f'shard-{i // 5}.tar')\n"
        "    writer.add(f'{i:04d}', sample(i))\n"
        "if sys.argv[3] == 'die': os.kill(os.getpid(), signal.SIGKILL)\n"
        "writer.close()\n"
    )
    output = tmp_path / "out"
    output.mkdir()
    command = [sys.executable, str(script), str(ROOT), str(output)]
    assert subprocess.run([*command, "die"], check=False).returncode == -signal.SIGKILL
    assert sorted(path.name for path in output.glob("*.tar")) == ["shard-0.tar", "shard-1.tar"]
    assert len(list(output.iterdir())) == 3, "the interesting case: a third shard was under way"
    for path in output.glob("*.tar"):
        assert len(scan_shard(path).rows) == 5
    subprocess.run([*command, "live"], check=True)
    assert sorted(path.name for path in output.iterdir()) == ["shard-0.tar", "shard-1.tar", "shard-2.tar"]
    keys = [row.key for path in sorted(output.glob("*.tar")) for row in scan_shard(path).rows]
    assert keys == [f"{i:04d}" for i in range(12)]


def test_r15_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ShardWriter(tmp_path, "shard-0.tar") as writer:
        writer.add("k", tiny_block())
        raise RuntimeError
    with pytest.raises(ShardError, match="no block"), ShardWriter(tmp_path, "shard-0.tar"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_r16_keys_that_would_break_a_tar_are_refused_and_samples_stay_apart(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "shard-0.tar") as writer:
        for name in ("wiki.v1", "wiki/v1", "Wiki", "wikié", "", "a" * 81):
            with pytest.raises(ValueError, match="key"):
                writer.add(name, tiny_block())
        for key in ("wiki-v1", "wiki-v2"):
            writer.add(key, tiny_block())
    with pytest.raises(ValueError, match="shard name"):
        ShardWriter(tmp_path, "../shard-0.tar")
    assert [row.key for row in scan_shard(tmp_path / "shard-0.tar").rows] == ["wiki-v1", "wiki-v2"]


def foreign_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_r17_interleaved_repeated_and_incomplete_members_are_refused(tmp_path: Path) -> None:
    block = encode_block(tiny_block())
    arrays = {name: getattr(tiny_block(), name) for name in MEMBERS if name != "lengths"}
    lacking = io.BytesIO()
    np.savez(lacking, **arrays)
    for members, message in (
        ([("0.a", b"x"), ("1.a", b"x"), ("0.b", b"x"), ("1.b", b"x")], "member '0.a' is not a block"),
        ([("0.a", b"x"), ("0.a", b"x")], "member '0.a' is not a block"),
        ([("0.npz", block), ("1.npz", block), ("0.npz", block)], "key '0' comes twice"),
        ([("0.npz", block), ("0.npz", block)], "key '0' comes twice"),
        ([("0.npz", block), ("1.npz", lacking.getvalue())], "key '1': the block lacks lengths"),
        ([("0.npz", block), ("wiki.v1.npz", block)], "member 'wiki.v1.npz' is not a block"),
        ([], "no blocks"),
    ):
        path = foreign_tar(tmp_path / "foreign.tar", members)
        with pytest.raises(ShardError, match=message) as caught:
            scan_shard(path)
        assert "foreign.tar" in str(caught.value)
    good = foreign_tar(tmp_path / "good.tar", [("0.npz", block), ("1.npz", block)])
    assert [row.key for row in scan_shard(good).rows] == ["0", "1"]


def test_r17_a_key_is_not_written_twice(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "shard-0.tar") as writer:
        writer.add("9", tiny_block())
        with pytest.raises(ShardError, match="'9' is in this shard already"):
            writer.add("9", tiny_block())


def test_a_tar_cut_anywhere_is_found(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "shard-0.tar") as writer:
        for key in ("0", "1"):
            writer.add(key, tiny_block())
    data = (tmp_path / "shard-0.tar").read_bytes()
    path = tmp_path / "cut.tar"
    for size in [*range(0, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ShardError, match=r"cut\.tar"):
            scan_shard(path)
    path.write_bytes(data + b"more")
    with pytest.raises(ShardError, match=r"cut\.tar"):
        scan_shard(path)
