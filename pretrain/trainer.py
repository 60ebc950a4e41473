"""The loop: next batch, step, log, validate, checkpoint, stop."""

from __future__ import annotations

import time
from collections.abc import Iterator

from cluster.world import World
from data_pipeline.records import Batch
from pretrain import checkpoint, collectives, engine
from pretrain.config import TrainConfig
from pretrain.job import Job, prepare
from pretrain.meter import Meter
from pretrain.run_data import RunData
from pretrain.spikes import LossSpike, SpikeWatch
from pretrain.stops import EXIT_DONE, EXIT_STOPPED, StopRequest, TrainingFault
from pretrain.stopwatch import TrainingClock
from pretrain.telemetry import device_peak
from pretrain.validation import validate_model


def train(config: TrainConfig, world: World, data: RunData, stop: StopRequest) -> int:
    """Run, or go on with, the training of a configuration; every rank calls this.

    Args:
        config: with the vocabulary filled in (`RunData.model_config`).
        world: this rank's place.
        data: the opened shards.
        stop: set from outside when the job should end early.

    Returns:
        `EXIT_DONE` or `EXIT_STOPPED`.

    Raises:
        ConfigError: the run folder or its checkpoints do not fit the configuration.
        TrainingFault: too many steps in a row with a non-finite gradient, or non-finite weights.
        SaveError: a checkpoint could not be written.
    """
    device = engine.start_ranks(world, threads=config.run.threads)
    rollbacks, skip_to = 0, None
    while True:
        job = prepare(config, world, data, stop, device)
        if skip_to is not None:
            job.progress.loader, skip_to = skip_to, None
        try:
            code = _train_phase(job)
        except LossSpike as spike:
            rollbacks, skip_to = rollbacks + 1, spike.loader
            _note_rollback(job, spike, rollbacks)
            code = None
        if code is not None:
            return code
        job.engine.release()  # two would have to fit into the device's memory
        del job


def _note_rollback(job: Job, spike: LossSpike, count: int) -> None:
    """Say and record that the run goes back.

    Raises:
        TrainingFault: too often.
    """
    if count > job.config.faults.max_rollbacks:
        raise TrainingFault(f"{spike}: {count - 1} roll-backs did not help (faults.max_rollbacks); lower optimizer.lr")
    job.display.say(f"{spike}: back to the newest checkpoint; the examples since then are left out")
    if job.world.rank == 0:
        noted = {"step": job.progress.step, "reason": str(spike), "position": spike.loader["position"]}
        job.folder.update(rollbacks=[*job.folder.record.get("rollbacks", []), noted])


def _train_phase(job: Job) -> int | None:
    """To the end of the phase, the run or at a request to stop; None where another phase comes next."""
    status = "FAILED"
    try:
        with job.display, job.watchdog:
            try:
                code = _loop(job, Meter(job.engine, device_peak(job.engine.device, job.engine.precision)))
            except (LossSpike, TrainingFault):  # on all ranks; a save that was begun before is of good weights
                job.saver.finish(job)
                raise
        if code is not None:
            job.stop.leave()
        status = {EXIT_DONE: "FINISHED", EXIT_STOPPED: "KILLED", None: "RUNNING"}[code]
        return code
    except LossSpike:
        status = "RUNNING"
        raise
    finally:
        job.close(status)


