"""What `--dry-run` prints: sizes, steps, tokens and memory of a run, with or without its data."""

from __future__ import annotations

from dataclasses import fields

from cluster.plan import GIB, Shape, activation_bytes, state_bytes
from cluster.world import World
from pretrain.config import TrainConfig
from pretrain.deepspeed_config import accumulation_steps, precision, zero_stage
from pretrain.phases import Phase, phases_of
from pretrain.run_data import RunData


def describe_run(config: TrainConfig, world: World) -> str:
    """The plan of a run as text; where its data are not built, the vocabulary is that of `[tokenizer]`.

    Raises:
        ConfigError: data that are there but do not fit.
    """
    import torch  # seconds, and not needed to refuse a configuration

    from pretrain.encoder import BertForPreTraining

    if RunData.is_built(config):
        config = RunData(config).model_config()
    elif not config.model.vocab_size:
        model = config.model.with_vocabulary(config.tokenizer.vocab_size, config.model.pad_id)
        config = config.model_copy(update={"model": model})
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in BertForPreTraining(config.model).parameters())
    stage = zero_stage(config)
    memory = state_bytes(parameters, world.size, stage) / GIB
    lines = [f"parameters     {parameters:,}"]
    if config.schedule.budget_hours:
        lines.append(f"time           {config.schedule.budget_hours:g} hours of training; steps and tokens are at most")
    for phase in phases_of(config):
        lines += _phase_lines(phase, world, numbered=bool(config.phases), run_data_dir=config.data.dir)
    lines.append(
        f"memory         {memory:.2f} GiB a rank for weights, gradients and optimizer, ZeRO {stage}, {precision(config)}"
    )
    return "\n".join([*lines, f"run folder     {config.run.dir}"])


def _phase_lines(phase: Phase, world: World, *, numbered: bool, run_data_dir: str) -> list[str]:
    part, train, steps = phase.config, phase.config.train, phase.end - phase.start
    sizes = f"{train.micro_batch} x {accumulation_steps(part, world.size)} x {world.size} ranks"
    own = " of this phase alone" if phase.own_schedule else ""
    warmup = (
        f"{part.schedule.warmup_share:.0%} of the time"
        if part.schedule.budget_hours
        else f"{part.schedule.warmup_steps:,}"
    )
    schedule = f"{part.optimizer.name} {part.optimizer.lr:g}, {part.schedule.shape}, warm-up {warmup}{own}"
    lines = [f"phase {phase.number}"] if numbered else []
    lines += [
        f"global batch   {train.global_batch} = {sizes}",
        f"steps          {steps:,} ({schedule})",
    ]
    seen = steps * train.global_batch
    if not RunData.is_built(part):
        lines.append(f"data           not built yet: python -m data_pipeline.build, into {part.data.dir}")
        if part.data.dir == run_data_dir:  # the sequence length of other data is not known before they are built
            lines += [
                f"tokens seen    at most {seen * part.data.max_seq_length:,}",
                _activations(part, part.data.max_seq_length),
            ]
        return lines
    index = RunData(part).index
    return [
        *lines,
        f"data           {index.examples:,} examples, {index.tokens:,} tokens",
        f"epochs         {seen / index.examples:.2f}",
        f"tokens seen    {seen * index.tokens / index.examples:,.0f}",
        _activations(part, index.info.max_seq_length),
    ]


def _activations(config: TrainConfig, length: int) -> str:
    """By the planner's formula, which is of 16-bit activations: twice that in fp32. Nothing where it has none."""
    model, tokens = config.model, config.train.micro_batch * length
    shape = Shape(**{field.name: getattr(model, field.name) for field in fields(Shape)})
    predicted = config.data.mask_prob
    size = activation_bytes(shape, tokens, checkpointing=model.activation_checkpointing, predicted=predicted) / GIB
    size *= 2 if precision(config) == "fp32" else 1
    return f"activations    about {size:.2f} GiB a rank at most, of {config.train.micro_batch} x {length} tokens"
