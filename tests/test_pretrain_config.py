"""Configuration of a run: layers, refusals, and DeepSpeed's dictionary."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.config import OTHER_TABLES, ConfigError, PipelineConfig
from pretrain.config import TrainConfig, load_config
from pretrain.deepspeed_config import accumulation_steps, deepspeed_config

ROOT = Path(__file__).resolve().parent.parent
TEXT = """
seed = 3
[data]
dir = "runs/x/data"
[run]
dir = "runs/x/pretrain"
[model]
preset = "bert-tiny"
hidden_dropout = 0.0
[train]
steps = 100
global_batch = 64
micro_batch = 4
[optimizer]
lr = 1e-3
[deepspeed]
zero_optimization = { stage = 1 }
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    return path


def test_preset_file_and_override_in_that_order(toml: Path) -> None:
    config = load_config(toml, ["model.layers=1", "optimizer.lr=2e-4", "data.dir=elsewhere"])
    assert (config.model.hidden, config.model.layers) == (128, 1)
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0.0, 0.1)
    assert config.optimizer.lr == 2e-4
    assert config.data.dir == "elsewhere"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.learning_rate=1", "optimizer.learning_rate"),
        ("train.step=5", "did you mean 'steps'"),
        ("optimiser.lr=1", "did you mean 'optimizer'"),
        ("model.preset=bert-tin", "bert-tiny"),
        ("model.hiden=5", "did you mean 'hidden'"),
        ("schedule.warmup_steps=100", "schedule.warmup_steps"),
        ("schedule.start_step=100", "schedule.start_step"),
        ("schedule={start_step=5, budget_hours=1}", "schedule.start_step"),
        ("phases=[{steps=100, schedule={budget_hours=1}}]", "phases.schedule.budget_hours"),
        ("phases=[{steps=100, schedule={start_step=5}}]", "phases.schedule.start_step"),
        ("data.max_seq_length=1024", "position table"),
        ("checkpoint={every=15, pinned=[20]}@faults.spike_ratio=2", "checkpoint of step 15 could"),
        ("checkpoint={every=20, pinned=[5]}@faults.spike_ratio=2", "checkpoint of step 5 could"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas"),
        ("train.steps=-1", "train.steps"),
        ("checkpoint.every", "expected TABLE.KEY=VALUE"),
    ],
)
def test_a_wrong_key_or_value_is_named(toml: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        load_config(toml, override.split("@"))


def test_the_pipeline_knows_every_table_of_this_one() -> None:
    assert set(OTHER_TABLES) == set(TrainConfig.model_fields) - set(PipelineConfig.model_fields)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_loads(path: Path) -> None:
    config = load_config(path)
    assert deepspeed_config(config, 1)["train_batch_size"] == config.train.global_batch


def test_deepspeed_dictionary_golden(toml: Path) -> None:
    assert deepspeed_config(load_config(toml), 4) == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 1},
    }


def test_the_deepspeed_table_passes_through_and_auto_is_filled(toml: Path) -> None:
    extra = ["deepspeed.bf16={enabled=true}", 'deepspeed.train_batch_size="auto"', "deepspeed.gradient_clipping=0.5"]
    merged = deepspeed_config(load_config(toml, [*extra, "deepspeed.zero_optimization.reduce_bucket_size=1000"]), 2)
    assert merged["bf16"] == {"enabled": True}
    assert merged["train_batch_size"] == 64
    assert merged["gradient_clipping"] == 0.5
    assert merged["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 1000}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("deepspeed.train_batch_size=32", "contradicts"),
        ("deepspeed.optimizer={type='Adam'}", r"use the \[optimizer\] table"),
        ("deepspeed.checkpoint={writer={type='FAST'}}", "use checkpoint.asynchronous"),
        ("deepspeed.zero_optimization.stage=4", "0, 1, 2 or 3"),
        ("deepspeed={fp16={enabled=true},bf16={enabled=true}}", "both enabled"),
    ],
)
def test_contradictions_in_the_deepspeed_table_are_refused(toml: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        deepspeed_config(load_config(toml, [override]), 4)


def test_r26_three_ranks_are_refused_with_the_nearest_valid_values(toml: Path) -> None:
    config = load_config(toml)
    assert [accumulation_steps(config, ranks) for ranks in (1, 2, 4, 8, 16)] == [16, 8, 4, 2, 1]
    with pytest.raises(ConfigError) as refusal:
        accumulation_steps(config, 3)
    message = str(refusal.value)
    assert "global_batch=64" in message and "3 ranks" in message
    assert "60 or 72" in message and "ranks: 2 or 4" in message
    with pytest.raises(ConfigError, match=r"nearest valid number of ranks: 16$"):
        accumulation_steps(config, 32)


def test_the_fingerprint_follows_every_value(toml: Path) -> None:
    assert load_config(toml).fingerprint() == load_config(toml).fingerprint()
    assert load_config(toml).fingerprint() != load_config(toml, ["checkpoint.keep=9"]).fingerprint()
