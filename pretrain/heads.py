"""Pre-training heads: masked tokens and the sentence objective. They gather first and project after."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from pretrain.dropout import dropout
from pretrain.kernels import GeluLinear, choose_kernels
from pretrain.linear_cross_entropy import liger_cross_entropy, linear_cross_entropy
from pretrain.model_config import EncoderConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainingLosses:
    """Sums over a batch, to be divided once by the global counts of the optimizer step.

    Attributes:
        mlm_loss_sum: scalar fp32, sum of the cross entropies of the predicted tokens.
        mlm_correct: scalar int64, predictions that were right.
        nsp_loss_sum: scalar fp32, sum of the cross entropies of the sentence objective; 0 without one.
        nsp_correct: scalar int64.
        mlm_count: predicted tokens.
        nsp_count: examples with a sentence objective; 0 without one.
    """

    mlm_loss_sum: torch.Tensor
    mlm_correct: torch.Tensor
    nsp_loss_sum: torch.Tensor
    nsp_correct: torch.Tensor
    mlm_count: int
    nsp_count: int


class MaskedTokenHead(nn.Module):
    """Dense, GELU, norm, then the word embedding as output table (tied) with a bias of its own."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        width = config.embedding_width
        tanh = config.activation == "gelu_tanh"
        self.transform = GeluLinear(config.hidden, width, bias=config.biases, tanh=tanh)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps, bias=config.biases)
        self.bias = nn.Parameter(torch.zeros(config.padded_vocab_size))

    def hidden(self, x_PD: torch.Tensor) -> torch.Tensor:
        """What the table is multiplied with: (P, embedding width)."""
        return self.norm(self.transform(x_PD, choose_kernels(self.config.kernels, x_PD.device.type)))

    def logits(self, x_PD: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """(P, vocab_size) logits; the padding rows of the table are left out."""
        entries = self.config.vocab_size
        return F.linear(self.hidden(x_PD), table[:entries], self.bias[:entries])

    def loss(
        self, x_PD: torch.Tensor, table: torch.Tensor, labels_P: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of cross entropies and number of right predictions."""
        config = self.config
        hidden_PW = self.hidden(x_PD)
        if choose_kernels(config.kernels, x_PD.device.type).head == "liger" and len(labels_P):
            return liger_cross_entropy(hidden_PW, table, self.bias, labels_P, config.vocab_size)
        return linear_cross_entropy(hidden_PW, table, self.bias, labels_P, config.vocab_size, config.head_chunk)


class SentenceHead(nn.Module):
    """Two classes from the pooled first token: 0 the second part follows, 1 it does not (NSP) or the two are swapped (SOP)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        # ALBERT drops out the pooled output before its classifier; BERT does not.
        self.dropout = config.hidden_dropout if config.sentence_objective == "sop" else 0.0
        self.classifier = nn.Linear(config.hidden, 2)

    def forward(self, pooled_ED: torch.Tensor) -> torch.Tensor:
        """(E, 2) logits."""
        return self.classifier(dropout(pooled_ED, self.dropout, self.training))

    def loss(self, pooled_ED: torch.Tensor, labels_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of cross entropies and number of right answers; label -1 takes no part."""
        logits_E2 = self(pooled_ED).float()
        loss_sum = F.cross_entropy(logits_E2, labels_E, ignore_index=-1, reduction="sum")
        return loss_sum, (logits_E2.argmax(1) == labels_E).sum()
