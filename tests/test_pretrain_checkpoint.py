"""Checkpoint folders: whole or absent, order by number, retention, foreign folders, damage."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain import checkpoint
from pretrain.checkpoint import CheckpointError, TrainerState
from pretrain.config import TrainConfig
from pretrain.run import _finished


def make_step(
    root: Path, step: int, run_id: str = "a", held_out_loss: float | None = None, config: dict[str, Any] | None = None
) -> Path:
    """A small whole checkpoint, written the way the trainer writes one."""
    folder = checkpoint.incomplete_folder(root, step)
    (folder / "deepspeed").mkdir(parents=True)
    (folder / "deepspeed" / "rank_0.pt").write_bytes(b"optimizer" * 50)
    checkpoint.write_weights(folder, {"weight": torch.full((3,), float(step))})
    state = TrainerState(
        step=step, skipped_steps=0, skipped_in_a_row=0, run_id=run_id, loader={"position": step}, world_size=1,
        zero_stage=0, precision="fp32", tokenizer="t", data="d", git="g", config=config or {"seed": 1},
        held_out_loss=held_out_loss,
    )  # fmt: skip
    checkpoint.write_state(folder, state)
    records = {}
    for part in range(3):
        records |= checkpoint.file_records(folder, part=part, parts=3)
    return checkpoint.publish(root, step, records)


def steps(root: Path) -> list[int | None]:
    return [checkpoint.step_of(folder) for folder in checkpoint.list_steps(root)]


@pytest.mark.parametrize(
    ("written", "keep", "left"),
    [(range(200, 1001, 200), 3, [600, 800, 1000]), ((9_800, 9_900, 10_000), 2, [9_900, 10_000])],
)
def test_r27_the_newest_stay_by_step_number(tmp_path: Path, written: list[int], keep: int, left: list[int]) -> None:
    for step in written:
        folder = make_step(tmp_path, step)
        for known in checkpoint.list_steps(tmp_path):
            os.utime(known, (1, 1))
        checkpoint.retain(tmp_path, keep=keep, written=folder, run_id="a")
    assert steps(tmp_path) == left
    assert (tmp_path / "latest").read_text().strip() == checkpoint.step_name(left[-1])


def test_r27_order_does_not_depend_on_the_width_of_names(tmp_path: Path) -> None:
    for step in (9_900, 10_000):
        make_step(tmp_path, step).rename(tmp_path / f"step-{step}")
    assert steps(tmp_path) == [9_900, 10_000]


def test_r27_another_runs_folder_is_never_chosen_and_never_removed(tmp_path: Path) -> None:
    make_step(tmp_path, 5000, run_id="old")
    reports: list[str] = []
    assert checkpoint.newest_complete(tmp_path, run_id="new", report=reports.append) is None
    written = make_step(tmp_path, 100, run_id="new")
    checkpoint.retain(tmp_path, keep=1, written=written, run_id="new")
    assert steps(tmp_path) == [100, 5000]
    assert checkpoint.newest_complete(tmp_path, run_id="new", report=reports.append) == written
    assert all("another run" in report and "step-000005000" in report for report in reports)


def test_r27_only_this_runs_last_step_is_its_end(tmp_path: Path) -> None:
    """A folder of an older run, and a run with another model, are none; what was filled in from the data is no difference."""
    tree: dict[str, Any] = {
        "seed": 3,
        "data": {"dir": "d"},
        "run": {"dir": str(tmp_path)},
        "model": {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 64},
        "train": {"steps": 20, "global_batch": 1, "micro_batch": 1},
        "optimizer": {"lr": 1e-3},
    }
    config = TrainConfig.model_validate(tree)
    stored = config.as_tree()
    stored["model"] |= {"vocab_size": 100, "pad_id": 7}
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "new"}))
    for run_id, layers, finished in (("new", 1, True), ("old", 1, False), ("new", 2, False)):
        stored["model"]["layers"] = layers
        folder = make_step(tmp_path / "checkpoints", 20, run_id=run_id, config=stored)
        assert _finished(config) == (folder if finished else None)


def test_r27_the_one_just_written_stays_even_below_others(tmp_path: Path) -> None:
    for step in (300, 400):
        make_step(tmp_path, step)
    written = make_step(tmp_path, 200)  # after going back to an older checkpoint
    removed = checkpoint.retain(tmp_path, keep=1, written=written, run_id="a", pinned=[300])
    assert steps(tmp_path) == [200, 300, 400]
    assert removed == []


def test_the_best_and_those_pinned_by_a_file_stay_too(tmp_path: Path) -> None:
    losses = {10: 3.0, 20: 2.0, 30: None, 40: 2.0, 50: 2.5, 60: None}
    for step, loss in losses.items():
        written = make_step(tmp_path, step, held_out_loss=loss)
        if step == 30:
            (written / "pinned").touch()
        checkpoint.retain(tmp_path, keep=1, written=written, run_id="a", keep_best=True)
    assert steps(tmp_path) == [20, 30, 60]  # the earlier of two equals is the best
    checkpoint.verify(tmp_path / checkpoint.step_name(30))
    checkpoint.retain(tmp_path, keep=1, written=written, run_id="a")
    assert steps(tmp_path) == [30, 60]


def test_a_disk_that_is_too_small_is_refused_with_both_numbers(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    checkpoint.require_space(root, parameters=1000, count=4)
    with pytest.raises(CheckpointError, match=r"4 checkpoints of 18626451\.49 GiB do not fit: .* GiB are free"):
        checkpoint.require_space(root, parameters=10**15, count=4)


def test_a_state_of_an_earlier_version_lacks_only_what_has_a_default(tmp_path: Path) -> None:
    folder = make_step(tmp_path, 10)
    content = json.loads((folder / "trainer_state.json").read_text())
    for key in ("held_out_loss", "skipped_before_phase"):
        del content[key]
    (folder / "trainer_state.json").write_text(json.dumps(content))
    assert checkpoint.read_state(folder).held_out_loss is None
    del content["loader"]
    (folder / "trainer_state.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="lacks loader"):
        checkpoint.read_state(folder)


def damage_content(folder: Path) -> None:
    path = folder / "deepspeed" / "rank_0.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"X")


def damage_size(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def damage_missing(folder: Path) -> None:
    (folder / "deepspeed" / "rank_0.pt").unlink()


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def damage_state(folder: Path) -> None:
    (folder / "trainer_state.json").write_text(json.dumps({"schema": 99}))


@pytest.mark.parametrize("damage", [damage_content, damage_size, damage_missing, damage_manifest, damage_state])
def test_a_damaged_newest_one_is_reported_and_the_one_before_is_used(tmp_path: Path, damage: object) -> None:
    whole = make_step(tmp_path, 10)
    damage(make_step(tmp_path, 20))  # type: ignore[operator]
    reports: list[str] = []
    assert checkpoint.newest_complete(tmp_path, run_id="a", report=reports.append) == whole
    assert len(reports) == 1 and "step-000000020" in reports[0]


def test_an_interrupted_save_is_no_checkpoint_and_is_cleared(tmp_path: Path) -> None:
    whole = make_step(tmp_path, 10)
    folder = checkpoint.incomplete_folder(tmp_path, 20)
    folder.mkdir()
    (folder / "half.pt").write_bytes(b"x")
    assert checkpoint.newest_complete(tmp_path) == whole
    checkpoint.clear_incomplete(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", whole.name]


def test_weights_come_back_without_deepspeed(tmp_path: Path) -> None:
    folder = make_step(tmp_path / "run" / "pretrain" / "checkpoints", 7)
    for named in (folder, folder.parent, folder.parent.parent, folder.parent.parent.parent):
        assert checkpoint.resolve(named) == folder
    assert torch.equal(checkpoint.load_model_weights(folder)["weight"], torch.full((3,), 7.0))
    assert checkpoint.read_state(folder).loader == {"position": 7}
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoint.resolve(tmp_path / "nothing")
