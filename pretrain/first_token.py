"""The last layer for each example's first token alone: all that a head on the pooled token reads.

Keys and values need every token, the rest of the layer only the first ones: with BERT's shapes five sixths of the layer's
products are saved, forwards and backwards. A classifier's results stay the same but for rounding.

Legend: `T` tokens of the batch, `E` examples, `L` longest example, `N` heads, `H` head size, `D` = N*H.
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
    weight, bias = layer.qkv.weight, layer.qkv.bias
    q_ED = F.linear(first_ED, weight[: config.hidden], None if bias is None else bias[: config.hidden])
    kv_T2D = F.linear(x_TD, weight[config.hidden :], None if bias is None else bias[config.hidden :])
    attended_ED = first_token_attention(q_ED, kv_T2D, cu_seqlens, max_seqlen, config.heads, rate)
    return layer.finish(layer.attention_output(attended_ED), first_ED)


def first_token_attention(
    q_ED: torch.Tensor, kv_T2D: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, heads: int, rate: float
) -> torch.Tensor:
    """One query an example against the keys of its tokens; `rate` is the dropout on the probabilities.

    Returns:
        (E, D).
    """
    tokens, examples, device = len(kv_T2D), len(q_ED), kv_T2D.device
    cu = cu_seqlens.long()
    example_T = torch.repeat_interleave(torch.arange(examples, device=device), cu.diff(), output_size=tokens)
    place_T = example_T * max_seqlen + torch.arange(tokens, device=device) - cu[example_T]
    k_TNH, v_TNH = kv_T2D.view(tokens, 2, heads, -1).unbind(1)
    q_ENH = q_ED.view(examples, heads, -1) * k_TNH.shape[-1] ** -0.5
    scores_TN = (k_TNH * q_ENH.index_select(0, example_T)).sum(-1)
    rows = scores_TN.new_full((examples * max_seqlen, heads), float("-inf")).index_copy(0, place_T, scores_TN)
    weights_TN = rows.view(examples, max_seqlen, heads).softmax(1).view(-1, heads).index_select(0, place_T)
    weights_TN = dropout(weights_TN, rate, rate > 0.0)
    weighted_TD = (weights_TN[:, :, None] * v_TNH).flatten(1)
    out_ED = weighted_TD.new_zeros(examples, weighted_TD.shape[1]).index_add(0, example_T, weighted_TD)
    return out_ED.to(kv_T2D.dtype)
