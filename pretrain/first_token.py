"""The last layer for each example's first token alone: all that a head on the pooled token reads.

Everything after attention is computed for the first tokens only, and keys and values are never made: a query q meets
key W x as (W^T q) x, and the mean of values W x under the probabilities is W times the mean of x. Of BERT's twelve
products of D^2 a token none is left, forwards and backwards. A classifier's results stay the same but for rounding.

Legend: `T` tokens of the batch, `E` examples, `L` longest example, `N` heads, `H` head size, `D` = N*H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pretrain.dropout import dropout

if TYPE_CHECKING:
    from pretrain.layers import EncoderLayer
    from pretrain.model_config import EncoderConfig


def first_token_suffices(config: EncoderConfig) -> bool:
    """Whether the last layer can be cut down: post-norm, learned positions, attention over the whole example, nothing after
    the layers that mixes tokens."""
    return (
        config.norm == "post"
        and config.positions == "learned"
        and not config.causal
        and not config.local_window
        and not config.bilstm
    )


def last_layer_of_first_tokens(
    layer: EncoderLayer, x_TD: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
) -> torch.Tensor:
    """`layer(x_TD)` at `cu_seqlens[:-1]`.

    Args:
        layer: the last one, see `first_token_suffices`.
        x_TD: what goes into it.
        cu_seqlens: (E+1,) int32.
        max_seqlen: tokens of the longest example.

    Returns:
        (E, D).
    """
    config = layer.config
    rate = config.attention_dropout if layer.training else 0.0
    first_ED = x_TD.index_select(0, cu_seqlens[:-1].long())
    weights_3DD = layer.qkv.weight.unflatten(0, (3, config.hidden))
    biases_3D = None if layer.qkv.bias is None else layer.qkv.bias.unflatten(0, (3, config.hidden))
    q_ED = F.linear(first_ED, weights_3DD[0], None if biases_3D is None else biases_3D[0])
    mixed_ENL, mean_END = first_token_attention(q_ED, x_TD, weights_3DD[1], cu_seqlens, max_seqlen, config.heads, rate)
    value_NDH = weights_3DD[2].unflatten(0, (config.heads, -1)).transpose(1, 2)
    attended_ENH = torch.bmm(mean_END.transpose(0, 1), value_NDH).transpose(0, 1)
    if biases_3D is not None:  # the probabilities sum to one only without dropout
        attended_ENH = attended_ENH + mixed_ENL.sum(-1, keepdim=True) * biases_3D[2].unflatten(0, (config.heads, -1))
    return layer.finish(layer.attention_output(attended_ENH.flatten(1).to(x_TD.dtype)), first_ED)


def first_token_attention(
    q_ED: torch.Tensor,
    x_TD: torch.Tensor,
    key_DD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    heads: int,
    rate: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query an example against all its tokens.

    Args:
        q_ED: queries.
        x_TD: what keys and values are made of.
        key_DD: weight of the keys. Their bias adds the same to all scores of a query and is left out.
        cu_seqlens, max_seqlen: where examples begin, and the longest.
        heads: N.
        rate: dropout on the probabilities.

    Returns:
        (E, N, L) probabilities after dropout and (E, N, D) the sums of `x_TD` that they weigh.
    """
    tokens, examples, device = len(x_TD), len(q_ED), x_TD.device
    cu = cu_seqlens.long()
    lengths_E = cu.diff()
    example_T = torch.repeat_interleave(torch.arange(examples, device=device), lengths_E, output_size=tokens)
    place_T = example_T * max_seqlen + torch.arange(tokens, device=device) - cu[example_T]
    x_ELD = (
        x_TD.new_zeros(examples * max_seqlen, x_TD.shape[1]).index_copy(0, place_T, x_TD).view(examples, max_seqlen, -1)
    )
    key_NHD = key_DD.unflatten(0, (heads, -1))
    q_NEH = q_ED.unflatten(1, (heads, -1)).transpose(0, 1) * key_NHD.shape[1] ** -0.5
    asked_END = torch.bmm(q_NEH, key_NHD).transpose(0, 1)
    scores_ENL = torch.bmm(asked_END, x_ELD.transpose(1, 2))
    absent_EL = torch.arange(max_seqlen, device=device) >= lengths_E[:, None]
    weights_ENL = scores_ENL.masked_fill(absent_EL[:, None], float("-inf")).softmax(-1)
    weights_ENL = dropout(weights_ENL, rate, rate > 0.0)
    return weights_ENL, torch.bmm(weights_ENL.to(x_ELD.dtype), x_ELD)
