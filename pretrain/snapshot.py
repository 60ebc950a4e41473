"""Saving and resuming with all ranks: what checkpoint.py does to files, in step with DeepSpeed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data_pipeline.config import ConfigError
from pretrain import checkpoint, engine
from pretrain.stops import TrainingFault

if TYPE_CHECKING:
    from pretrain.job import Job


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    loader: dict[str, int] | None = None


def save(job: Job) -> Path:
    """Write a checkpoint of the current step; every rank calls this. Returns its folder.

    Raises:
        TrainingFault: a weight is not finite; nothing appears under a checkpoint's name.
    """
    step, root = job.progress.step, job.folder.checkpoints
    incomplete = checkpoint.incomplete_folder(root, step)

    def begin() -> None:
        root.mkdir(parents=True, exist_ok=True)
        checkpoint.clear_incomplete(root)
        incomplete.mkdir()

    engine.on_rank_zero(begin)
    job.engine.save(incomplete, checkpoint.ENGINE_TAG)
    weights = job.engine.full_weights()

    def add_own_files() -> None:
        broken = [name for name, tensor in weights.items() if not torch.isfinite(tensor).all()]
        if broken:
            shutil.rmtree(incomplete)
            raise TrainingFault(f"step {step}: weights that are not finite ({', '.join(broken[:3])}): not saved")
        checkpoint.write_weights(incomplete, weights)
        checkpoint.write_state(incomplete, _state(job))

    engine.on_rank_zero(add_own_files)
    records: dict[str, dict[str, Any]] = {}
    for part in engine.gather_objects(checkpoint.file_records(incomplete, part=job.world.rank, parts=job.world.size)):
        records |= part

    def finish() -> Path:
        written = checkpoint.publish(root, step, records)
        checkpoint.retain(root, keep=job.config.checkpoint.keep, written=written, run_id=job.folder.run_id)
        return written

    return engine.on_rank_zero(finish)


def resume(trainer: engine.TrainEngine, root: Path, run_id: str, say: Callable[[str], None]) -> Progress:
    """Load the newest complete checkpoint of this run, or start at step 0 where there is none; every rank calls this.

    Raises:
        ConfigError: the checkpoint was written on another number of ranks, at another ZeRO stage or in another
            precision. Nothing is dropped and nothing starts over.
    """

    def find() -> tuple[Path, checkpoint.TrainerState] | None:
        folder = checkpoint.newest_complete(root, run_id=run_id, report=say)
        return (folder, checkpoint.read_state(folder)) if folder else None

    found = engine.on_rank_zero(find)
    if found is None:
        return Progress()
    folder, state = found
    here = {"ranks": trainer.world.size, "ZeRO stage": trainer.stage, "precision": trainer.precision}
    there = {"ranks": state.world_size, "ZeRO stage": state.zero_stage, "precision": state.precision}
    differing = [f"{there[key]} {key} -> {here[key]}" for key in here if here[key] != there[key]]
    if differing:
        raise ConfigError(
            f"{folder}: cannot be continued here: {', '.join(differing)}; the optimizer's state would be lost. "
            f"Go on with {state.world_size} ranks, ZeRO stage {state.zero_stage} and {state.precision}"
        )
    trainer.load(folder, checkpoint.ENGINE_TAG)
    say(f"resumed from {folder}")
    return Progress(
        step=state.step, skipped=state.skipped_steps, skipped_in_a_row=state.skipped_in_a_row, loader=state.loader
    )


def _state(job: Job) -> checkpoint.TrainerState:
    progress, record = job.progress, job.folder.record
    return checkpoint.TrainerState(
        step=progress.step,
        skipped_steps=progress.skipped,
        skipped_in_a_row=progress.skipped_in_a_row,
        run_id=job.folder.run_id,
        loader=dict(progress.loader or {}),
        world_size=job.world.size,
        zero_stage=job.engine.stage,
        precision=job.engine.precision,
        tokenizer=record["tokenizer"],
        data=record["data"],
        git=record["git"],
        config=record["config"],
        mlflow_run_id=record.get("mlflow_run_id", ""),
    )
