"""Builds of odd corpora and on a full disk: each ends with shards or with one clear line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.build import main
from data_pipeline.shard_index import ShardIndex, verify_shards

ROOT = Path(__file__).resolve().parent.parent
WORDS = ["the", "cat", "sat", "on", "mat", "a", "##a", "dog"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder for text files, beside a small vocabulary."""
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    folder = tmp_path / "corpus"
    folder.mkdir()
    return folder


def write_config(corpus: Path, data: Path, **changes: object) -> str:
    """One sentence a line, no held-out part; changes are keys of `[data]`."""
    keys = {"dir": str(data), "mask_sets": 1, "workers": 1, "max_seq_length": 64} | changes
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    path = corpus.parent / "config.toml"
    path.write_text(
        f'[corpus]\nsource = "text"\npaths = ["{corpus}"]\nsentences = "line"\nheld_out = 0.0\n'
        f'[tokenizer]\npath = "{corpus.parent}/vocab.txt"\n[data]\n' + "\n".join(lines) + "\n"
    )
    return str(path)


def stats_of(data: Path) -> dict[str, object]:
    """`corpus` of the report."""
    return json.loads((data / "train/stats.json").read_bytes())["corpus"]


@pytest.mark.slow
def test_word_of_a_megabyte_and_empty_files(corpus: Path) -> None:
    (corpus / "empty.txt").write_text("")
    (corpus / "word.txt").write_text(f"the cat\n{'a' * 1_000_000} sat\n\nthe {'xyz' * 400_000}\n\n{'a' * 1_000_000}\n")
    (corpus / "plain.txt").write_text("the dog sat on the mat\nthe cat\n\na cat sat\n")
    data = corpus.parent / "data"
    assert main(["--config", write_config(corpus, data)]) == 0
    stats = stats_of(data)
    assert (stats["documents_kept"], stats["overlong_words"], stats["unknown_tokens"]) == (5, 3, 3)
    assert ShardIndex.open(data / "train").examples >= 4


@pytest.mark.slow
def test_ten_thousand_tiny_files(corpus: Path) -> None:
    for number in range(10_000):
        (corpus / f"{number:05d}.txt").write_text("the cat sat\n" if number % 10 else "")
    data = corpus.parent / "data"
    assert main(["--config", write_config(corpus, data)]) == 0
    assert stats_of(data)["documents_kept"] == 9_000
    assert ShardIndex.open(data / "train").examples == 9_000


def test_one_document_much_longer_than_all_others(corpus: Path) -> None:
    """A bucket with nothing but that document would have no partner for its pairs: the buckets are joined."""
    (corpus / "long.txt").write_text("the cat sat on the mat\n" * 50_000)
    (corpus / "short.txt").write_text("a dog sat\n\nthe cat\n")
    data = corpus.parent / "data"
    assert main(["--config", write_config(corpus, data)]) == 0
    index = ShardIndex.open(data / "train")
    assert index.info.settings["buckets"] == 1
    assert index.tokens > 50_000 * 6


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte; skips where it cannot be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_full_disk_ends_the_build_and_room_lets_it_go_on(corpus: Path, small_disk: Path) -> None:
    for part in range(2):
        (corpus / f"{part}.txt").write_text("the cat sat on the mat\na dog sat\n\n" * 15_000)
    data = small_disk / "data"
    config = write_config(corpus, data, workers=2, tasks=2, buckets=2)
    command = [sys.executable, "-m", "data_pipeline.build", "--config", config]
    full = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert full.returncode == 1, full.stdout + full.stderr
    assert "No space left on device" in full.stderr
    assert full.stderr.count("\n") == 1
    assert not (data / "train/index.json").exists()
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert main(["--config", config]) == 0
    assert len(verify_shards(ShardIndex.open(data / "train"))) == 2
