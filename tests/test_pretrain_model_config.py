"""The encoder's configuration: presets, published sizes, refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers

from data_pipeline.config import ConfigError
from pretrain.encoder import BertForPreTraining
from pretrain.hf_config import model_class, to_hf_config
from pretrain.model_config import PRESETS, load_encoder_config, resolve_preset

# Millions of weights with the published vocabularies. BERT (https://arxiv.org/abs/1908.08962 table 1; its own 110M and
# 340M are rounded: large is 335.1 without heads, 336.2 with them) and RoBERTa (125M, 355M) are stated with the
# masked-token head, ALBERT (12M, 18M, 60M; its 235M is 223M in the released weights) and DistilBERT (66M) without. That
# these are not numbers of this project alone is seen in `transformers`, whose models of the same sizes count the same.
PUBLISHED = {
    "bert-tiny": (30522, 4.4),
    "bert-mini": (30522, 11.3),
    "bert-small": (30522, 29.1),
    "bert-medium": (30522, 41.7),
    "bert-base": (30522, 110.1),
    "bert-large": (30522, 336.2),
    "roberta-base": (50265, 124.6),
    "roberta-large": (50265, 355.4),
    "albert-base": (30000, 11.7),
    "albert-large": (30000, 17.7),
    "albert-xlarge": (30000, 58.7),
    "albert-xxlarge": (30000, 222.6),
    "distilbert-base": (30522, 66.4),
}


def test_every_preset_is_valid():
    names = {path.stem for path in PRESETS.glob("*.toml")}
    assert set(PUBLISHED) <= names
    for name in names:
        assert load_encoder_config({"preset": name}).preset == name


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_size(name):
    vocabulary, millions = PUBLISHED[name]
    with torch.device("meta"):
        model = BertForPreTraining(load_encoder_config({"preset": name, "vocab_size": vocabulary, "pad_vocab_to": 1}))
    sizes = {
        tensor_name: tensor.numel()
        for tensor_name, tensor in model.named_parameters()
        if not tensor_name.startswith(("mlm_head", "sentence_head")) or name.startswith(("bert", "roberta"))
    }
    assert sum(sizes.values()) / 1e6 == pytest.approx(millions, abs=0.3)


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_preset_counts_as_many_weights_as_transformers(name):
    vocabulary, _ = PUBLISHED.get(name, (30522, None))
    table = {"preset": name, "vocab_size": vocabulary, "pad_vocab_to": 1, "pad_id": int(name.startswith("roberta"))}
    config = load_encoder_config(table)
    theirs = getattr(transformers, model_class(config))
    with torch.device("meta"):
        models = BertForPreTraining(config), theirs(theirs.config_class(**to_hf_config(config)))
    ours, wanted = (sum(tensor.numel() for tensor in model.parameters()) for model in models)
    assert ours == wanted
    if name == "albert-xxlarge":
        assert sum(tensor.numel() for tensor in models[0].encoder.parameters()) == 222_595_584


def test_keys_of_the_table_win_over_the_preset():
    config = load_encoder_config({"preset": "bert-mini", "layers": 3})
    assert (config.layers, config.hidden) == (3, 256)


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"run.toml: model.preset 'bert-huge'.*bert-mini"):
        resolve_preset({"preset": "bert-huge"}, "run.toml")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"hidden": 100, "heads": 3}, "model.hidden 100 is not a multiple of model.heads 3"),
        ({"hidden_layers": 3}, "unknown key 'hidden_layers'"),
        ({"pooler": False}, "sentence_objective needs model.pooler"),
        ({"causal": True}, "the first token, which the sentence objective reads, sees itself alone"),
        ({"positions": "rotary", "hidden": 15, "heads": 5}, "even head size"),
    ],
)
def test_wrong_settings_are_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        load_encoder_config(table)


def test_vocabulary_comes_from_the_data_and_contradictions_are_refused():
    config = load_encoder_config({"preset": "bert-tiny"}).with_vocabulary(30522, 1)
    assert (config.vocab_size, config.pad_id, config.padded_vocab_size) == (30522, 1, 30528)
    with pytest.raises(ConfigError, match="30522, but the tokenizer of the data has 8000"):
        config.with_vocabulary(8000, 0)
    with pytest.raises(ValueError, match="with_vocabulary"):
        BertForPreTraining(load_encoder_config({"preset": "bert-tiny"}))


@pytest.mark.parametrize(("multiple", "rows"), [(8, 30528), (64, 30528), (128, 30592)])
def test_r42_vocabulary_is_padded_to_a_multiple(multiple, rows):
    config = load_encoder_config({"preset": "bert-tiny", "vocab_size": 30522, "pad_vocab_to": multiple})
    with torch.device("meta"):
        model = BertForPreTraining(config)
    assert config.padded_vocab_size == rows
    assert model.word_embedding.shape[0] == model.mlm_head.bias.shape[0] == rows


def test_reading_a_configuration_imports_no_torch():
    code = "import sys, pretrain.model_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
