"""The table of tensor names: ours and those of Hugging Face, read both ways.

A row pairs a module of ours with one or, for the fused query-key-value projection, three of theirs, stacked along
dimension 0. `{}` stands for the layer number. Tensors below a module keep their last name (`weight`, `bias`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pretrain.model_config import EncoderConfig

Row = tuple[str, tuple[str, ...]]

_VOCABULARY_ROWS = ("encoder.embeddings.word.weight", "mlm_head.bias")


@dataclass(frozen=True)
class Names:
    """One architecture.

    Attributes:
        prefix: of the encoder in a model with heads; a bare encoder's files lack it.
        encoder: rows below the prefix.
        heads: rows of the pre-training heads.
        tied: their names for tensors that repeat another; never written, ignored when read.
    """

    prefix: str
    encoder: tuple[Row, ...]
    heads: tuple[Row, ...]
    tied: tuple[str, ...]


def _bert_layers(attention: str, output: str) -> tuple[Row, ...]:
    return (
        (
            "encoder.layers.{}.qkv",
            tuple(f"encoder.layer.{{}}.attention.self.{part}" for part in ("query", "key", "value")),
        ),
        ("encoder.layers.{}.attention_output", (f"{attention}.dense",)),
        ("encoder.layers.{}.attention_norm", (f"{attention}.LayerNorm",)),
        ("encoder.layers.{}.up", ("encoder.layer.{}.intermediate.dense",)),
        ("encoder.layers.{}.down", (f"{output}.dense",)),
        ("encoder.layers.{}.feed_forward_norm", (f"{output}.LayerNorm",)),
    )


_BERT_EMBEDDINGS: tuple[Row, ...] = (
    ("encoder.embeddings.word", ("embeddings.word_embeddings",)),
    ("encoder.embeddings.position", ("embeddings.position_embeddings",)),
    ("encoder.embeddings.segment", ("embeddings.token_type_embeddings",)),
    ("encoder.embeddings.norm", ("embeddings.LayerNorm",)),
)
_BERT_ENCODER: tuple[Row, ...] = (
    *_BERT_EMBEDDINGS,
    *_bert_layers("encoder.layer.{}.attention.output", "encoder.layer.{}.output"),
    ("encoder.pooler", ("pooler.dense",)),
)
_ALBERT_LAYER = "encoder.albert_layer_groups.0.albert_layers.0"

NAMES: dict[str, Names] = {
    "bert": Names(
        prefix="bert",
        encoder=_BERT_ENCODER,
        heads=(
            ("mlm_head.transform", ("cls.predictions.transform.dense",)),
            ("mlm_head.norm", ("cls.predictions.transform.LayerNorm",)),
            ("mlm_head", ("cls.predictions",)),
            ("sentence_head.classifier", ("cls.seq_relationship",)),
        ),
        tied=("cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
    ),
    "roberta": Names(
        prefix="roberta",
        encoder=_BERT_ENCODER,
        heads=(
            ("mlm_head.transform", ("lm_head.dense",)),
            ("mlm_head.norm", ("lm_head.layer_norm",)),
            ("mlm_head", ("lm_head",)),
        ),
        tied=("lm_head.decoder.weight", "lm_head.decoder.bias"),
    ),
    "albert": Names(
        prefix="albert",
        encoder=(
            *_BERT_EMBEDDINGS,
            ("encoder.embeddings.projection", ("encoder.embedding_hidden_mapping_in",)),
            (
                "encoder.layers.{}.qkv",
                tuple(f"{_ALBERT_LAYER}.attention.{part}" for part in ("query", "key", "value")),
            ),
            ("encoder.layers.{}.attention_output", (f"{_ALBERT_LAYER}.attention.dense",)),
            ("encoder.layers.{}.attention_norm", (f"{_ALBERT_LAYER}.attention.LayerNorm",)),
            ("encoder.layers.{}.up", (f"{_ALBERT_LAYER}.ffn",)),
            ("encoder.layers.{}.down", (f"{_ALBERT_LAYER}.ffn_output",)),
            ("encoder.layers.{}.feed_forward_norm", (f"{_ALBERT_LAYER}.full_layer_layer_norm",)),
            ("encoder.pooler", ("pooler",)),
        ),
        heads=(
            ("mlm_head.transform", ("predictions.dense",)),
            ("mlm_head.norm", ("predictions.LayerNorm",)),
            ("mlm_head", ("predictions",)),
            ("sentence_head.classifier", ("sop_classifier.classifier",)),
        ),
        tied=("predictions.decoder.weight", "predictions.decoder.bias"),
    ),
    "distilbert": Names(
        prefix="distilbert",
        encoder=(
            *_BERT_EMBEDDINGS,
            (
                "encoder.layers.{}.qkv",
                tuple(f"transformer.layer.{{}}.attention.{part}_lin" for part in ("q", "k", "v")),
            ),
            ("encoder.layers.{}.attention_output", ("transformer.layer.{}.attention.out_lin",)),
            ("encoder.layers.{}.attention_norm", ("transformer.layer.{}.sa_layer_norm",)),
            ("encoder.layers.{}.up", ("transformer.layer.{}.ffn.lin1",)),
            ("encoder.layers.{}.down", ("transformer.layer.{}.ffn.lin2",)),
            ("encoder.layers.{}.feed_forward_norm", ("transformer.layer.{}.output_layer_norm",)),
        ),
        heads=(
            ("mlm_head.transform", ("vocab_transform",)),
            ("mlm_head.norm", ("vocab_layer_norm",)),
            ("mlm_head", ("vocab_projector",)),
        ),
        tied=("vocab_projector.weight",),
    ),
    "modernbert": Names(
        prefix="model",
        encoder=(
            ("encoder.embeddings.word", ("embeddings.tok_embeddings",)),
            ("encoder.embeddings.norm", ("embeddings.norm",)),
            ("encoder.layers.{}.qkv", ("layers.{}.attn.Wqkv",)),
            ("encoder.layers.{}.attention_output", ("layers.{}.attn.Wo",)),
            ("encoder.layers.{}.attention_norm", ("layers.{}.attn_norm",)),
            ("encoder.layers.{}.up", ("layers.{}.mlp.Wi",)),
            ("encoder.layers.{}.down", ("layers.{}.mlp.Wo",)),
            ("encoder.layers.{}.feed_forward_norm", ("layers.{}.mlp_norm",)),
            ("encoder.final_norm", ("final_norm",)),
        ),
        heads=(
            ("mlm_head.transform", ("head.dense",)),
            ("mlm_head.norm", ("head.norm",)),
            ("mlm_head", ("decoder",)),
        ),
        tied=("decoder.weight",),
    ),
}


def tensor_names(names: Sequence[str], architecture: str) -> dict[str, tuple[str, ...]]:
    """Hugging Face's names for each of our tensor names.

    Raises:
        KeyError: the architecture has no place for a tensor (a BiLSTM, say); the tensor is named.
    """
    table = NAMES[architecture]
    rows = dict(table.encoder) | dict(table.heads)
    inside = {ours for ours, _ in table.encoder}
    found = {}
    for name in names:
        module, _, leaf = name.rpartition(".")
        parts = module.split(".")
        number = next((part for part in parts if part.isdigit()), "")
        row = ".".join("{}" if part.isdigit() else part for part in parts)
        if row not in rows:
            raise KeyError(f"{architecture} models of Hugging Face have no place for {name}")
        prefix = f"{table.prefix}." if row in inside else ""
        found[name] = tuple(f"{prefix}{theirs.format(number)}.{leaf}" for theirs in rows[row])
    return found


def to_hf_tensors(state: Mapping[str, torch.Tensor], config: EncoderConfig) -> dict[str, torch.Tensor]:
    """Our state dict under Hugging Face's names, padding rows of the vocabulary cut off; tied tensors appear once.

    Raises:
        KeyError: as `tensor_names`.
    """
    result = {}
    for ours, theirs in tensor_names(list(state), config.architecture).items():
        tensor = state[ours][: config.vocab_size] if ours in _VOCABULARY_ROWS else state[ours]
        for name, part in zip(theirs, tensor.chunk(len(theirs)), strict=True):
            result[name] = part.contiguous()
    return result


def from_hf_tensors(
    tensors: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor], config: EncoderConfig
) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """The reverse.

    Args:
        tensors: as read from the folder, names already current (`current_names`).
        ours: our model's state dict, for names and shapes.
        config: says the architecture and the vocabulary size.

    Returns:
        state: our names, padding rows added as zeros; only what the folder has.
        missing: our names that it lacks.
        unused: its names that we have no place for.

    Raises:
        ValueError: a tensor has another shape than the configuration says; both are named.
    """
    state, missing, used = {}, [], set(NAMES[config.architecture].tied)
    for name, theirs in tensor_names(list(ours), config.architecture).items():
        if not all(part in tensors for part in theirs):
            missing.append(name)
            continue
        used.update(theirs)
        tensor = torch.cat([tensors[part] for part in theirs]) if len(theirs) > 1 else tensors[theirs[0]]
        if name in _VOCABULARY_ROWS:
            padding = ours[name].shape[0] - config.vocab_size
            tensor = torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])]) if padding else tensor
        if tensor.shape != ours[name].shape:
            expected, found = tuple(ours[name].shape), tuple(tensor.shape)
            raise ValueError(f"{' + '.join(theirs)}: config.json asks for {expected}, the weights have {found}")
        state[name] = tensor
    return state, missing, sorted(set(tensors) - used)


def current_names(tensors: Mapping[str, torch.Tensor], architecture: str) -> dict[str, torch.Tensor]:
    """Old spellings made current: gamma/beta of layer norms, a bare encoder without prefix, a head bias on the decoder."""
    table = NAMES[architecture]
    heads = tuple(theirs.split(".")[0] for _, parts in table.heads for theirs in parts)
    bare = not any(name.startswith(f"{table.prefix}.") for name in tensors)
    renamed = {}
    for name, tensor in tensors.items():
        if name.endswith((".gamma", ".beta")):
            name = name.removesuffix("gamma").removesuffix("beta") + ("weight" if name.endswith("gamma") else "bias")
        if bare and name.split(".")[0] not in heads:
            name = f"{table.prefix}.{name}"
        renamed[name] = tensor
    (bias,) = (theirs[0] for ours, theirs in table.heads if ours == "mlm_head")
    for tied in table.tied:
        if tied.endswith("decoder.bias") and tied in renamed:
            renamed.setdefault(f"{bias}.bias", renamed[tied])
    return renamed
