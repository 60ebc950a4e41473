"""R23: what decays and what does not."""

from __future__ import annotations

import pytest
import torch

from pretrain.encoder import BertForPreTraining
from pretrain.model_config import load_encoder_config
from pretrain.parameter_groups import parameter_groups


def counts(model):
    decaying, fixed = parameter_groups(model, 0.01)
    assert (decaying["weight_decay"], fixed["weight_decay"]) == (0.01, 0.0)
    tensors = [*decaying["params"], *fixed["params"]]
    assert len({id(tensor) for tensor in tensors}) == len(tensors)
    assert {id(tensor) for tensor in tensors} == {id(tensor) for tensor in model.parameters()}
    return len(tensors), len(decaying["params"]), set(fixed["names"])


@pytest.mark.parametrize(("layers", "tensors", "decaying"), [(12, 158, 54), (1, 26, 10)])
def test_r23_every_tensor_is_in_one_group(layers, tensors, decaying):
    table = {"layers": layers, "hidden": 8, "heads": 2, "intermediate": 16, "vocab_size": 50}
    with torch.device("meta"):
        model = BertForPreTraining(load_encoder_config(table))
    found, decayed, fixed = counts(model)
    assert (found, decayed) == (tensors, decaying)
    assert all(name.endswith("bias") or "norm" in name for name in fixed)


@pytest.mark.parametrize(
    "table",
    [
        {"architecture": "albert", "embedding_size": 4, "share_layers": True, "sentence_objective": "sop"},
        {"norm": "pre", "gated": True, "positions": "rotary", "bilstm": 1},
        {"norm": "pre", "biases": False, "type_vocab": 0, "sentence_objective": "none"},
    ],
)
def test_r23_no_bias_and_no_norm_decays_in_other_members_of_the_family(table):
    sizes = {"layers": 2, "hidden": 8, "heads": 2, "intermediate": 16, "vocab_size": 50}
    model = BertForPreTraining(load_encoder_config({**sizes, **table}))
    _, _, fixed = counts(model)
    assert {name for name, _ in model.named_parameters() if "bias" in name or "norm" in name} == fixed


def test_r23_the_rule_does_not_read_names():
    table = {"layers": 1, "hidden": 8, "heads": 2, "intermediate": 16, "vocab_size": 50}
    model = BertForPreTraining(load_encoder_config(table))
    before = counts(model)
    layer = model.encoder.layers[0]
    layer.layer_norm, layer.lens = layer.attention_norm, layer.up
    layer.equaliser = layer.feed_forward_norm
    layer.attention_norm, layer.up, layer.feed_forward_norm = None, None, None
    after = counts(model)
    assert before[:2] == after[:2] == (26, 10)
    assert {
        "encoder.layers.0.layer_norm.weight",
        "encoder.layers.0.lens.bias",
        "encoder.layers.0.equaliser.weight",
    } <= after[2]


def test_frozen_tensors_are_in_no_group_and_two_dimensional_norms_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm((2, 3)))
    model[0].weight.requires_grad_(False)
    (fixed,) = parameter_groups(model, 0.01)
    assert fixed["names"] == ["0.bias", "1.weight", "1.bias"]
    assert fixed["weight_decay"] == 0.0