def _loop(job: Job, meter: Meter) -> int | None:
    config, progress, phase = job.config, job.progress, job.phase
    total = config.train.steps
    budget, clock = config.schedule.budget_seconds, TrainingClock(progress.seconds_used)
    spikes = SpikeWatch(config.faults.spike_ratio)
    loader = job.data.loader(job.world, progress.loader, pin_memory=job.engine.device.type == "cuda")
    with loader:
        while progress.step < phase.end:
            job.watchdog.beat(f"reading the examples of step {progress.step + 1}")
            asked = time.perf_counter()
            micro_batches = next(loader)
            waited = time.perf_counter() - asked
            progress.step += 1
            progress.loader = loader.state_dict()
            step = progress.step
            if job.samples is not None:
                job.samples.write(step, loader.position, micro_batches)
            lr = phase.rate(
                step,
                skipped=progress.skipped,
                skipped_before=progress.skipped_before_phase,
                seconds_used=progress.seconds_used,
            )
            job.watchdog.beat(f"in step {step}")
            result = job.engine.step(
                micro_batches,
                number=step,
                lr=lr,
                stop=job.stop.wanted,
                busy=job.saver.busy,
                seconds_used=clock.read(),
            )
            progress.seconds_used = result.seconds_used
            spent = 0 < budget <= progress.seconds_used
            last = step == phase.end or spent
            _count_skips(job, result.applied)
            meter.add(result, waited=waited)
            job.display.step(step)

            if step % config.train.log_every == 0 or last or result.stop:
                record = meter.record(step=step, lr=job.engine.rates()[0], skipped_steps=progress.skipped)
                if budget:
                    record["budget_seconds_left"] = budget - progress.seconds_used
                job.write(record)
                if not result.stop:
                    spikes.look(step, record["mlm_loss"], progress.loader)
            begin = time.perf_counter()
            if not result.busy:
                job.saver.look(job)
            if not result.stop and config.validation.every and (step % config.validation.every == 0 or last):
                found = validate_model(job.engine, _watched(job, job.data.held_out_batches(job.world)))
                progress.validated = (step, found["mlm_loss"])
                job.write({"kind": "validation", "step": step, "time": time.time(), **found})
            if step % config.checkpoint.every == 0 or last or result.stop or step in config.checkpoint.pinned:
                job.watchdog.beat(f"saving step {step}")
                job.saver.save(job)
            if last or result.stop:
                job.saver.finish(job)
            meter.exclude(time.perf_counter() - begin)
            if spent:
                job.display.say(
                    f"complete: schedule.budget_hours={config.schedule.budget_hours:g} are used, step {step}"
                )
                return EXIT_DONE
            if result.stop and step < total:
                stopped = f"stopped after step {step}/{total}{_reason_of_stop(job)}"
                job.display.say(f"{stopped}, checkpoint saved; the same command goes on from there")
                return EXIT_STOPPED
    if phase.end < total:
        job.display.say(f"phase {phase.number} complete at step {phase.end}/{total}")
        return None
    job.display.say(f"complete: {total} steps, {job.folder.checkpoints / checkpoint.step_name(total)}")
    return EXIT_DONE


def _watched(job: Job, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Each held-out batch is progress."""
    for batch in batches:
        job.watchdog.beat(f"validating step {job.progress.step}")
        yield batch


def _reason_of_stop(job: Job) -> str:
    """The reason of the stop, of the first rank that has one; all ranks are here."""
    asked = [(rank, reason) for rank, reason in enumerate(collectives.gather_objects(job.stop.reason)) if reason]
    if not asked:
        return ""
    rank, reason = asked[0]
    return f" ({reason})" if job.world.size == 1 else f" ({reason}, seen by rank {rank})"


def _count_skips(job: Job, applied: bool) -> None:
    """Count a step whose gradient was not finite.

    Raises:
        TrainingFault: too many in a row.
    """
    progress, limit = job.progress, job.config.faults.max_skipped_in_a_row
    if applied:
        progress.skipped_in_a_row = 0
        return
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    scale = f", loss scale now {job.engine.loss_scale:g}" if job.engine.precision == "fp16" else ""
    job.display.say(f"step {progress.step}: the gradient is not finite, weights unchanged{scale}")
    if progress.skipped_in_a_row >= limit:
        raise TrainingFault(
            f"{limit} steps in a row, up to step {progress.step}, had a gradient that is not finite "
            f"(faults.max_skipped_in_a_row); lower optimizer.lr or look at the data of these steps"
        )
