"""The encoder's configuration as Hugging Face's config.json, both ways: a table of keys and what cannot be said there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrain.model_config import EncoderConfig


class InterchangeError(ValueError):
    """A model or folder that cannot cross between the project and Hugging Face; the message says why."""


_BERT_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "activation": "hidden_act",
    "norm_eps": "layer_norm_eps",
    "max_positions": "max_position_embeddings",
    "type_vocab": "type_vocab_size",
    "initializer_range": "initializer_range",
    "vocab_size": "vocab_size",
    "pad_id": "pad_token_id",
}

KEYS: dict[str, dict[str, str]] = {
    "bert": {**_BERT_KEYS, "causal": "is_decoder"},
    "roberta": {**_BERT_KEYS, "causal": "is_decoder"},
    "albert": {**_BERT_KEYS, "embedding_size": "embedding_size"},
    "distilbert": {
        "layers": "n_layers",
        "hidden": "dim",
        "heads": "n_heads",
        "intermediate": "hidden_dim",
        "hidden_dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "activation": "activation",
        "max_positions": "max_position_embeddings",
        "initializer_range": "initializer_range",
        "vocab_size": "vocab_size",
        "pad_id": "pad_token_id",
    },
    "modernbert": {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "intermediate": "intermediate_size",
        "attention_dropout": "attention_dropout",
        "activation": "hidden_activation",
        "norm_eps": "norm_eps",
        "max_positions": "max_position_embeddings",
        "initializer_range": "initializer_range",
        "vocab_size": "vocab_size",
        "pad_id": "pad_token_id",
        "local_window": "local_attention",
        "global_every": "global_attn_every_n_layers",
    },
}

# What each architecture is in our fields; a configuration that differs has no counterpart there.
_POST = {"norm": "post", "gated": False, "biases": True, "positions": "learned", "local_window": 0, "bilstm": 0}
SHAPES: dict[str, dict[str, Any]] = {
    "bert": {**_POST, "share_layers": False, "embedding_size": 0, "position_offset": 0},
    "roberta": {**_POST, "share_layers": False, "embedding_size": 0, "sentence_objective": "none"},
    "albert": {**_POST, "share_layers": True, "position_offset": 0, "causal": False},
    "distilbert": {
        **_POST,
        "share_layers": False,
        "embedding_size": 0,
        "position_offset": 0,
        "causal": False,
        "type_vocab": 0,
        "norm_eps": 1e-12,
        "sentence_objective": "none",
    },
    "modernbert": {
        "norm": "pre",
        "gated": True,
        "biases": False,
        "positions": "rotary",
        "bilstm": 0,
        "share_layers": False,
        "embedding_size": 0,
        "causal": False,
        "type_vocab": 0,
        "sentence_objective": "none",
    },
}

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_LEFT_TO_RIGHT = {"bert": "BertLMHeadModel", "roberta": "RobertaForCausalLM"}


def model_class(config: EncoderConfig) -> str:
    """The class of `transformers` that holds these weights, heads included.

    A left-to-right model predicts a token from the state before it, as the language-model classes do.
    """
    if config.causal:
        return _LEFT_TO_RIGHT[config.architecture]
    if config.architecture in ("bert", "albert") and config.sentence_objective != "none":
        return {"bert": "BertForPreTraining", "albert": "AlbertForPreTraining"}[config.architecture]
    return {
        "bert": "BertForMaskedLM",
        "roberta": "RobertaForMaskedLM",
        "albert": "AlbertForMaskedLM",
        "distilbert": "DistilBertForMaskedLM",
        "modernbert": "ModernBertForMaskedLM",
    }[config.architecture]


def to_hf_config(config: EncoderConfig, special_ids: Mapping[str, int] | None = None) -> dict[str, Any]:
    """config.json's content.

    Args:
        config: with the vocabulary filled in.
        special_ids: `pad_id, cls_id, sep_id` of the tokenizer, as the data pipeline names them.

    Raises:
        InterchangeError: the architecture cannot say what the configuration says; every such key is named.
    """
    architecture = config.architecture
    shape = SHAPES[architecture]
    wrong = [f"{key} = {getattr(config, key)!r}" for key, value in shape.items() if getattr(config, key) != value]
    if architecture == "roberta" and config.position_offset != config.pad_id + 1:
        wrong.append(f"position_offset = {config.position_offset} (it must be the padding id + 1)")
    if architecture == "albert" and not config.embedding_size:
        wrong.append("embedding_size = 0")
    if architecture == "modernbert" and config.local_window % 2:
        wrong.append(f"local_window = {config.local_window} (it must be even)")
    if wrong:
        raise InterchangeError(f"{architecture} models of Hugging Face cannot have {', '.join(wrong)}")
    result: dict[str, Any] = {theirs: getattr(config, ours) for ours, theirs in KEYS[architecture].items()}
    activation = "hidden_activation" if architecture == "modernbert" else KEYS[architecture]["activation"]
    result[activation] = {"gelu": "gelu", "gelu_tanh": "gelu_new"}[config.activation]
    ids = special_ids or {}
    result |= {f"{name}_token_id": ids[f"{name}_id"] for name in ("cls", "sep") if f"{name}_id" in ids}
    # Architectures whose defaults name ids of another vocabulary.
    result |= {"bos_token_id": ids.get("cls_id"), "eos_token_id": ids.get("sep_id")}
    if architecture == "roberta":
        result["max_position_embeddings"] = config.max_positions + config.position_offset
    if architecture == "albert":
        result |= {"num_hidden_groups": 1, "inner_group_num": 1}
    if architecture == "distilbert":
        result["sinusoidal_pos_embds"] = False
    if architecture == "modernbert":
        result |= _modernbert_extra(config)
    return {
        "architectures": [model_class(config)],
        "model_type": architecture,
        "tie_word_embeddings": True,
        **result,
    }


def _modernbert_extra(config: EncoderConfig) -> dict[str, Any]:
    kinds = ["full_attention" if config.is_global(layer) else "sliding_attention" for layer in range(config.layers)]
    wide = config.rotary_base_global if config.local_window else config.rotary_base
    return {
        "layer_types": kinds,
        "local_attention": config.local_window or config.max_positions,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": wide},
            "sliding_attention": {"rope_type": "default", "rope_theta": config.rotary_base},
        },
        "embedding_dropout": config.hidden_dropout,
        "mlp_dropout": config.hidden_dropout,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "classifier_bias": False,
        "decoder_bias": True,
    }


def from_hf_config(content: Mapping[str, Any], source: str) -> EncoderConfig:
    """The encoder that a config.json describes; whether it has a pooler and a sentence head is seen in the weights.

    Raises:
        InterchangeError: another kind of model, or a setting that the encoder does not have.
    """
    architecture = content.get("model_type")
    if architecture not in KEYS:
        raise InterchangeError(f"{source}: model_type {architecture!r}; known: {', '.join(sorted(KEYS))}")
    if content.get("position_embedding_type", "absolute") != "absolute":
        raise InterchangeError(
            f"{source}: position_embedding_type {content['position_embedding_type']!r}, not absolute"
        )
    values: dict[str, Any] = {**SHAPES[architecture], "architecture": architecture, "pad_vocab_to": 1}
    for ours, theirs in KEYS[architecture].items():
        if content.get(theirs) is not None:
            values[ours] = content[theirs]
    activation = values.get("activation", "gelu_new" if architecture == "albert" else "gelu")
    if activation not in _ACTIVATIONS:
        raise InterchangeError(f"{source}: activation {activation!r}; known: {', '.join(sorted(_ACTIVATIONS))}")
    values["activation"] = _ACTIVATIONS[activation]
    values["sentence_objective"] = "none"
    if architecture == "roberta":
        values.setdefault("pad_id", 1)
        values["position_offset"] = values["pad_id"] + 1
        values["max_positions"] = values.get("max_positions", 512) - values["position_offset"]
    if architecture == "albert":
        if content.get("num_hidden_groups", 1) != 1 or content.get("inner_group_num", 1) != 1:
            raise InterchangeError(f"{source}: only one group of one shared layer is supported")
        values.setdefault("embedding_size", 128)
    if architecture == "modernbert":
        values |= _from_modernbert(content, source)
    return EncoderConfig.model_validate(values)


def _from_modernbert(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    for key in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"):
        if content.get(key):
            raise InterchangeError(f"{source}: {key} is set; the encoder of this architecture has no such biases")
    every = int(content.get("global_attn_every_n_layers", 3))
    kinds = content.get("layer_types")
    if kinds:
        wide = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
        every = wide[1] - wide[0] if len(wide) > 1 else len(kinds)
        if [number for number in range(len(kinds)) if number % every == 0] != wide:
            raise InterchangeError(f"{source}: layer_types is not every n-th layer global from the first on")
    rope = content.get("rope_parameters", {})
    wide_base = rope.get("full_attention", {}).get("rope_theta", content.get("global_rope_theta", 160000.0))
    base = rope.get("sliding_attention", {}).get("rope_theta", content.get("local_rope_theta", 10000.0))
    return {
        "global_every": every,
        "local_window": content.get("local_attention", 128),
        "rotary_base": base,
        "rotary_base_global": wide_base,
        "hidden_dropout": content.get("mlp_dropout", 0.0),
        "norm_eps": content.get("norm_eps", 1e-5),
        "max_positions": content.get("max_position_embeddings", 8192),
    }
