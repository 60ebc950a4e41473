"""Every configuration that is shipped can be used as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.config import OTHER_TABLES, ConfigError, PipelineConfig, load_pipeline_config, read_tree
from pretrain.config import TrainConfig, load_config

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def test_there_are_configurations() -> None:
    assert ROOT / "configs" / "demo.toml" in CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_loads(path: Path) -> None:
    pipeline = load_pipeline_config(path)
    train = load_config(path)
    assert isinstance(pipeline, PipelineConfig)
    assert isinstance(train, TrainConfig)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_misspelt_table_in_it_is_refused_by_both_commands(path: Path, tmp_path: Path) -> None:
    changed = tmp_path / path.name
    changed.write_text(path.read_text() + "\n[optimiser]\nlr = 1.0\n")
    for load in (load_pipeline_config, load_config):
        with pytest.raises(ConfigError, match=r"unknown key 'optimiser'.*'optimizer'"):
            load(changed)


def test_every_table_belongs_to_a_part() -> None:
    tables = {name for path in CONFIGS for name in read_tree(path)}
    assert tables <= {*PipelineConfig.model_fields, *OTHER_TABLES}
