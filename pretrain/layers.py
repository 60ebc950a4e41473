"""One transformer layer and the embeddings, on flat tokens `x_TD`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pretrain.attention import AttentionPlan, attention
from pretrain.dropout import dropout, dropout_add
from pretrain.kernels import SublayerNorm, choose_kernels
from pretrain.model_config import EncoderConfig
from pretrain.rotary import rotate

Angles = tuple[torch.Tensor, torch.Tensor] | None


def activate(x: torch.Tensor, config: EncoderConfig) -> torch.Tensor:
    """GELU in the variant that the configuration names."""
    return F.gelu(x, approximate="tanh" if config.activation == "gelu_tanh" else "none")


class Embeddings(nn.Module):
    """Sum of word, position and segment embedding, then norm and dropout; projected where the table is factorised."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        width = config.embedding_width
        self.word = nn.Embedding(config.padded_vocab_size, width)
        learned = config.positions == "learned"
        self.position = nn.Embedding(config.max_positions + config.position_offset, width) if learned else None
        self.segment = nn.Embedding(config.type_vocab, width) if config.type_vocab else None
        self.norm = nn.LayerNorm(width, eps=config.norm_eps, bias=config.biases)
        self.projection = nn.Linear(width, config.hidden) if config.embedding_size else None

    def forward(
        self, input_ids_T: torch.Tensor, segment_ids_T: torch.Tensor, position_ids_T: torch.Tensor
    ) -> torch.Tensor:
        """(T,) ids to x_TD."""
        x = self.word(input_ids_T)
        if self.segment is not None:
            # With one row every token belongs to segment 0, whatever the batch says.
            x = x + (self.segment(segment_ids_T) if self.config.type_vocab > 1 else self.segment.weight[0])
        if self.position is not None:
            x = x + self.position(position_ids_T + self.config.position_offset)
        x = dropout(self.norm(x), self.config.hidden_dropout, self.training)
        return x if self.projection is None else self.projection(x)


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each with a residual sum and a layer norm after (BERT) or before it.

    With pre-norm the first layer has no norm before its attention: the embeddings end with one.
    """

    def __init__(self, config: EncoderConfig, first: bool) -> None:
        super().__init__()
        self.config = config
        width, inner = config.hidden, config.intermediate
        self.qkv = nn.Linear(width, 3 * width, bias=config.biases)
        self.attention_output = nn.Linear(width, width, bias=config.biases)
        plain = config.norm == "pre" and first
        norm = nn.LayerNorm if config.norm == "pre" else SublayerNorm
        self.attention_norm = None if plain else norm(width, eps=config.norm_eps, bias=config.biases)
        self.up = nn.Linear(width, inner * (2 if config.gated else 1), bias=config.biases)
        self.down = nn.Linear(inner, width, bias=config.biases)
        self.feed_forward_norm = norm(width, eps=config.norm_eps, bias=config.biases)

    def forward(self, x_TD: torch.Tensor, plan: AttentionPlan, angles: Angles, window: int) -> torch.Tensor:
        """x_TD to x_TD. `angles` turn queries and keys; `window` limits what a token sees (0: nothing)."""
        config, training, rate = self.config, self.training, self.config.hidden_dropout
        if config.norm == "pre":
            normed = x_TD if self.attention_norm is None else self.attention_norm(x_TD)
            x_TD = dropout_add(self._attend(normed, plan, angles, window), x_TD, rate, training)
            return dropout_add(self._feed_forward(self.feed_forward_norm(x_TD)), x_TD, rate, training)
        assert self.attention_norm is not None
        kernels = choose_kernels(config.kernels, x_TD.device.type)
        rate = rate if training else 0.0
        x_TD = self.attention_norm(self._attend(x_TD, plan, angles, window), x_TD, rate, kernels)
        return self.feed_forward_norm(self._feed_forward(x_TD), x_TD, rate, kernels)

    def _attend(self, x_TD: torch.Tensor, plan: AttentionPlan, angles: Angles, window: int) -> torch.Tensor:
        config = self.config
        qkv = self.qkv(x_TD)
        if angles is not None:
            qkv = rotate(qkv, angles, config.heads)
        rate = config.attention_dropout if self.training else 0.0
        return self.attention_output(attention(qkv, plan, config.heads, rate, config.causal, window))

    def _feed_forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        inner = self.up(x_TD)
        if self.config.gated:
            value, gate = inner.chunk(2, dim=-1)
            return self.down(activate(value, self.config) * gate)
        return self.down(activate(inner, self.config))
