"""The data of a run: masks drawn at load time, shards sampled at start, what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.world import World
from data_pipeline.config import ConfigError
from data_pipeline.records import Block
from data_pipeline.shard_index import DatasetInfo, ShardIndex, write_index
from data_pipeline.shards import ShardWriter
from data_pipeline.tokenizer import load_tokenizer
from data_pipeline.tokenizer_folder import Normalisation
from data_pipeline.wordpiece import WordPieceTokenizer
from pretrain.config import TrainConfig
from pretrain.run_data import RunData
from pretrain.run_folder import open_run

RULE = {"mask_prob": 0.15, "max_predictions": 4, "whole_word": False, "span_masking": False, "max_seq_length": 24}


def write_unmasked(folder: Path, make_block: Callable[..., Block], tokenizer: str) -> None:
    """57 examples in two shards, without masks."""
    rng = np.random.default_rng(0)
    records = []
    folder.mkdir(exist_ok=True)
    for shard in range(2):
        with ShardWriter(folder, f"shard-{shard:05d}.tar") as writer:
            for number in range(3):
                writer.add(f"{shard:05d}-{number:06d}", make_block(rng, 9 + (shard + number) % 2, 0))
        assert writer.record is not None
        records.append(writer.record)
    special = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    info = DatasetInfo(
        settings=RULE, tokenizer=tokenizer, vocab_size=100, special_ids=special, max_seq_length=24, mask_sets=0
    )
    write_index(folder, records, info)


@pytest.fixture
def folder(tmp_path: Path, make_block: Callable[..., Block]) -> Path:
    """A data set without masks, and its tokenizer."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(95))]
    flags = Normalisation(lowercase=True, strip_accents=True, split_cjk=True)
    WordPieceTokenizer(tokens, flags).save(tmp_path / "tokenizer")
    write_unmasked(tmp_path / "train", make_block, load_tokenizer(tmp_path / "tokenizer").fingerprint)
    return tmp_path


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    """A configuration for data in `folder`; tables in `changes` are merged into it."""
    tree: dict[str, Any] = {
        "seed": 3,
        "data": {"dir": str(folder)},
        "run": {"dir": str(folder / "run")},
        "model": {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 64},
        "train": {"steps": 9, "global_batch": 28, "micro_batch": 28},
        "optimizer": {"lr": 1e-3},
        "validation": {"every": 0},
    }
    for name, value in changes.items():
        tree[name] = tree[name] | value if isinstance(value, dict) else value
    return TrainConfig.model_validate(tree)


def test_masks_are_drawn_at_load_time_others_each_epoch_and_the_same_after_a_resume(folder: Path) -> None:
    data = RunData(config_of(folder))
    epoch = data.index.examples  # 57: two steps and one example
    with data.loader(World()) as loader:
        first, second, third = (next(loader)[0] for _ in range(3))
        state = loader.state_dict()
        fourth = next(loader)[0]
    assert 2 * 28 < epoch < 3 * 28
    assert all(len(batch.mask_labels_P) >= 28 for batch in (first, second, third))
    assert float((first.input_ids_T == 4).float().mean()) > 0.05
    with data.loader(World(), state) as loader:
        again = next(loader)[0]
    assert torch.equal(again.input_ids_T, fourth.input_ids_T)
    assert torch.equal(again.mask_positions_P, fourth.mask_positions_P)


def test_another_tokenizer_beside_such_data_is_refused(folder: Path, make_block: Callable[..., Block]) -> None:
    write_unmasked(folder / "train", make_block, "0" * 64)
    with pytest.raises(ConfigError, match="not the tokenizer that"):
        RunData(config_of(folder)).verify_sample(World())  # at the start
    for path in (folder / "tokenizer").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match="masks are drawn at load time and need the data's tokenizer"):
        RunData(config_of(folder)).loader(World())


