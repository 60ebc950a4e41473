"""`python -m data_pipeline.inspect`: examples as a person reads them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data_pipeline.inspect import describe, main
from data_pipeline.records import Block
from data_pipeline.shard_index import ShardIndex

ROOT = Path(__file__).resolve().parent.parent
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##believ", "##able", "cat", "dog", "▁sat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_dataset: Callable[..., ShardIndex]) -> Path:
    path = tmp_path_factory.mktemp("inspect") / "data"
    write_dataset(path)
    return path


def block() -> Block:
    """`[CLS] un ##believ ##able cat [SEP] dog ▁sat [SEP]` after a short one; two mask sets."""
    return Block(
        input_ids=np.array([2, 8, 3, 9, 3, 2, 5, 6, 7, 8, 3, 9, 10, 3], np.uint16),
        lengths=np.array([5, 9], np.uint16),
        segment_a_lengths=np.array([3, 6], np.uint16),
        nsp_labels=np.array([0, 1], np.int8),
        mask_counts=np.array([[1, 3], [1, 1]], np.uint16),
        mask_positions=np.array([1, 2, 4, 6, 3, 7], np.uint16),
        mask_inputs=np.array([4, 4, 8, 10, 4, 4], np.uint16),
    )


def test_an_example_is_shown_with_its_masks_and_the_originals_beside_them() -> None:
    tokenizer = SimpleNamespace(tokens=TOKENS, word_starts=np.array([not t.startswith("##") for t in TOKENS]))
    assert describe(block(), 1, 0, tokenizer) == [
        "9 tokens (A 6, B 3), 3 predictions, B is from another document",
        "  A: [CLS] un{[MASK] <- believ}able {= cat} [SEP]",
        "  B: {sat <- dog} sat [SEP]",
    ]
    assert describe(block(), 1, 1, tokenizer)[2] == "  B: dog {[MASK] <- sat} [SEP]"
    assert describe(block(), 0, 1, None) == [
        "5 tokens (A 3, B 2), 1 predictions, B follows A",
        "  A: 2 8 3",
        "  B: {4 <- 9} 3",
    ]


def test_a_shard_and_an_index_show_the_same_examples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for path in (folder, folder / "index.json", folder / "shard-00000.tar"):
        assert main([str(path), "--start", "4", "--count", "3", "--mask-set", "1"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]
    heads = [line for line in shown[0].splitlines() if line.startswith("example")]
    assert [head.split(":")[0] for head in heads] == [
        "example 4 (shard-00000.tar 00000-000000, 4)",
        "example 5 (shard-00000.tar 00000-000001, 0)",
        "example 6 (shard-00000.tar 00000-000001, 1)",
    ]


def test_what_is_not_there_is_one_line_and_exit_code_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ([str(folder / "nowhere")], "not there"),
        ([str(folder.parent)], "no data set here"),
        ([str(folder), "--start", "32"], "holds 32 examples"),
        ([str(folder / "shard-00000.tar"), "--start", "16"], "holds 16 examples"),
        ([str(folder), "--mask-set", "2"], "there are 2 mask sets"),
        ([str(folder), "--count", "0"], "count"),
        ([str(folder), "--tokenizer", str(folder)], "tokenizer"),
    ):
        assert main(arguments) == 2
        errors = capsys.readouterr().err
        assert message in errors
        assert "Traceback" not in errors


def test_the_command_runs_under_its_name_and_the_standard_module_stays(folder: Path) -> None:
    command = [sys.executable, "-m", "data_pipeline.inspect", str(folder), "--count", "1"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "example 0 " in shown.stdout
    code = "import data_pipeline.inspect, inspect; print(inspect.getsource(inspect.getsource)[:3])"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == "def\n"
