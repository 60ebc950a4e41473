"""What the encoder is, as data: the `[model]` table. No torch here: `cluster` plans and configuration checks stay light.

One model serves the whole family. BERT is the default; RoBERTa, ALBERT, DistilBERT, a causal encoder, a BiLSTM on top and
a modern encoder (rotary positions, gated feed-forward, no biases, local attention) are other values of the same fields.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from data_pipeline.config import ConfigError, StrictModel, validate

PRESETS = Path(__file__).resolve().parent.parent / "configs" / "models"


class EncoderConfig(StrictModel):
    """`[model]`: the encoder and its pre-training heads. Defaults are BERT-base (https://arxiv.org/abs/1810.04805)."""

    preset: str = ""
    """Name of a file in configs/models/; its keys are the base, the keys of the table win."""
    architecture: Literal["bert", "roberta", "albert", "distilbert", "modernbert"] = "bert"
    """The Hugging Face architecture that the weights are exported as."""
    vocab_size: int = Field(default=0, ge=0)
    """Entries of the vocabulary; 0: taken from the tokenizer of the data."""
    pad_vocab_to: int = Field(default=8, ge=1)
    """Rows of the embedding are rounded up to a multiple of this; the added rows are never predicted nor read."""
    layers: int = Field(default=12, ge=1)
    hidden: int = Field(default=768, ge=1)
    heads: int = Field(default=12, ge=1)
    intermediate: int = Field(default=3072, ge=1)
    embedding_size: int = Field(default=0, ge=0)
    """Width of the word embedding where it is factorised (ALBERT); 0: the hidden size."""
    share_layers: bool = False
    """One set of layer weights, applied `layers` times (ALBERT)."""
    max_positions: int = Field(default=512, ge=1)
    """Longest example in tokens."""
    positions: Literal["learned", "rotary"] = "learned"
    position_offset: int = Field(default=0, ge=0)
    """Row of the position table that the first token uses (RoBERTa: padding id + 1)."""
    rotary_base: float = Field(default=10000.0, gt=0)
    rotary_base_global: float = Field(default=160000.0, gt=0)
    """Base of the layers with global attention where `local_window` is set."""
    type_vocab: int = Field(default=2, ge=0)
    """Rows of the segment table; 0: none (DistilBERT); 1: every token uses row 0 (RoBERTa)."""
    hidden_dropout: float = Field(default=0.1, ge=0, lt=1)
    attention_dropout: float = Field(default=0.1, ge=0, lt=1)
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    """Exact GELU, or its tanh approximation; they differ by up to 4.7e-4 in the logits."""
    gated: bool = False
    """Feed-forward with a gate (GeGLU, https://arxiv.org/abs/2002.05202)."""
    norm_eps: float = Field(default=1e-12, gt=0)
    norm: Literal["post", "pre"] = "post"
    """Where the layer norm stands: after the residual sum (BERT), or before each sublayer with one at the end."""
    biases: bool = True
    """Bias vectors in the linear layers and layer norms of the encoder."""
    causal: bool = False
    """Left-to-right attention, each token predicted from the state before it (the paper's LTR ablation)."""
    local_window: int = Field(default=0, ge=0)
    """Tokens on both sides together that a local layer sees; 0: every layer is global."""
    global_every: int = Field(default=1, ge=1)
    """With `local_window`: every n-th layer, from the first on, is global."""
    bilstm: int = Field(default=0, ge=0)
    """Layers of a bidirectional LSTM on top of the encoder (the paper's LTR + BiLSTM ablation)."""
    pooler: bool | None = None
    """Dense + tanh on the first token; None: where there is a sentence objective."""
    sentence_objective: Literal["none", "nsp", "sop"] = "nsp"
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the truncated normal that weights start from."""
    pad_id: int = Field(default=0, ge=0)
    """Id of [PAD]; the flat model never reads it, the export names it. Taken from the tokenizer of the data."""
    init_from: str = ""
    """A Hugging Face folder to start from instead of random weights."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping what it holds."""
    kernels: Literal["auto", "plain", "compile", "triton"] = "auto"
    """Fused kernels, see pretrain/kernels.py."""
    head_chunk: int = Field(default=256, ge=1)
    """Predictions whose logits are held at once; the full logits matrix never exists."""

    @model_validator(mode="after")
    def _consistent(self) -> EncoderConfig:
        if self.hidden % self.heads:
            raise ValueError(f"model.hidden {self.hidden} is not a multiple of model.heads {self.heads}")
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(f"model.positions rotary needs an even head size, got {self.head_size}")
        if self.sentence_objective != "none" and self.pooler is False:
            raise ValueError("model.sentence_objective needs model.pooler")
        if self.sentence_objective != "none" and self.type_vocab == 1:
            raise ValueError("model.type_vocab 1 cannot tell the two parts of a pair apart; use 2, or 0 for none")
        if self.causal and self.sentence_objective != "none":
            raise ValueError(
                "model.causal: the first token, which the sentence objective reads, sees itself alone; set "
                "model.sentence_objective to none"
            )
        if self.bilstm and self.hidden % 2:
            raise ValueError(f"model.bilstm needs an even model.hidden, got {self.hidden}")
        return self

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def embedding_width(self) -> int:
        """Width of the word embedding table."""
        return self.embedding_size or self.hidden

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embedding: `vocab_size` rounded up to a multiple of `pad_vocab_to`."""
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to

    @property
    def has_pooler(self) -> bool:
        """Whether the encoder carries a pooler."""
        return self.sentence_objective != "none" if self.pooler is None else self.pooler

    def is_global(self, layer: int) -> bool:
        """Whether layer number `layer` (from 0) attends over the whole example."""
        return self.local_window == 0 or layer % self.global_every == 0

    def with_vocabulary(self, vocab_size: int, pad_id: int) -> EncoderConfig:
        """The same encoder for the vocabulary of the data.

        Raises:
            ConfigError: `vocab_size` is set in the table and differs.
        """
        if self.vocab_size not in (0, vocab_size):
            raise ConfigError(
                f"model.vocab_size is {self.vocab_size}, but the tokenizer of the data has {vocab_size} entries; "
                "leave the key out to take it from the data"
            )
        return self.model_copy(update={"vocab_size": vocab_size, "pad_id": pad_id})


def resolve_preset(table: Mapping[str, Any], source: str | Path = "model") -> dict[str, Any]:
    """The `[model]` table over the keys of its preset; a table without `preset` comes back as it is.

    Raises:
        ConfigError: no preset of that name (the known ones are listed), or its file is not TOML.
    """
    name = table.get("preset", "")
    if not name:
        return dict(table)
    path = PRESETS / f"{name}.toml"
    if not isinstance(name, str) or not path.is_file():
        known = ", ".join(sorted(file.stem for file in PRESETS.glob("*.toml")))
        raise ConfigError(f"{source}: model.preset {name!r} is not in configs/models; known presets: {known}")
    try:
        base = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from error
    return {**base, **table}


def load_encoder_config(table: Mapping[str, Any], source: str | Path = "model") -> EncoderConfig:
    """Resolve the preset of a `[model]` table and validate it.

    Raises:
        ConfigError: as `resolve_preset`, or an unknown key or a value out of range.
    """
    return validate(EncoderConfig, resolve_preset(table, source), source)
