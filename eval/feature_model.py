"""Feature-based tagging: a two-layer BiLSTM on the hidden states of a frozen encoder (arXiv 1810.04805, section 5.3).

Legend: `T` tokens of the batch, `E` examples, `L` longest example, `D` hidden size, `S` states used, `K` outputs.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from data_pipeline.records import Batch
from eval.tasks import NER_FEATURES, TaskError
from pretrain.dropout import dropout
from pretrain.encoder import Encoder

BILSTM_SIZE = 768
"""Width of the BiLSTM's output, both directions together, as the paper's "768-dimensional BiLSTM" is read here."""
DROPOUT = 0.1


class FeatureModel(nn.Module):
    """Frozen encoder, mixture of its states, BiLSTM and one linear layer for every token.

    Args:
        encoder: its weights get no gradient.
        outputs: K.
        features: one of `NER_FEATURES`. Weighted sums have learnt softmax weights, equal at the start; "weighted-all"
            is over the layers without the embeddings, as the paper's "all 12 layers".

    Raises:
        TaskError: unknown features, or fewer than four layers for the last four.
    """

    per_token = True

    def __init__(self, encoder: Encoder, outputs: int, features: str) -> None:
        super().__init__()
        config = encoder.config
        if features not in NER_FEATURES:
            raise TaskError(f"unknown features {features!r}; known: {', '.join(NER_FEATURES)}")
        if features.endswith("last-four") and config.layers < 4:
            raise TaskError(f"features {features!r} need four layers, the encoder has {config.layers}")
        self.encoder = encoder.requires_grad_(False)
        self.features = features
        states = {"weighted-last-four": 4, "weighted-all": config.layers}.get(features, 0)
        self.weights = nn.Parameter(torch.zeros(states)) if states else None
        width = config.hidden * (4 if features == "concat-last-four" else 1)
        self.bilstm = nn.LSTM(width, BILSTM_SIZE // 2, num_layers=2, bidirectional=True, dropout=DROPOUT)
        self.classifier = nn.Linear(BILSTM_SIZE, outputs)

    @property
    def outputs(self) -> int:
        """K."""
        return self.classifier.out_features

    def train(self, mode: bool = True) -> FeatureModel:
        """Training mode for everything but the frozen encoder, whose dropout stays off."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, batch: Batch) -> torch.Tensor:
        """(T, K) logits."""
        with torch.no_grad():
            _, states = self.encoder(
                batch.input_ids_T,
                batch.segment_ids_T,
                batch.position_ids_T,
                batch.cu_seqlens,
                batch.max_seqlen,
                output_hidden_states=True,
            )
        x_TD = dropout(self.mix(states), DROPOUT, self.training)
        lengths = batch.cu_seqlens.diff().to("cpu", torch.int64)
        padded_LED = nn.utils.rnn.pad_sequence(list(torch.split(x_TD, lengths.tolist())))
        packed: PackedSequence = pack_padded_sequence(padded_LED, lengths, enforce_sorted=False)
        out_LED, _ = pad_packed_sequence(self.bilstm(packed)[0])
        real_EL = torch.arange(out_LED.shape[0]) < lengths[:, None]
        out_TD = out_LED.transpose(0, 1)[real_EL.to(out_LED.device)]
        return self.classifier(dropout(out_TD, DROPOUT, self.training)).float()

    def mix(self, states: list[torch.Tensor]) -> torch.Tensor:
        """The features of each token, (T, D) or (T, 4D), from the embeddings' output and every layer's."""
        if self.features == "concat-last-four":
            return torch.cat(states[-4:], dim=1)
        if self.weights is not None:
            used = torch.stack(states[-len(self.weights) :])
            return torch.einsum("s,std->td", self.weights.softmax(0), used)
        return states[{"embeddings": 0, "second-to-last": -2, "last": -1}[self.features]]
