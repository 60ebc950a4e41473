"""The settings of a pretraining run: the pipeline's tables and those that only training reads.

Three layers: the defaults here, one TOML file, `--set table.key=value`. `[model]` has a fourth: `preset = "bert-base"`
takes the keys of configs/models/bert-base.toml first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from data_pipeline.config import PipelineConfig, StrictModel, read_tree, validate
from pretrain.model_config import EncoderConfig, resolve_preset


class RunConfig(StrictModel):
    """`[run]`: where the run lives."""

    dir: str
    """Run folder: run.json, metrics.jsonl, checkpoints/. The same folder again continues the run."""
    name: str = ""
    """Name shown by MLflow and the report; empty: the run folder's name."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of each rank; 0: `OMP_NUM_THREADS` if set, else an equal share of this machine's cores."""
    max_hours: float = Field(default=0.0, ge=0)
    """A start of the job stops by itself after this time, with a checkpoint and exit code 75; 0: never."""
    continues: str = ""
    """Folder of an earlier run: this one begins with its newest checkpoint's weights, optimizer state and step."""


class TrainTable(StrictModel):
    """`[train]`: how long, and in which pieces."""

    steps: int = Field(ge=1)
    """Optimizer steps of the whole run."""
    global_batch: int = Field(ge=1)
    """Examples of one optimizer step, over all ranks: micro_batch x accumulation x ranks."""
    micro_batch: int = Field(ge=1)
    """Examples that one rank runs through the model at once; accumulation follows from it."""
    log_every: int = Field(default=10, ge=1)
    """Steps between two lines of metrics; a line holds the mean of the steps since the last one."""
    sample_log: bool = False
    """For debugging: note a checksum of every example that is trained on; see pretrain/sample_log.py."""


class OptimizerConfig(StrictModel):
    """`[optimizer]`: AdamW with decoupled weight decay (https://arxiv.org/abs/1711.05101), or LAMB (pretrain/lamb.py)."""

    name: Literal["adamw", "lamb"] = "adamw"
    lr: float = Field(gt=0)
    """The peak of the schedule."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-6, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    """Of every tensor except biases and normalisation."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest global L2 norm of the gradient; 0 does not clip."""
    bias_correction: bool = True
    """LAMB: divide the moments by 1 - beta^t."""
    adapt_undecayed: bool = True
    """LAMB: false gives biases and normalisation the trust ratio 1."""
    min_trust_ratio: float | None = Field(default=None, ge=0)
    """LAMB: smallest trust ratio; unset: no bound."""
    max_trust_ratio: float | None = Field(default=None, gt=0)
    """LAMB: largest trust ratio; unset: no bound."""

    @model_validator(mode="after")
    def _lamb_keys_with_lamb(self) -> Self:
        for key in ("bias_correction", "adapt_undecayed", "min_trust_ratio", "max_trust_ratio"):
            if self.name != "lamb" and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"key 'optimizer.{key}': only for optimizer.name=lamb; leave it out")
        if (self.min_trust_ratio or 0) > (self.max_trust_ratio or float("inf")):
            raise ValueError(
                f"key 'optimizer.min_trust_ratio': {self.min_trust_ratio} is over "
                f"optimizer.max_trust_ratio={self.max_trust_ratio}"
            )
        return self

    @model_validator(mode="after")
    def _betas_below_one(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"key 'optimizer.betas': each must lie in [0, 1), got {list(self.betas)}")
        return self


