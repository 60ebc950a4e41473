"""The shipped recipes say what the papers say, and each can be planned by `--dry-run`."""

from __future__ import annotations

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
    "bert-large-lamb": [(65_536, 7038, 6e-3, 2000), (32_768, 1563, 4e-3, 200)],
    "roberta-base": [(8192, 500_000, 6e-4, 24_000)],
    "roberta-large": [(8192, 500_000, 4e-4, 30_000)],
    "albert-base": [(4096, 125_000, 1.76e-3, 3125)],
    "bert-base-mosaic": [(4096, 70_000, 5e-4, 4200)],
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_recipe_can_be_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(path), "--dry-run", "--set", "data.dir=runs/not-built"]) == 0
    printed = capsys.readouterr().out
    for words in ("parameters ", "global batch ", "not built yet", "tokens seen ", "GiB a rank"):
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


def test_every_recipe_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    assert [path.name for path in CONFIGS if path.name not in text] == []
