"""How far a run is, as a checkpoint holds it, and resuming from one with all ranks. Writing one: pretrain/saving.py."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.config import ConfigError
from pretrain import checkpoint, collectives, engine

if TYPE_CHECKING:
    from pretrain.job import Job


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    skipped_before_phase: int = 0
    seconds_used: float = 0.0
    """Of training, by rank 0's clock before the last step; the time budget of `schedule.budget_hours`."""
    loader: dict[str, int] | None = None
    validated: tuple[int, float] | None = None
    """The last validated step and its held-out MLM loss."""


@dataclass(frozen=True)
class Found:
    """The checkpoint to go on from."""

    folder: Path
    state: checkpoint.TrainerState


def find(root: Path, run_id: str, say: Callable[[str], None]) -> Found | None:
    """The newest complete checkpoint of this run, on every rank; None where there is none. Every rank calls this."""

    def look() -> Found | None:
        folder = checkpoint.newest_complete(root, run_id=run_id, report=say)
        return Found(folder, checkpoint.read_state(folder)) if folder else None

    return collectives.on_rank_zero(look)


def resume(trainer: engine.TrainEngine, found: Found, say: Callable[[str], None]) -> Progress:
    """Load a checkpoint; every rank calls this.

    Another number of ranks, and ZeRO 1 and 2 in exchange, go through DeepSpeed's universal checkpoint: weights, moments and
    step count are kept, and the examples go on where they were, as the loader's position counts examples of all ranks.

    Raises:
        ConfigError: another ZeRO stage or precision that cannot be carried over. Nothing is dropped, nothing starts over.
    """
    folder, state = found.folder, found.state
    reason = why_not(state, stage=trainer.stage, precision=trainer.precision, optimizer=trainer.config.optimizer.name)
    if reason:
        raise ConfigError(f"{folder}: cannot be continued here: {reason}")
    there, here = (state.world_size, state.zero_stage), (trainer.world.size, trainer.stage)
    if there == here or trainer.stage == 0:  # without ZeRO every rank holds, and the checkpoint has, everything once
        trainer.load(folder, checkpoint.ENGINE_TAG)
        say(f"resumed from {folder}")
    else:
        with _universal(folder) as converted:
            trainer.load(converted, checkpoint.ENGINE_TAG, universal=True)
        say(f"resumed from {folder}: {there[0]} ranks and ZeRO {there[1]} -> {here[0]} ranks and ZeRO {here[1]}")
    return Progress(
        step=state.step,
        skipped=state.skipped_steps,
        skipped_in_a_row=state.skipped_in_a_row,
        skipped_before_phase=state.skipped_before_phase,
        seconds_used=state.seconds_used,
        loader=state.loader,
    )


def why_not(state: checkpoint.TrainerState, *, stage: int, precision: str, optimizer: str) -> str:
    """The reason why a checkpoint's optimizer state cannot be carried over to these settings; empty where it can."""
    old = state.config.get("optimizer", {}).get("name", optimizer)
    if old != optimizer:
        return f"optimizer.name {old} -> {optimizer}: their states mean different things; go on with {old}"
    if state.precision != precision:
        return (
            f"precision {state.precision} -> {precision}: DeepSpeed stores weights and masters differently; "
            f"go on with {state.precision}"
        )
    if state.zero_stage != stage and not {state.zero_stage, stage} <= {1, 2}:
        return (
            f"ZeRO stage {state.zero_stage} -> {stage}: DeepSpeed's universal checkpoint converts between stages 1 and 2 "
            f"only, and the optimizer's state would be lost; go on with stage {state.zero_stage}, on any number of ranks"
        )
    return ""


@contextlib.contextmanager
def _universal(folder: Path) -> Iterator[Path]:
    """The universal form of a checkpoint's engine files, beside the checkpoint while all ranks read it."""
    converted = folder.parent / f"universal-{folder.name}{checkpoint.TEMPORARY}"

    def convert() -> None:
        shutil.rmtree(converted, ignore_errors=True)
        converted.mkdir()
        engine.to_universal(folder / checkpoint.ENGINE_TAG, converted / checkpoint.ENGINE_TAG)

    collectives.on_rank_zero(convert)
    yield converted
    collectives.barrier()  # all have read it
    collectives.on_rank_zero(lambda: shutil.rmtree(converted))


def state_of(job: Job) -> checkpoint.TrainerState:
    """What a checkpoint of the current step holds beside the tensors."""
    progress, record = job.progress, job.folder.record
    return checkpoint.TrainerState(
        step=progress.step,
        skipped_steps=progress.skipped,
        skipped_in_a_row=progress.skipped_in_a_row,
        skipped_before_phase=progress.skipped_before_phase,
        seconds_used=progress.seconds_used,
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
        held_out_loss=_held_out_loss(progress),
    )


def _held_out_loss(progress: Progress) -> float | None:
    """The loss of this very step, where it was validated and is a number."""
    step, loss = progress.validated or (-1, math.nan)
    return loss if step == progress.step and math.isfinite(loss) else None