def test_a_damaged_shard_is_found_at_start(folder: Path) -> None:
    data = RunData(config_of(folder))
    data.verify_sample(World())
    for path in (folder / "train").glob("*.tar"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    with pytest.raises(ConfigError, match="its bytes are not those that were written"):
        RunData(config_of(folder)).verify_sample(World())


def test_a_damaged_shard_of_a_later_phase_is_found_at_the_runs_start(folder: Path) -> None:
    for name in ("train", "tokenizer"):
        shutil.copytree(folder / name, folder / "long" / name)
    phases = [{"steps": 4}, {"steps": 5, "data_dir": str(folder / "long")}]
    data = RunData(config_of(folder).model_validate({**config_of(folder).as_tree(), "phases": phases}))
    data.verify_sample(World())
    for path in (folder / "long" / "train").glob("*.tar"):
        path.write_bytes(path.read_bytes().replace(b"\x01", b"\x02", 1))
    with pytest.raises(ConfigError, match="its bytes are not those that were written"):
        data.verify_sample(World())


def test_zero_3_with_fewer_held_out_examples_than_ranks_is_refused(folder: Path) -> None:
    (folder / "validation").symlink_to(folder / "train")  # 57 examples
    stage = {"zero_optimization": {"stage": 3}}
    config = config_of(folder, validation={"every": 5}, train={"global_batch": 58, "micro_batch": 1})
    RunData(config).require_ranks(World(size=58, master_port=1))
    config = config.model_copy(update={"deepspeed": stage})
    RunData(config).require_ranks(World(size=57, master_port=1))
    with pytest.raises(ConfigError, match="57 held-out examples for 58 ranks, ZeRO-3 needs one each"):
        RunData(config).require_ranks(World(size=58, master_port=1))


def test_a_start_at_step_100_000_reads_only_what_its_steps_hold(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = ShardIndex.read_block
    monkeypatch.setattr(ShardIndex, "read_block", lambda index, row: (reads.append(row), read(index, row))[1])
    data = RunData(config_of(folder))
    with data.loader(World(), {"seed": 3, "position": 100_000 * 28, "dataset_examples": 57}) as loader:
        next(loader)
        assert loader.position == 100_001 * 28
    blocks = len(data.index.blocks)
    assert 0 < len(reads) <= 8 * blocks  # of the step, and of those that the thread has prepared


def test_examples_longer_than_the_position_table_are_refused(folder: Path) -> None:
    short = config_of(folder, model={"max_positions": 16}, data={"max_seq_length": 16})
    with pytest.raises(ConfigError, match=r"examples of up to 24 tokens do not fit model\.max_positions=16"):
        RunData(short)


def test_held_out_shards_must_be_there_and_of_the_same_tokenizer(
    folder: Path, make_block: Callable[..., Block]
) -> None:
    with pytest.raises(ConfigError, match=r"no held-out shards, but validation\.every=5"):
        RunData(config_of(folder, validation={"every": 5}))
    write_unmasked(folder / "validation", make_block, "0" * 64)
    with pytest.raises(ConfigError, match="made with another tokenizer than"):
        RunData(config_of(folder))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tokenizer": "u" * 64}, "fingerprint of the tokenizer: tttt"),
        ({"data": "e" * 64}, "fingerprint of the data: dddd"),
        ({"config": {"seed": 4}}, "seed: 3 -> 4"),
        ({"config": {"model": {"layers": 2}}}, "model.layers: 1 -> 2"),
    ],
)
def test_a_folder_continues_only_the_run_that_it_holds(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    prints = {"tokenizer": "t" * 64, "data": "d" * 64}
    begun = open_run(config_of(tmp_path), **prints)
    other = config_of(tmp_path, **changed.pop("config", {}))
    with pytest.raises(ConfigError) as refusal:
        open_run(other, **prints | changed)
    assert words in str(refusal.value) and "run.dir" in str(refusal.value)
    gone_on = open_run(config_of(tmp_path, optimizer={"lr": 2e-3}), **prints)
    assert gone_on.run_id == begun.run_id
    assert gone_on.record["changes"] == ["optimizer.lr: 0.001 -> 0.002"]
    computed_otherwise = open_run(config_of(tmp_path, model={"activation_checkpointing": True}), **prints)
    assert computed_otherwise.record["changes"][0] == "model.activation_checkpointing: False -> True"