class ScheduleConfig(StrictModel):
    """`[schedule]`: the learning rate as a function of the step; formulas in pretrain/schedule.py."""

    shape: Literal["linear", "polynomial", "cosine", "constant", "exponential", "warmup_stable_decay"] = "linear"
    warmup_steps: int = Field(default=0, ge=0)
    warmup_shape: Literal["linear", "polynomial"] = "linear"
    warmup_power: float = Field(default=1.0, gt=0)
    """Exponent of the polynomial warm-up."""
    warmup_from: float = Field(default=0.0, ge=0, lt=1)
    """The warm-up begins at this share of the peak."""
    power: float = Field(default=1.0, gt=0)
    """Exponent of the polynomial shape, and of the decay that ends warmup_stable_decay."""
    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """The decay ends at this share of the peak."""
    decay_from: Literal["warmup", "start"] = "warmup"
    """Where linear, polynomial and cosine count from; "start" is what BERT's and NVIDIA's code does: a decay over all
    steps whose first part the warm-up hides."""
    decay_rate: float = Field(default=0.99, gt=0, le=1)
    """exponential: what is left of the rate after `decay_steps` updates."""
    decay_steps: int = Field(default=0, ge=0)
    """exponential: updates of one factor `decay_rate`; warmup_stable_decay: updates of the decay at the end."""
    decay_shape: Literal["power", "sqrt"] = "power"
    """warmup_stable_decay: (1 - q) ** power or 1 - sqrt(q)."""
    staircase: bool = False
    """exponential: the rate changes only every `decay_steps` updates."""
    budget_hours: float = Field(default=0.0, ge=0)
    """The rate follows the share of this training time that is used, and the run is complete when all is, or after
    `train.steps`; 0: it follows the steps."""
    start_step: int = Field(default=0, ge=0)
    """The schedule counts from here, as if the run began: for `run.continues` with a warm-up and decay of its own."""
    warmup_share: float = Field(default=0.0, ge=0, lt=1)
    """With `budget_hours`, instead of `warmup_steps`: share of the time that the warm-up takes."""

    @property
    def budget_seconds(self) -> float:
        """`budget_hours` in seconds."""
        return 3600 * self.budget_hours

    @property
    def decay_at_end(self) -> int:
        """Updates that the end of the run is kept for."""
        return self.decay_steps if self.shape == "warmup_stable_decay" else 0

    @model_validator(mode="after")
    def _keys_fit_the_shape(self) -> Self:
        stepped = self.shape in ("exponential", "warmup_stable_decay")
        if stepped != bool(self.decay_steps):
            wanted = "is needed" if stepped else "has no meaning"
            raise ValueError(f"key 'schedule.decay_steps': {wanted} for schedule.shape={self.shape}")
        if self.warmup_power != 1 and self.warmup_shape != "polynomial":
            raise ValueError("key 'schedule.warmup_power': only for schedule.warmup_shape=polynomial")
        return self

    @model_validator(mode="after")
    def _steps_or_time(self) -> Self:
        if self.budget_hours and self.warmup_steps:
            raise ValueError(
                "key 'schedule.warmup_steps': with schedule.budget_hours set schedule.warmup_share instead"
            )
        if self.budget_hours and self.shape in ("exponential", "warmup_stable_decay"):
            raise ValueError(f"key 'schedule.budget_hours': schedule.shape={self.shape} counts steps; choose another")
        if self.budget_hours and self.start_step:
            raise ValueError(
                "key 'schedule.start_step': with schedule.budget_hours the rate follows no steps; leave it out"
            )
        if self.warmup_share and not self.budget_hours:
            raise ValueError("key 'schedule.warmup_share': only with schedule.budget_hours")
        return self


class CheckpointConfig(StrictModel):
    """`[checkpoint]`: how often, and how many stay."""

    every: int = Field(default=1000, ge=1)
    """Steps between two checkpoints; the last step is always saved."""
    keep: int = Field(default=3, ge=1)
    """The newest ones that stay, by step number."""
    keep_best: bool = True
    """The one with the lowest held-out MLM loss, among those saved at a validated step, stays too."""
    pinned: list[int] = Field(default_factory=list)
    """These steps are saved when they are reached, and never removed."""
    asynchronous: bool = False
    """Training goes on while a thread of each rank writes; takes host memory for a copy of the rank's state."""


class ValidationConfig(StrictModel):
    """`[validation]`: the held-out loss during training."""

    every: int = Field(default=1000, ge=0)
    """Steps between two validations; the last step is always validated. 0: never."""
    micro_batch: int = Field(default=32, ge=1)
    """Examples that one rank evaluates at once."""


class PhaseConfig(StrictModel):
    """`[[phases]]`: one part of the run; what is left out is as in the tables. See pretrain/phases.py."""

    steps: int = Field(ge=1)
    """Optimizer steps of this phase; together they are train.steps."""
    data_dir: str = ""
    """Instead of data.dir: data of the same tokenizer, built for example with another data.max_seq_length."""
    global_batch: int = Field(default=0, ge=0)
    micro_batch: int = Field(default=0, ge=0)
    lr: float = Field(default=0.0, ge=0)
    schedule: ScheduleConfig | None = None
    """Warm-up and decay over this phase alone; unset: `[schedule]` goes on over the whole run."""

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.schedule is not None and self.schedule.warmup_steps + self.schedule.decay_at_end >= self.steps:
            raise ValueError(f"key 'phases.schedule': warm-up and decay do not fit into {self.steps} steps")
        if self.schedule is not None and self.schedule.budget_hours:
            raise ValueError("key 'phases.schedule.budget_hours': a time budget is the whole run's, in [schedule]")
        if self.schedule is not None and self.schedule.start_step:
            raise ValueError("key 'phases.schedule.start_step': a phase's own schedule counts from its first step")
        return self


class TrackingConfig(StrictModel):
    """`[tracking]`: MLflow. metrics.jsonl is written whatever is set here."""

    enabled: bool = True
    uri: str = ""
    """Tracking server or store. Empty: `MLFLOW_TRACKING_URI` if set, else the SQLite file mlflow.db beside the run."""
    experiment: str = "clozeworks"


