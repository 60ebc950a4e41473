"""What the scenarios of the runtime's multi-rank tests share: a tiny run, a stop at a step, reading results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint import load_model_weights, newest_complete
from pretrain.config import TrainConfig
from pretrain.stops import StopRequest

STAGES = (0, 1, 2, 3)


def make_config(data: Path, run: Path, **tables: dict[str, Any]) -> TrainConfig:
    """A tiny run; `tables` are merged into the tables of the same name."""
    tree: dict[str, Any] = {
        "seed": 3,
        "data": {"dir": str(data)},
        "run": {"dir": str(run), "threads": 1},
        "model": {"layers": 2, "hidden": 32, "heads": 2, "intermediate": 64},
        "train": {"steps": 10, "global_batch": 16, "micro_batch": 4, "log_every": 1},
        "optimizer": {"lr": 1.0e-2, "grad_clip": 1.0},
        "schedule": {"warmup_steps": 4},
        "checkpoint": {"every": 100, "keep": 2},
        "validation": {"every": 5, "micro_batch": 4},
        "tracking": {"enabled": False},
    }
    for name, table in tables.items():
        tree[name] = {**tree.get(name, {}), **table}
    return TrainConfig.model_validate(tree)


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """A [deepspeed] table."""
    table: dict[str, Any] = {"stage": stage}
    if stage == 3:
        table["stage3_param_persistence_threshold"] = 0  # cut everything, as a large model is cut
    return {"zero_optimization": table, **more}


def records(run: Path) -> list[dict[str, Any]]:
    """The train lines of metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


class StopAt(StopRequest):
    """Asks for a stop before this step is taken, as a signal would."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.asked = step, 0

    @property
    def wanted(self) -> bool:
        """True from the step-th question on; the loop asks once a step."""
        self.asked += 1
        return self.asked >= self.step

    @wanted.setter
    def wanted(self, value: bool) -> None:
        del value


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """The newest checkpoint's weights."""
    folder = newest_complete(run / "checkpoints")
    assert folder is not None
    return load_model_weights(folder)
