"""`[optimizer] name = "lamb"` in the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.config import ConfigError
from pretrain.config import load_config
from pretrain.deepspeed_config import deepspeed_config

DEMO = Path(__file__).resolve().parent.parent / "configs" / "demo.toml"


def test_lamb_is_let_through_deepspeed() -> None:
    config = load_config(DEMO, ["optimizer.name=lamb", "optimizer.max_trust_ratio=0.3"])
    assert config.optimizer.max_trust_ratio == 0.3
    assert deepspeed_config(config, 1)["zero_allow_untested_optimizer"] is True
    assert "zero_allow_untested_optimizer" not in deepspeed_config(load_config(DEMO), 1)


def test_zero_3_is_refused_before_training() -> None:
    config = load_config(DEMO, ["optimizer.name=lamb", "deepspeed.zero_optimization.stage=3"])
    with pytest.raises(ConfigError, match=r"lamb does not run under ZeRO-3; set the stage to 0, 1 or 2"):
        deepspeed_config(config, 1)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.bias_correction=false"],
        ["optimizer.adapt_undecayed=false"],
        ["optimizer.min_trust_ratio=0.0"],
        ["optimizer.max_trust_ratio=10.0"],
        ["optimizer.name=lamb", "optimizer.min_trust_ratio=2.0", "optimizer.max_trust_ratio=1.0"],
    ],
)
def test_keys_of_lamb_that_do_not_fit(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=overrides[-2 if len(overrides) > 2 else -1].split("=")[0]):
        load_config(DEMO, overrides)
