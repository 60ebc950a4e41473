"""One rank of the model's multi-rank test: a student trained against a teacher in each ZeRO stage. Run by
tests/test_pretrain_model_ranks.py with RANK, WORLD_SIZE, ... set:

    python tests/model_worker.py DATA_DIR TEACHER_DIR OUTPUT_DIR

Leaves one run folder a stage.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster.world import current_world
from pretrain import engine
from pretrain.config import TrainConfig
from pretrain.run_data import RunData
from pretrain.stops import StopRequest
from pretrain.trainer import train

STAGES = (1, 2, 3)


def make_config(data: Path, teacher: Path, run: Path, stage: int) -> TrainConfig:
    """Four steps of a two-layer student without dropout."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # cut everything, as a large model is cut
    tree = {
        "seed": 3,
        "data": {"dir": str(data)},
        "run": {"dir": str(run), "threads": 1},
        "model": {
            "architecture": "distilbert",
            "layers": 2,
            "hidden": 32,
            "heads": 2,
            "intermediate": 64,
            "type_vocab": 0,
            "sentence_objective": "none",
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "train": {"steps": 4, "global_batch": 16, "micro_batch": 4, "log_every": 1},
        "optimizer": {"lr": 1.0e-2, "eps": 1e-3, "grad_clip": 1.0},
        "schedule": {"shape": "constant"},
        "checkpoint": {"every": 100},
        "validation": {"every": 4, "micro_batch": 4},
        "tracking": {"enabled": False},
        "distillation": {"teacher": str(teacher)},
        "deepspeed": {"zero_optimization": zero},
    }
    return TrainConfig.model_validate(tree)


def main() -> None:
    """Train one run a stage."""
    data, teacher, out = (Path(argument) for argument in sys.argv[1:])
    world = current_world()
    for stage in STAGES:
        config = make_config(data, teacher, out / f"stage-{stage}", stage)
        opened = RunData(config)
        assert train(opened.model_config(), world, opened, StopRequest()) == 0
    engine.stop_ranks()


if __name__ == "__main__":
    main()