class FaultsConfig(StrictModel):
    """`[faults]`: what happens when numbers go wrong."""

    max_skipped_in_a_row: int = Field(default=20, ge=1)
    """This many steps with a non-finite gradient one after another end the job with a non-zero exit code."""
    min_loss_scale: float = Field(default=1.0, gt=0)
    """fp16: DeepSpeed never lowers its loss scale below this."""
    spike_ratio: float = Field(default=0.0, ge=0)
    """A line of metrics whose MLM loss is over this many times the median of the lines before it takes the run back to its
    newest checkpoint; the examples since then are left out. 0: never."""
    max_rollbacks: int = Field(default=3, ge=1)
    """A start of the job that spikes more often ends with exit code 70."""
    hang_seconds: float = Field(default=1800.0, ge=0)
    """A rank that finishes no step, held-out batch or save for so long prints its stacks and ends the job; 0: never."""


class DistillationConfig(StrictModel):
    """`[distillation]`: a teacher to learn from; without the table there is none."""

    teacher: str = Field(min_length=1)
    """Hugging Face folder with a masked-token head and the vocabulary of the data."""
    temperature: float = Field(default=2.0, gt=0)
    soft_targets: float = Field(default=5.0, ge=0)
    """Weight of the divergence from the teacher's distribution."""
    masked_tokens: float = Field(default=2.0, ge=0)
    """Weight of the ordinary masked-token loss; the sentence objective, where there is one, has weight 1."""
    cosine: float = Field(default=1.0, ge=0)
    """Weight of 1 - cosine of the last hidden states; needs the teacher's hidden size."""
    start_from_teacher: bool = True
    """Start from the teacher's weights, layers 0, n, 2n, ... where it has n times as many; false: from random ones."""


class TrainConfig(PipelineConfig):
    """All tables of a configuration file: the pipeline's and pretraining's."""

    run: RunConfig
    model: EncoderConfig
    train: TrainTable
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    tracking: TrackingConfig = TrackingConfig()
    faults: FaultsConfig = FaultsConfig()
    distillation: DistillationConfig | None = None
    phases: list[PhaseConfig] = Field(default_factory=list)
    """Parts of the run with their own data, sizes or schedule; empty: the run is one."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Passed to DeepSpeed as its own configuration (https://www.deepspeed.ai/docs/config-json/); sizes and clipping are
    filled in, see pretrain/deepspeed_config.py."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.schedule.start_step + self.schedule.warmup_steps >= self.train.steps:
            raise ValueError(
                f"key 'schedule.warmup_steps': {self.schedule.warmup_steps} from schedule.start_step="
                f"{self.schedule.start_step} must be below train.steps={self.train.steps}"
            )
        if self.schedule.start_step + self.schedule.warmup_steps + self.schedule.decay_at_end > self.train.steps:
            raise ValueError(
                f"key 'schedule.decay_steps': warm-up of {self.schedule.warmup_steps} and decay of "
                f"{self.schedule.decay_steps} steps do not fit into train.steps={self.train.steps}"
            )
        if self.data.max_seq_length > self.model.max_positions:
            raise ValueError(
                f"key 'data.max_seq_length': {self.data.max_seq_length} is over the position table of "
                f"model.max_positions={self.model.max_positions}"
            )
        unseen = [step for step in (self.checkpoint.every, *self.checkpoint.pinned) if step % self.train.log_every]
        if self.faults.spike_ratio and unseen:
            raise ValueError(
                f"key 'faults.spike_ratio': a spike is seen in a line of metrics, and going back to a checkpoint of step "
                f"{unseen[0]} could go back into it; make checkpoint.every and pinned multiples of "
                f"train.log_every={self.train.log_every}"
            )
        if self.distillation is not None and self.distillation.start_from_teacher and self.model.init_from:
            raise ValueError(
                "key 'model.init_from': the student starts from its teacher; leave it out, or set "
                "distillation.start_from_teacher=false"
            )
        if self.phases and (self.run.continues or self.schedule.start_step):
            key = "run.continues" if self.run.continues else "schedule.start_step"
            raise ValueError(f"key '{key}': not with [[phases]], which go on in one run; use one of the two ways")
        together = sum(phase.steps for phase in self.phases)
        if self.phases and together != self.train.steps:
            raise ValueError(f"key 'phases': their steps are {together} together, train.steps={self.train.steps}")
        return self

    def as_tree(self) -> dict[str, Any]:
        """The merged configuration as plain JSON values."""
        return self.model_dump(mode="json")

    def fingerprint(self) -> str:
        """sha256 of the merged configuration, the same for the same values."""
        return hashlib.sha256(json.dumps(self.as_tree(), sort_keys=True).encode()).hexdigest()


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The whole configuration of a run.

    Args:
        path: TOML file.
        overrides: `table.key=value` strings, applied in order after the file.

    Raises:
        ConfigError: missing file, not TOML, unknown key (the nearest is named), wrong value, unknown model preset.
    """
    tree = read_tree(path, overrides)
    if isinstance(tree.get("model"), dict):
        tree["model"] = resolve_preset(tree["model"], path)
    return validate(TrainConfig, tree, path)
