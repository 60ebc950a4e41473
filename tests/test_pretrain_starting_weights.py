"""`model.init_from`: a run that starts from published weights, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.config import ConfigError, TokenizerConfig
from data_pipeline.tokenizer import import_tokenizer
from pretrain.config import TrainConfig
from pretrain.hf_import import import_from_hf
from pretrain.kernels import choose_kernels
from pretrain.starting_weights import starting_model

TINY = {"layers": 2, "hidden": 128, "heads": 2, "intermediate": 512, "vocab_size": 30522}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    """A data folder with the published uncased vocabulary."""
    folder = tmp_path_factory.mktemp("data")
    path = shared_data / "vocab" / "bert-base-uncased-vocab.txt"
    import_tokenizer(path, TokenizerConfig()).save(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    """The published tiny model beside its vocabulary, as users have it."""
    folder = tmp_path_factory.mktemp("weights")
    source = shared_data / "models" / "splade-tiny-bert-mlm"
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, folder / name)
    shutil.copy(shared_data / "vocab" / "bert-base-uncased-vocab.txt", folder / "vocab.txt")
    return folder


def config_of(data: Path, **model: Any) -> TrainConfig:
    tree = {
        "data": {"dir": str(data)},
        "run": {"dir": "unused"},
        "model": {**TINY, **model},
        "train": {"steps": 1, "global_batch": 1, "micro_batch": 1},
        "optimizer": {"lr": 1e-3},
    }
    return TrainConfig.model_validate(tree)


def test_a_run_starts_from_the_published_weights(data, weights):
    said: list[str] = []
    config = config_of(data, init_from=str(weights), hidden_dropout=0.2, pad_vocab_to=64)
    model = starting_model(config, fresh=True, say=said.append)
    published = import_from_hf(weights).model.state_dict()
    assert len(published) > 25
    for name, tensor in published.items():
        assert torch.equal(model.state_dict()[name][: len(tensor)], tensor), name
    assert not model.word_embedding[30522:].any() and len(model.word_embedding) == 30528
    assert model.config.hidden_dropout == 0.2
    (line,) = said
    assert line.startswith(f"weights from {weights}; random: encoder.pooler.weight")
    assert "sentence_head.classifier.weight" in line


def test_a_resumed_run_reads_no_folder(data):
    starting_model(config_of(data, init_from="/nowhere"), fresh=False, say=pytest.fail)
    torch.manual_seed(1)
    first = starting_model(config_of(data), fresh=True, say=pytest.fail).word_embedding
    torch.manual_seed(1)
    assert torch.equal(first, starting_model(config_of(data), fresh=True, say=pytest.fail).word_embedding)


def test_other_shapes_and_vocabularies_are_refused(data, weights, tmp_path):
    def start(folder: Path, where: Path = data, **model: Any) -> None:
        starting_model(config_of(where, init_from=str(folder), **model), fresh=True, say=pytest.fail)

    with pytest.raises(ConfigError, match=r"key 'model.init_from': .*differs in layers 3 \(folder: 2\)"):
        start(weights, layers=3)
    with pytest.raises(ConfigError, match="expected a Hugging Face folder"):
        start(tmp_path / "none")
    with pytest.raises(ConfigError, match="build it first"):
        start(weights, tmp_path)
    tokens = (weights / "vocab.txt").read_text(encoding="utf-8").splitlines()
    tokens[1996], tokens[1997] = tokens[1997], tokens[1996]
    other = shutil.copytree(weights, tmp_path / "other")
    (other / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"id 1996 is 'the', there 'of'\); build the data with tokenizer.path"):
        start(other)


def test_kernels_that_do_not_run_here_are_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    choose_kernels.cache_clear()
    with pytest.raises(ConfigError, match=r"model.kernels=triton.* choose auto"):
        starting_model(config_of(tmp_path, kernels="triton"), fresh=True, say=print)
