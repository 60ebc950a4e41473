"""The shipped recipes say what the papers say, and each can be planned by `--dry-run`."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from pretrain.config import load_config
from pretrain.phases import phases_of
from pretrain.run import main

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
# batch x steps, rate and warm-up of each phase, as published
PUBLISHED = {
    "bert-base": [(256, 900_000, 1e-4, 10_000), (256, 100_000, 1e-4, 10_000)],
    "bert-large": [(256, 900_000, 1e-4, 10_000), (256, 100_000, 1e-4, 10_000)],
    "bert-large-lamb": [(65_536, 7038, 6e-3, 2000), (32_768, 1563, 4e-3, 200)],  # 28.43 %, 12.8 %
    "bert-large-44min": [(65_536, 7500, 11e-3, 150), (32_768, 1563, 2e-3, 31)],  # 2 %; phase 2's length is ours
    "roberta-base": [(8192, 500_000, 6e-4, 24_000)],
    "roberta-base-2k": [(2048, 125_000, 5e-4, 10_000)],
    "roberta-large": [(8192, 500_000, 4e-4, 30_000)],
    "albert-base": [(4096, 125_000, 1.76e-3, 3125)],
    "bert-base-mosaic": [(4096, 70_000, 5e-4, 4200)],
}
ADAM = {"optimizer.name": "adamw", "optimizer.eps": 1e-6, "optimizer.weight_decay": 0.01}
BERT = {
    **ADAM, "optimizer.betas": (0.9, 0.999), "optimizer.grad_clip": 1.0, "model.hidden_dropout": 0.1,
    "data.mask_prob": 0.15, "data.max_predictions": 20, "data.max_seq_length": 128, "model.sentence_objective": "nsp",
    "schedule.shape": "linear", "schedule.final_ratio": 0.0, "tokenizer.vocab_size": 30522, "data.short_seq_prob": 0.1,
}  # fmt: skip
ROBERTA = {
    **ADAM, "optimizer.betas": (0.9, 0.98), "optimizer.grad_clip": 0.0, "data.max_seq_length": 512, "data.mask_sets": 0,
    "data.mode": "full_sentences", "model.sentence_objective": "none", "model.hidden_dropout": 0.1,
}  # fmt: skip
MODERN = {
    "optimizer.betas": (0.9, 0.98), "optimizer.eps": 1e-6, "optimizer.weight_decay": 1e-5, "data.mask_prob": 0.30,
    "data.max_seq_length": 1024, "tokenizer.vocab_size": 50_368, "model.sentence_objective": "none",
}  # fmt: skip
# the rest of each row
SETTINGS = {
    "bert-base": {**BERT, "model.layers": 12},
    "bert-large": {**BERT, "model.layers": 24, "model.hidden": 1024},
    "bert-large-lamb": {
        "optimizer.name": "lamb", "optimizer.betas": (0.9, 0.999), "optimizer.weight_decay": 0.01,
        "optimizer.grad_clip": 1.0, "schedule.shape": "polynomial", "schedule.power": 0.5,
        "deepspeed.fp16.initial_scale_power": 20, "checkpoint.every": 200, "checkpoint.keep": 3,
    },
    "bert-large-44min": {
        "optimizer.name": "lamb", "optimizer.min_trust_ratio": 0.01, "optimizer.max_trust_ratio": 0.3, "model.norm": "pre",
        "optimizer.weight_decay": 0.01, "optimizer.bias_correction": False, "optimizer.grad_clip": 1.0,
        "train.micro_batch": 64, "schedule.shape": "exponential", "schedule.decay_rate": 0.9, "schedule.decay_steps": 250,
        "deepspeed.fp16.enabled": True,
    },
    "roberta-base": ROBERTA,
    "roberta-base-2k": {**ROBERTA, "train.micro_batch": 16},
    "roberta-large": {**ROBERTA, "model.layers": 24},
    "albert-base": {
        "optimizer.name": "lamb", "data.mode": "sop", "data.max_predictions": 20, "data.max_seq_length": 512,
        "data.span_masking": True, "tokenizer.kind": "unigram", "tokenizer.vocab_size": 30_000, "model.share_layers": True,
    },
    "distilbert": {
        "optimizer.name": "adamw", "distillation.soft_targets": 5.0, "distillation.masked_tokens": 2.0,
        "distillation.cosine": 1.0, "distillation.start_from_teacher": True, "data.mask_sets": 0,
        "data.max_seq_length": 512, "model.type_vocab": 0, "model.layers": 6, "train.global_batch": 4096,
    },
    "bert-large-24h": {
        **ADAM, "optimizer.betas": (0.9, 0.98), "optimizer.grad_clip": 0.0, "optimizer.lr": 1e-3, "model.norm": "pre",
        "train.global_batch": 4096, "train.micro_batch": 32, "data.max_seq_length": 128, "schedule.budget_hours": 24,
        "schedule.warmup_share": 0.06, "schedule.shape": "linear", "schedule.final_ratio": 0.0, "data.max_predictions": 20,
        "deepspeed.fp16.enabled": True, "model.hidden_dropout": 0.1, "model.sentence_objective": "none",
    },
    "bert-base-mosaic": {
        "optimizer.betas": (0.9, 0.98), "optimizer.eps": 1e-6, "optimizer.weight_decay": 1e-5, "data.mask_prob": 0.30,
        "schedule.final_ratio": 0.02, "model.attention_dropout": 0.0, "train.micro_batch": 128, "data.max_seq_length": 128,
        "deepspeed.bf16.enabled": True,
    },
    "cramming-24h": {
        "optimizer.betas": (0.9, 0.98), "optimizer.eps": 1e-12, "optimizer.weight_decay": 0.01, "optimizer.grad_clip": 0.5,
        "optimizer.lr": 1e-3, "schedule.budget_hours": 24, "schedule.warmup_share": 0.75, "schedule.warmup_from": 0.25,
        "train.global_batch": 8192, "model.layers": 16, "model.hidden": 768, "model.gated": True, "model.biases": False,
        "model.norm": "pre", "model.hidden_dropout": 0.0, "data.mask_prob": 0.25, "data.max_seq_length": 128,
        "tokenizer.vocab_size": 32_768,
    },
    "modernbert-base": {**MODERN, "optimizer.lr": 8e-4, "train.global_batch": 4608, "train.micro_batch": 96},
    "modernbert-large": {**MODERN, "optimizer.lr": 5e-4, "train.global_batch": 4928, "train.micro_batch": 56},
    "ettin-150m": {
        **MODERN, "optimizer.lr": 8e-4, "train.global_batch": 4608, "train.micro_batch": 72, "schedule.final_ratio": 0.02,
    },
}  # fmt: skip
# tokens of each phase in billions, and the length of its examples
TOKENS = {
    "modernbert-base": ([(50 / 3, 1024)] * 3 + [(1719 - 50, 1024), (250, 8192), (50, 8192)], 3),
    "modernbert-large": ([(10 / 3, 1024)] * 3 + [(890, 1024), (819, 1024), (250, 8192), (50, 8192)], 2),
    "ettin-150m": ([(50 / 3, 1024)] * 3 + [(1650, 1024), (250, 7999), (50, 7999)], 3),
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_recipe_can_be_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(path), "--dry-run", "--set", "data.dir=runs/not-built"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "parameters ",
        "global batch ",
        "steps ",
        "not built yet",
        "tokens seen ",
        "activations ",
        "memory ",
        "GiB a rank",
    ):
        assert words in printed


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_published_numbers(name: str) -> None:
    found = [
        (
            phase.config.train.global_batch,
            phase.end - phase.start,
            phase.config.optimizer.lr,
            phase.config.schedule.warmup_steps,
        )
        for phase in phases_of(load_config(ROOT / "configs" / f"{name}.toml"))
    ]
    assert found == PUBLISHED[name]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_recipe_has_the_published_settings(name: str) -> None:
    tree = load_config(ROOT / "configs" / f"{name}.toml").model_dump()
    for key, value in SETTINGS[name].items():
        found = functools.reduce(lambda table, part: table[part], key.split("."), tree)
        assert found == value, key


@pytest.mark.parametrize("name", TOKENS)
def test_a_recipe_counted_in_tokens_has_the_published_ones(name: str) -> None:
    """Steps are rounded to hundreds or whole ones; warm-up in billions of tokens lies in the first phase."""
    config = load_config(ROOT / "configs" / f"{name}.toml")
    published, warmup = TOKENS[name]
    for phase, (billions, length) in zip(phases_of(config), published, strict=True):
        batch, steps = phase.config.train.global_batch, phase.end - phase.start
        assert steps * batch * length / 1e9 == pytest.approx(billions, rel=3e-3)
    assert config.schedule.warmup_steps * config.phases[0].global_batch * 1024 / 1e9 == pytest.approx(warmup, rel=5e-3)


def test_the_crammed_batch_grows_by_equal_shares_of_the_published_day() -> None:
    stairs = phases_of(load_config(ROOT / "configs" / "cramming-24h.toml"))[:-1]
    for stair in stairs:
        seen = (stair.end - stair.start) * stair.config.train.global_batch
        assert seen == pytest.approx(0.15 * 43.17e6, rel=1e-3)


def test_every_recipe_has_its_row_here() -> None:
    assert {path.stem for path in CONFIGS} - {"demo"} == SETTINGS.keys()


def test_every_recipe_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    assert [path.name for path in CONFIGS if path.name not in text] == []
