"""The encoder and the model that is pre-trained.

Legend: `T` tokens of the batch (no padding anywhere), `E` examples, `P` predicted tokens, `D` hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pretrain.attention import AttentionPlan, Backend, plan_attention
from pretrain.first_token import first_token_suffices, last_layer_of_first_tokens
from pretrain.heads import MaskedTokenHead, PretrainingLosses, SentenceHead
from pretrain.layers import Angles, Embeddings, EncoderLayer
from pretrain.model_config import EncoderConfig
from pretrain.rotary import rotary_angles

if TYPE_CHECKING:
    from data_pipeline.records import Batch

__all__ = ["BertForPreTraining", "Encoder"]


class Encoder(nn.Module):
    """Embeddings and layers on flat tokens; attention alone sees where an example ends.

    Raises:
        ValueError: the configuration has no vocabulary size yet (`EncoderConfig.with_vocabulary`).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        if config.vocab_size == 0:
            raise ValueError(
                "model.vocab_size is 0: take it from the tokenizer first, config.with_vocabulary(size, pad_id)"
            )
        self.config = config
        self.backend: Backend | None = None  # tests set it; None chooses
        self.embeddings = Embeddings(config)
        own_layers = 1 if config.share_layers else config.layers
        self.layers = nn.ModuleList(EncoderLayer(config, first=layer == 0) for layer in range(own_layers))
        pre = config.norm == "pre"
        self.final_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.biases) if pre else None
        self.bilstm = (
            nn.LSTM(config.hidden, config.hidden // 2, config.bilstm, bidirectional=True) if config.bilstm else None
        )
        self.pooler = nn.Linear(config.hidden, config.hidden) if config.has_pooler else None

    @overload
    def forward(
        self,
        input_ids_T: torch.Tensor,
        segment_ids_T: torch.Tensor,
        position_ids_T: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        output_hidden_states: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def forward(
        self,
        input_ids_T: torch.Tensor,
        segment_ids_T: torch.Tensor,
        position_ids_T: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        output_hidden_states: Literal[True],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]: ...

    def forward(
        self,
        input_ids_T: torch.Tensor,
        segment_ids_T: torch.Tensor,
        position_ids_T: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        output_hidden_states: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Flat ids to hidden states.

        Args:
            input_ids_T, segment_ids_T, position_ids_T: int64.
            cu_seqlens: (E+1,) int32, `cu_seqlens[i]:cu_seqlens[i+1]` are example i's tokens.
            max_seqlen: tokens of the longest example.
            output_hidden_states: also return the embeddings' output and every layer's, `layers + 1` tensors (T, D).

        Raises:
            ValueError: an example is longer than `max_positions`.
        """
        x_TD, plan, angles = self._begin(input_ids_T, segment_ids_T, position_ids_T, cu_seqlens, max_seqlen)
        states = [x_TD]
        for number in range(self.config.layers):
            x_TD = self._layer(number, x_TD, plan, angles)
            states.append(x_TD)
        x_TD = self._finish(x_TD, cu_seqlens)
        states[-1] = x_TD
        return (x_TD, states) if output_hidden_states else x_TD

    def first_states(
        self,
        input_ids_T: torch.Tensor,
        segment_ids_T: torch.Tensor,
        position_ids_T: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
    ) -> torch.Tensor:
        """(E, D): the state of each example's first token, `forward(...)[cu_seqlens[:-1]]` but for rounding.

        Takes what `forward` takes. The last layer is computed for these tokens alone where its kind allows.

        Raises:
            ValueError: as `forward`.
        """
        if not first_token_suffices(self.config):
            x_TD = self(input_ids_T, segment_ids_T, position_ids_T, cu_seqlens, max_seqlen)
            return x_TD.index_select(0, cu_seqlens[:-1].long())
        x_TD, plan, angles = self._begin(input_ids_T, segment_ids_T, position_ids_T, cu_seqlens, max_seqlen)
        for number in range(self.config.layers - 1):
            x_TD = self._layer(number, x_TD, plan, angles)
        last = self.layers[-1]
        assert isinstance(last, EncoderLayer)
        return last_layer_of_first_tokens(last, x_TD, cu_seqlens, max_seqlen)

    def _begin(
        self,
        input_ids_T: torch.Tensor,
        segment_ids_T: torch.Tensor,
        position_ids_T: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
    ) -> tuple[torch.Tensor, AttentionPlan, tuple[Angles, Angles]]:
        """What goes into the first layer, and what all layers share."""
        config = self.config
        if max_seqlen > config.max_positions:
            raise ValueError(
                f"an example has {max_seqlen} tokens, the encoder has {config.max_positions} positions "
                "(model.max_positions)"
            )
        x_TD = self.embeddings(input_ids_T, segment_ids_T, position_ids_T)
        rate = config.attention_dropout if self.training else 0.0
        plan = plan_attention(cu_seqlens, max_seqlen, len(input_ids_T), x_TD.dtype, rate, self.backend)
        return x_TD, plan, self._angles(position_ids_T, x_TD.dtype)

    def _layer(
        self, number: int, x_TD: torch.Tensor, plan: AttentionPlan, angles: tuple[Angles, Angles]
    ) -> torch.Tensor:
        """Layer `number`, from 0."""
        config = self.config
        layer = self.layers[0 if config.share_layers else number]
        whole = config.is_global(number)
        arguments = (x_TD, plan, angles[1 if whole else 0], 0 if whole else config.local_window)
        if config.activation_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(layer, *arguments, use_reentrant=False)
        return layer(*arguments)

    def pool(self, x_TD: torch.Tensor, cls_positions_E: torch.Tensor) -> torch.Tensor:
        """(E, D): dense + tanh on each example's first token.

        Raises:
            ValueError: this encoder has no pooler (`model.pooler`).
        """
        if self.pooler is None:
            raise ValueError("this encoder has no pooler; take x_TD[cls_positions_E] or set model.pooler")
        return torch.tanh(self.pooler(x_TD.index_select(0, cls_positions_E)))

    def _angles(self, position_ids_T: torch.Tensor, dtype: torch.dtype) -> tuple[Angles, Angles]:
        """Rotary angles of local and of global layers."""
        config = self.config
        if config.positions != "rotary":
            return None, None
        local = rotary_angles(position_ids_T, config.head_size, config.rotary_base, dtype)
        if not config.local_window:
            return local, local
        return local, rotary_angles(position_ids_T, config.head_size, config.rotary_base_global, dtype)

    def _finish(self, x_TD: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        if self.final_norm is not None:
            x_TD = self.final_norm(x_TD)
        if self.bilstm is not None:
            examples = list(x_TD.tensor_split(cu_seqlens[1:-1].long().cpu()))
            packed = nn.utils.rnn.pack_sequence(examples, enforce_sorted=False)
            x_TD = torch.cat(nn.utils.rnn.unpack_sequence(self.bilstm(packed)[0]))
        return x_TD


class BertForPreTraining(nn.Module):
    """Encoder, masked-token head and, where the configuration has one, the sentence objective's head."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.mlm_head = MaskedTokenHead(config)
        self.sentence_head = SentenceHead(config) if config.sentence_objective != "none" else None
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Weights from a truncated normal (two standard deviations, as BERT's own code), biases 0, norms 1."""
        if self.word_embedding.is_meta:
            return
        deviation = self.config.initializer_range
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        self.encoder.embeddings.word.weight[self.config.vocab_size :].zero_()

    @property
    def word_embedding(self) -> torch.Tensor:
        """The table that embeds ids and, tied, scores them."""
        return self.encoder.embeddings.word.weight

    def forward(self, batch: Batch) -> PretrainingLosses:
        """Losses of a flat batch as sums; nothing here waits for the device."""
        return self.losses_and_states(batch)[0]

    def losses_and_states(self, batch: Batch) -> tuple[PretrainingLosses, torch.Tensor]:
        """The losses, and the encoder's x_TD that they come from."""
        x_TD = self.encoder(
            batch.input_ids_T, batch.segment_ids_T, batch.position_ids_T, batch.cu_seqlens, batch.max_seqlen
        )
        # A left-to-right model predicts a token from the state before it. [CLS] comes first and is never predicted, so
        # that state is the same example's. With data.masked_share = data.random_share = 0 this is the plain LTR objective.
        places_P = batch.mask_positions_P - 1 if self.config.causal else batch.mask_positions_P
        x_PD = x_TD.index_select(0, places_P)
        mlm_loss_sum, mlm_correct = self.mlm_head.loss(x_PD, self.word_embedding, batch.mask_labels_P)
        nsp_loss_sum, nsp_correct, nsp_count = mlm_loss_sum.new_zeros(()), torch.zeros_like(mlm_correct), 0
        if self.sentence_head is not None:
            pooled_ED = self.encoder.pool(x_TD, batch.cls_positions_E)
            nsp_loss_sum, nsp_correct = self.sentence_head.loss(pooled_ED, batch.nsp_labels_E)
            nsp_count = batch.examples
        losses = PretrainingLosses(
            mlm_loss_sum=mlm_loss_sum,
            mlm_correct=mlm_correct,
            nsp_loss_sum=nsp_loss_sum,
            nsp_correct=nsp_correct,
            mlm_count=len(batch.mask_labels_P),
            nsp_count=nsp_count,
        )
        return losses, x_TD
