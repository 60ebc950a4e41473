"""Writing checkpoints with all ranks: at once, or by a thread of each rank while training goes on.

A save has three stages: write the files, hash them, publish the folder under its name. Every rank does its part of a stage
alone; between two stages all ranks exchange what came of it, so that one rank's full disk is every rank's error. With
`checkpoint.asynchronous` the state is copied to host memory, which is all that training waits for; a thread does a stage's
part, and the exchange happens after the next step whose own all-reduce said that no rank's thread was running: the threads
themselves never communicate. Until the rename of the last stage there is only a folder that no resume looks at.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pretrain import checkpoint, collectives
from pretrain.checkpoint import SaveError
from pretrain.host_copy import HostCopies
from pretrain.snapshot import state_of
from pretrain.stops import TrainingFault

if TYPE_CHECKING:
    from pretrain.job import Job


@dataclass
class _Failure:
    """What went wrong on a rank, as the others are told."""

    text: str
    fault: bool


class Saver:
    """The checkpoints that one job writes; never two at once.

    Args:
        asynchronous: `checkpoint.asynchronous`.
    """

    def __init__(self, *, asynchronous: bool) -> None:
        self._copies = HostCopies() if asynchronous else None
        self._stages: list[Callable[[list[Any]], Any]] = []
        self._thread: threading.Thread | None = None
        self._outcome: Any = None
        self._step, self._incomplete = 0, Path()

    @property
    def busy(self) -> bool:
        """Whether this rank's thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, job: Job) -> None:
        """Begin a checkpoint of the current step, and finish it unless saves are asynchronous; every rank calls this.

        Raises:
            SaveError: a rank could not write.
            TrainingFault: a weight is not finite. In both cases nothing appears under a checkpoint's name.
        """
        self.finish(job)
        step, root = job.progress.step, job.folder.checkpoints
        self._step, self._incomplete = step, checkpoint.incomplete_folder(root, step)

        def make_folder() -> None:
            try:
                checkpoint.clear_incomplete(root)
                (self._incomplete / checkpoint.ENGINE_TAG).mkdir(parents=True)
            except OSError as error:
                raise SaveError(f"step {step} could not be saved: {error}") from error

        collectives.on_rank_zero(make_folder)
        if self._copies is not None:
            self._copies.start()
        write_rest = job.engine.save(self._incomplete, checkpoint.ENGINE_TAG, self._copies)
        weights = job.engine.full_weights(self._copies)
        if self._copies is not None:
            self._copies.seal()
        state = state_of(job)
        self._stages = [
            lambda _: self._write(write_rest, weights, state),
            lambda _: checkpoint.file_records(self._incomplete, part=job.world.rank, parts=job.world.size),
            lambda records: self._publish(job, records),
        ]
        self._begin_stage([])
        if self._copies is None:
            self.finish(job)

    def look(self, job: Job) -> None:
        """Go on with what was begun; every rank calls this after a step before which no rank was `busy`.

        Raises:
            SaveError, TrainingFault: as `save`.
        """
        if not self._stages:
            return
        if self._thread is not None:
            self._thread.join()
        outcomes = collectives.gather_objects(self._outcome)
        self._stages.pop(0)
        failed = [(rank, found) for rank, found in enumerate(outcomes) if isinstance(found, _Failure)]
        if failed:
            self._stages = []
            if job.world.rank == 0:
                shutil.rmtree(self._incomplete, ignore_errors=True)
            rank, failure = failed[0]
            if failure.fault:
                raise TrainingFault(f"step {self._step}: {failure.text}: not saved")
            raise SaveError(
                f"step {self._step} could not be saved: rank {rank} {failure.text}. Earlier checkpoints are whole, and "
                "the same command goes on from the newest"
            )
        if self._stages:
            self._begin_stage(outcomes)

    def finish(self, job: Job) -> None:
        """Wait for the checkpoint that was begun, if any; every rank calls this.

        Raises:
            SaveError, TrainingFault: as `save`.
        """
        while self._stages:
            job.watchdog.beat(f"writing the checkpoint of step {self._step}")
            self.look(job)

    def _begin_stage(self, before: list[Any]) -> None:
        """Do this rank's part of the next stage, with all ranks' outcomes of the last one."""
        action = self._stages[0]

        def run() -> None:
            try:
                self._outcome = action(before)
            except TrainingFault as fault:
                self._outcome = _Failure(str(fault), fault=True)
            except Exception as error:  # noqa: BLE001 - told to all ranks
                self._outcome = _Failure(self._describe(error), fault=False)
                with contextlib.suppress(OSError):  # the log may lie on the same full disk
                    os.write(2, traceback.format_exc().encode())

        if self._copies is None:
            run()
        else:
            self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
            self._thread.start()

    def _describe(self, error: Exception) -> str:
        """Where, what, and the space that is left: torch does not say why it could not write."""
        text = f"on {socket.gethostname()}: {self._incomplete}: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            text += f" ({shutil.disk_usage(self._incomplete).free / 2**30:.2f} GiB are free there)"
        return text

    def _write(
        self, write_rest: Callable[[], None], weights: dict[str, torch.Tensor], state: checkpoint.TrainerState
    ) -> None:
        """This rank's files of the engine; the first one's own files, which only rank 0 has the weights for.

        Raises:
            TrainingFault: a weight is not finite.
        """
        if self._copies is not None:
            self._copies.arrive()
        broken = [name for name, tensor in weights.items() if not torch.isfinite(tensor).all()]
        if broken:
            raise TrainingFault(f"weights that are not finite ({', '.join(broken[:3])})")
        write_rest()
        if weights:
            checkpoint.write_weights(self._incomplete, weights)
            checkpoint.write_state(self._incomplete, state)

    def _publish(self, job: Job, records: list[dict[str, dict[str, Any]]]) -> None:
        """Rank 0: manifest, rename, retention."""
        if job.world.rank:
            return
        written = checkpoint.publish(
            job.folder.checkpoints, self._step, {name: record for part in records for name, record in part.items()}
        )
        keep = job.config.checkpoint
        checkpoint.retain(
            job.folder.checkpoints,
            keep=keep.keep,
            written=written,
            run_id=job.folder.run_id,
            pinned=keep.pinned,
            keep_best=keep.keep_best,
        )
