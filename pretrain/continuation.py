"""A run that begins where another one ended, by `run.continues`: the second phase as a configuration of its own.

Weights, optimizer state and step go on; data, sizes, rate and schedule are the new configuration's. What `[[phases]]` does
within one run folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_pipeline.config import ConfigError
from pretrain.checkpoint import TrainerState
from pretrain.config import TrainConfig
from pretrain.run_folder import SAME_RESULTS, changed_keys
from pretrain.snapshot import Found, Progress

_FREE = (*SAME_RESULTS, "preset", "init_from", "hidden_dropout", "attention_dropout", "initializer_range")
"""Keys of `[model]` that change neither the tensors nor what they mean."""


def earlier_run(config: TrainConfig) -> tuple[Path, str]:
    """The checkpoints' folder and the run id of the run that this one continues.

    Raises:
        ConfigError: no run there, or it is this one.
    """
    named = Path(config.run.continues)
    folder = named if (named / "run.json").is_file() else named / "pretrain"
    try:
        run_id = json.loads((folder / "run.json").read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"key 'run.continues': {named} holds no run ({error}); name the folder with run.json"
        ) from error
    if folder.resolve() == Path(config.run.dir).resolve():
        raise ConfigError(
            "key 'run.continues': it is run.dir itself, which goes on without this key; name another run.dir"
        )
    return folder / "checkpoints", run_id


def require_fit(config: TrainConfig, found: Found | None, *, tokenizer: str) -> None:
    """Refuse what could not go on, before training.

    Args:
        config: of this run.
        found: the earlier run's newest complete checkpoint.
        tokenizer: fingerprint of this run's data.

    Raises:
        ConfigError: no checkpoint, another encoder or tokenizer, or steps that do not continue.
    """
    where = f"key 'run.continues': {config.run.continues}"
    if found is None:
        raise ConfigError(f"{where} has no complete checkpoint")
    state, start = found.state, config.schedule.start_step
    if state.tokenizer != tokenizer:
        raise ConfigError(f"{where} was trained on data of another tokenizer; build this data with that one")
    differing = changed_keys({"model": _fixed(state.config)}, {"model": _fixed(config.as_tree())})
    if differing:
        raise ConfigError(f"{where} has another encoder: {'; '.join(differing)}")
    if state.step >= config.train.steps:
        raise ConfigError(
            f"{where} is at step {state.step}, but train.steps={config.train.steps}: it counts the steps before, too"
        )
    if start not in (0, state.step):
        raise ConfigError(
            f"{where} is at step {state.step}, but schedule.start_step={start}; set it to {state.step}, or to 0 for one "
            "schedule over all steps"
        )


def begin(progress: Progress, state: TrainerState, *, data: str) -> Progress:
    """The earlier run's progress as this one's: the examples go on only where `data` is the fingerprint of the same ones."""
    progress.loader = progress.loader if state.data == data else None
    progress.skipped_in_a_row, progress.seconds_used = 0, 0.0
    return progress


def _fixed(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.get("model", {}).items() if key not in _FREE}
