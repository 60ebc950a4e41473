"""One transformer layer and the embeddings, on flat tokens `x_TD`."""

from __future__ import annotations

import torch
from torch import nn

from pretrain.attention import AttentionPlan, attention
from pretrain.dropout import dropout, dropout_add
from pretrain.kernels import BetweenNorm, GeluLinear, SublayerNorm, choose_kernels
from pretrain.model_config import EncoderConfig
from pretrain.rotary import rotate

Angles = tuple[torch.Tensor, torch.Tensor] | None


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
        self.attention_norm: nn.LayerNorm | None = None
        self.feed_forward_norm: nn.LayerNorm
        eps, bias = config.norm_eps, config.biases
        if config.norm == "post":
            self.attention_norm = SublayerNorm(width, eps=eps, bias=bias)
        elif not first:
            self.attention_norm = nn.LayerNorm(width, eps=eps, bias=bias)
        tanh = config.activation == "gelu_tanh"
        self.up = GeluLinear(width, inner, bias=config.biases, tanh=tanh, gated=config.gated)
        self.down = nn.Linear(inner, width, bias=config.biases)
        self.feed_forward_norm = (SublayerNorm if config.norm == "post" else BetweenNorm)(width, eps=eps, bias=bias)

    def forward(self, x_TD: torch.Tensor, plan: AttentionPlan, angles: Angles, window: int) -> torch.Tensor:
        """x_TD to x_TD. `angles` turn queries and keys; `window` limits what a token sees (0: nothing)."""
        config = self.config
        if config.norm == "pre":
            kernels = choose_kernels(config.kernels, x_TD.device.type)
            rate = config.hidden_dropout if self.training else 0.0
            normed_TD = x_TD if self.attention_norm is None else self.attention_norm(x_TD)
            x_TD, normed_TD = self.feed_forward_norm(self._attend(normed_TD, plan, angles, window), x_TD, rate, kernels)
            return dropout_add(self.down(self.up(normed_TD, kernels)), x_TD, rate, self.training)
        return self.finish(self._attend(x_TD, plan, angles, window), x_TD)

    def finish(self, attended_TD: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
        """All that comes after attention, with post-norm: no token sees another here."""
        assert self.attention_norm is not None
        kernels = choose_kernels(self.config.kernels, x_TD.device.type)
        rate = self.config.hidden_dropout if self.training else 0.0
        x_TD = self.attention_norm(attended_TD, x_TD, rate, kernels)
        return self.feed_forward_norm(self.down(self.up(x_TD, kernels)), x_TD, rate, kernels)

    def _attend(self, x_TD: torch.Tensor, plan: AttentionPlan, angles: Angles, window: int) -> torch.Tensor:
        config = self.config
        qkv = self.qkv(x_TD)
        if angles is not None:
            qkv = rotate(qkv, angles, config.heads)
        rate = config.attention_dropout if self.training else 0.0
        return self.attention_output(attention(qkv, plan, config.heads, rate, config.causal, window))
