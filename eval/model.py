"""An encoder with a task head on flat tokens. Two heads serve all tasks: one on the pooled first token, one on every token.

Legend: `T` tokens of the batch, `E` examples, `D` hidden size, `K` outputs of the head.
"""

from __future__ import annotations

import torch
from torch import nn

from data_pipeline.records import Batch
from pretrain.dropout import dropout
from pretrain.encoder import Encoder


class TaskModel(nn.Module):
    """Encoder, dropout and one linear layer (arXiv 1810.04805, section 4 and figure 4).

    Args:
        encoder: pre-trained; trained further here.
        outputs: K.
        per_token: one row of outputs for every token (spans, tags), else one for every example.
    """

    def __init__(self, encoder: Encoder, outputs: int, *, per_token: bool) -> None:
        super().__init__()
        config = encoder.config
        self.encoder = encoder
        self.per_token = per_token
        # A checkpoint without a pooler (one pre-trained without sentence objective) gets a new one.
        own_pooler = not per_token and encoder.pooler is None
        self.pooler = nn.Linear(config.hidden, config.hidden) if own_pooler else None
        self.classifier = nn.Linear(config.hidden, outputs)
        for layer in (self.pooler, self.classifier):
            if layer is not None:
                nn.init.normal_(layer.weight, std=config.initializer_range)
                nn.init.zeros_(layer.bias)

    @property
    def outputs(self) -> int:
        """K."""
        return self.classifier.out_features

    def forward(self, batch: Batch) -> torch.Tensor:
        """(E, K) logits, or (T, K) with `per_token`."""
        arguments = (
            batch.input_ids_T,
            batch.segment_ids_T,
            batch.position_ids_T,
            batch.cu_seqlens,
            batch.max_seqlen,
        )
        if self.per_token:
            x = self.encoder(*arguments)
        else:
            pooler = self.encoder.pooler if self.pooler is None else self.pooler
            assert pooler is not None
            if self.encoder.config.causal:  # only the last token has seen the whole example
                x = self.encoder(*arguments).index_select(0, batch.cu_seqlens[1:].long() - 1)
            else:
                x = self.encoder.first_states(*arguments)
            x = torch.tanh(pooler(x))
        return self.classifier(dropout(x, self.encoder.config.hidden_dropout, self.training)).float()
