"""DeepSpeed's configuration, built from ours by one pure function. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

import copy
from typing import Any

from data_pipeline.config import ConfigError
from pretrain.config import TrainConfig

_FILLED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OURS = {
    "optimizer": "use the [optimizer] table",
    "scheduler": "use the [schedule] table",
    "data_efficiency": "the loader's order is fixed by the seed",
    "curriculum_learning": "the loader's order is fixed by the seed",
    "elasticity": "the global batch is kept for any number of ranks",
    "sequence_parallel_size": "sequences are not split over ranks",
    "datastates_ckpt": "use checkpoint.asynchronous",
}


def accumulation_steps(config: TrainConfig, world_size: int) -> int:
    """Micro-steps of one optimizer step: global_batch / (micro_batch x ranks).

    Raises:
        ConfigError: no whole number; the nearest valid numbers of ranks and global batches are named.
    """
    global_batch, micro_batch = config.train.global_batch, config.train.micro_batch
    if global_batch % (micro_batch * world_size) == 0:
        return global_batch // (micro_batch * world_size)
    piece = micro_batch * world_size
    below, above = global_batch // piece * piece, -(-global_batch // piece) * piece
    batches = " or ".join(str(size) for size in (below, above) if size > 0)
    message = (
        f"train.global_batch={global_batch} is not a multiple of train.micro_batch={micro_batch} x {world_size} ranks "
        f"= {piece}; nearest valid global_batch: {batches}"
    )
    if global_batch % micro_batch == 0:
        most = global_batch // micro_batch
        valid = [ranks for ranks in range(1, most + 1) if most % ranks == 0]
        fewer = [ranks for ranks in valid if ranks < world_size][-1:]
        more = [ranks for ranks in valid if ranks > world_size][:1]
        message += f"; nearest valid number of ranks: {' or '.join(str(ranks) for ranks in fewer + more)}"
    raise ConfigError(message)


def deepspeed_config(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize`: the `[deepspeed]` table with sizes and clipping filled in.

    Sizes may be left out, be "auto", or repeat the right value. Logging by DeepSpeed itself is off unless asked for.

    Raises:
        ConfigError: sizes that contradict [train], a part that this project does itself, a ZeRO stage that is none or
            that the optimizer does not support.
    """
    merged = copy.deepcopy(config.deepspeed)
    for key, instead in _OURS.items():
        if key in merged:
            raise ConfigError(f"key 'deepspeed.{key}' is not used: {instead}")
    if "writer" in merged.get("checkpoint", {}):
        raise ConfigError("key 'deepspeed.checkpoint.writer' is not used: use checkpoint.asynchronous")
    sizes = (config.train.global_batch, config.train.micro_batch, accumulation_steps(config, world_size))
    for key, value in zip(_FILLED, sizes, strict=True):
        given = merged.get(key, "auto")
        if given not in ("auto", value):
            raise ConfigError(
                f"key 'deepspeed.{key}': {given} contradicts [train], which gives {value} on {world_size} ranks; "
                f"leave it out"
            )
        merged[key] = value
    clipping = merged.get("gradient_clipping", "auto")
    merged["gradient_clipping"] = config.optimizer.grad_clip if clipping == "auto" else clipping
    merged.setdefault("steps_per_print", None)
    merged.setdefault("zero_force_ds_cpu_optimizer", False)  # offload works with torch's AdamW: no compiler needed
    zero = merged.setdefault("zero_optimization", {})
    zero.setdefault("stage", 0)
    if zero["stage"] not in (0, 1, 2, 3):
        raise ConfigError(f"key 'deepspeed.zero_optimization.stage': expected 0, 1, 2 or 3, got {zero['stage']!r}")
    if config.optimizer.name == "lamb":
        if zero["stage"] == 3:
            raise ConfigError(
                "key 'optimizer.name': lamb does not run under ZeRO-3; set the stage to 0, 1 or 2, or use adamw"
            )
        merged.setdefault("zero_allow_untested_optimizer", True)
    if precision(config) == "fp16":
        merged["fp16"].setdefault("min_loss_scale", config.faults.min_loss_scale)
    return merged


def precision(config: TrainConfig) -> str:
    """ "fp16", "bf16" or "fp32", as the `[deepspeed]` table says.

    Raises:
        ConfigError: both halves are enabled.
    """
    enabled = [name for name in ("fp16", "bf16") if config.deepspeed.get(name, {}).get("enabled", False)]
    if len(enabled) == 2:
        raise ConfigError("keys 'deepspeed.fp16' and 'deepspeed.bf16' are both enabled: choose one")
    return enabled[0] if enabled else "fp32"


def zero_stage(config: TrainConfig) -> int:
    """The ZeRO stage, 0 where none is asked for."""
    return int(config.deepspeed.get("zero_optimization", {}).get("stage", 0))
