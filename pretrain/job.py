"""A job: one start of a run on some ranks, from the run folder to the loaded engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cluster.world import World
from data_pipeline.config import ConfigError
from pretrain import collectives, continuation, engine
from pretrain.agreement import require_agreement
from pretrain.checkpoint import list_steps, require_space
from pretrain.config import TrainConfig
from pretrain.distillation import DistillationObjective
from pretrain.encoder import BertForPreTraining
from pretrain.engine import TrainEngine
from pretrain.kernels import describe_kernels
from pretrain.parameter_groups import parameter_groups
from pretrain.phases import Phase, phase_at, phases_of
from pretrain.progress import ProgressDisplay
from pretrain.run_data import RunData
from pretrain.run_folder import RunFolder, open_run
from pretrain.run_tracking import start_tracking
from pretrain.sample_log import SampleLog
from pretrain.saving import Saver
from pretrain.snapshot import Found, Progress, find, resume
from pretrain.starting_weights import starting_model, teaching_objective
from pretrain.stops import StopRequest
from pretrain.system_metrics import SystemMetrics
from pretrain.tracking import MetricsFile, MlflowForwarder
from pretrain.watchdog import Watchdog


@dataclass(kw_only=True)
class Job:
    """Everything one rank needs until the job ends; `metrics`, `forwarder` and `system` exist on rank 0 only."""

    config: TrainConfig
    phase: Phase
    world: World
    folder: RunFolder
    data: RunData
    engine: TrainEngine
    progress: Progress
    stop: StopRequest
    display: ProgressDisplay
    watchdog: Watchdog
    saver: Saver
    samples: SampleLog | None = None
    metrics: MetricsFile | None = None
    forwarder: MlflowForwarder | None = None
    system: SystemMetrics | None = None

    def write(self, record: dict[str, Any]) -> None:
        """Append a record to metrics.jsonl and show it."""
        if self.system is not None and record["kind"] == "train" and (system := self.system.read()):
            record = {**record, "system": system}
        if self.metrics is not None and (problem := self.metrics.write(record)):
            self.display.say(problem)
        if self.forwarder is not None:
            self.forwarder.notify()
        (self.display.train if record["kind"] == "train" else self.display.validation)(record)

    def close(self, status: str) -> None:
        """Finish metrics and tracking; `status` is FINISHED, KILLED (may go on) or FAILED."""
        if self.samples is not None:
            self.samples.close()
        if self.metrics is not None and (problem := self.metrics.close()):
            self.display.say(problem)
        timeout = 30 if status == "FINISHED" else 5  # a signal leaves little time, and nothing is lost without MLflow
        if self.forwarder is not None and not self.forwarder.close(status, timeout=timeout):
            reason = self.forwarder.problem or "it is slow"
            self.display.say(
                f"MLflow lacks the last metrics ({reason}); metrics.jsonl has all, the next start sends them"
            )


def prepare(config: TrainConfig, world: World, data: RunData, stop: StopRequest, device: torch.device) -> Job:
    """Run folder, model, engine, resumed state, metrics and tracking; every rank calls this.

    The job is that of the phase in which the newest checkpoint lies; its `config` has that phase's settings.

    Raises:
        ConfigError: the ranks do not run the same thing, a shard is damaged, the folder holds another run or a checkpoint
            that cannot be continued here, or `model.init_from` does not fit.
        CheckpointError: the disk is too small for the checkpoints.
    """
    require_agreement(config, vocabulary=data.index.info.tokenizer, data=data.fingerprint)
    data.require_ranks(world)
    collectives.on_every_rank(lambda: data.verify_sample(world))
    say = _say if world.rank == 0 else _silent
    origin = None
    if config.run.continues and not collectives.on_rank_zero(lambda: list_steps(Path(config.run.dir) / "checkpoints")):
        origin = _earlier(config, data, say)  # what does not fit is refused before there is a folder
    folder = RunFolder(Path(config.run.dir), collectives.on_rank_zero(lambda: _open_folder(config, data)))
    torch.manual_seed(engine.seed_of(config.seed))
    found = find(folder.checkpoints, folder.run_id, say)
    if found is None and config.run.continues:
        found = origin = origin or _earlier(config, data, say)
    if found is not None and found.state.step > config.train.steps:
        raise ConfigError(
            f"{found.folder}: this run is at step {found.state.step}, past train.steps={config.train.steps}; raise it, or name "
            "another run.dir"
        )
    whole, fresh = config, found is None
    phase = phase_at(phases_of(whole), found.state.step if found else 0)
    config = phase.config
    if whole.phases:
        data = RunData(config)
    model, objective = _built_everywhere(config, fresh=fresh, say=say)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    saves = config.checkpoint
    count = saves.keep + saves.keep_best + len(set(saves.pinned)) + 1  # one is being written
    collectives.on_rank_zero(lambda: require_space(folder.checkpoints, parameters=parameters, count=count))
    groups = parameter_groups(model, config.optimizer.weight_decay)
    trainer = TrainEngine(model, groups, config=config, world=world, device=device, objective=objective)
    first = world.rank == 0
    progress = resume(trainer, found, say) if found else Progress()
    if origin is not None:
        progress = continuation.begin(progress, origin.state, data=folder.record["data"])
    if progress.step == phase.start:
        progress.skipped_before_phase = progress.skipped
        progress.loader = progress.loader if phase.continues_data else None
    display = ProgressDisplay(config.train.steps, progress.step, visible=first)
    job = Job(
        config=config,
        phase=phase,
        world=world,
        folder=folder,
        data=data,
        engine=trainer,
        progress=progress,
        stop=stop,
        display=display,
        watchdog=Watchdog(config.faults.hang_seconds, rank=world.rank),
        saver=Saver(asynchronous=config.checkpoint.asynchronous),
    )
    if config.train.sample_log:
        where = f"{config.data.dir.rstrip('/')}/train"
        job.samples = SampleLog(folder.path, world=world, data=where, after_step=progress.step)
    if first:
        display.say(_headline(job, parameters))
        folder.add_start(step=progress.step, world_size=world.size)
        folder.update(parameters=parameters)
        if origin is not None:
            folder.update(
                continues={"run_id": origin.state.run_id, "step": origin.state.step, "from": config.run.continues}
            )
        job.metrics = MetricsFile(folder.metrics, after_step=progress.step)
        job.system = SystemMetrics(folder.path, device)
        job.forwarder = start_tracking(whole, folder)
    return job


def _built_everywhere(
    config: TrainConfig, *, fresh: bool, say: Callable[[str], None]
) -> tuple[BertForPreTraining, DistillationObjective | None]:
    """Model and objective; what one node's files do not allow is every rank's error."""
    built: list[tuple[BertForPreTraining, DistillationObjective | None]] = []

    def build() -> None:
        model = starting_model(config, fresh=fresh, say=say)
        built.append((model, teaching_objective(model, config, fresh=fresh, say=say)))

    collectives.on_every_rank(build)
    return built[0]


def _earlier(config: TrainConfig, data: RunData, say: Callable[[str], None]) -> Found | None:
    """The checkpoint of another run that a new one begins with; every rank calls this."""
    found = find(*collectives.on_rank_zero(lambda: continuation.earlier_run(config)), say)
    continuation.require_fit(config, found, tokenizer=data.index.info.tokenizer)
    return found


def _open_folder(config: TrainConfig, data: RunData) -> dict[str, Any]:
    try:
        folder = open_run(config, tokenizer=data.index.info.tokenizer, data=data.fingerprint)
    except OSError as error:
        raise ConfigError(
            f"key 'run.dir': {config.run.dir} cannot be written ({error}); name another folder"
        ) from error
    for line in folder.record["changes"]:
        _say(f"changed since the last start: {line}")
    if data.held_out is not None and folder.record.get("unigram_loss") is None:
        folder.update(unigram_loss=data.unigram_loss())
    return folder.record


def _headline(job: Job, parameters: int) -> str:
    config, data = job.config, job.data.index
    epochs = config.train.steps * config.train.global_batch / data.examples
    train, model = config.train, f"{job.folder.record['name']}: {parameters:,} parameters"
    sizes = f"{train.micro_batch} x {job.engine.accumulation} accumulation x {job.world.size} ranks"
    lines = [
        f"{model}, {job.world.size} ranks on {job.engine.device.type}, ZeRO {job.engine.stage}, {job.engine.precision}",
        f"global batch {train.global_batch} = {sizes}",
        f"steps {job.progress.step + 1} to {train.steps}; {epochs:.1f} epochs of {data.examples:,} examples in all",
    ]
    if (job.phase.start, job.phase.end) != (0, train.steps):
        lines[-1] += f"; phase {job.phase.number} is steps {job.phase.start + 1} to {job.phase.end}"
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(job.engine.precision, torch.float32)
    lines += describe_kernels(config.model, job.engine.device, dtype)
    baseline = job.folder.record.get("unigram_loss")
    if baseline is not None:
        lines.append(f"held-out MLM loss of guessing by frequency: {baseline:.4f}")
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    del text
