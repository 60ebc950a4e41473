"""Vocabulary product and a loss of its logits in one step, a slice of the predictions at a time.

The logits of BERT-base at 4,096 tokens with every position predicted would be 500 MB, and autograd would hold two of
them. Here a slice of logits is turned into its own gradient in place and multiplied into the gradients of weight and
input at once, so no more than one slice lives; the backward pass only scales. A sum of losses is linear in the incoming
gradient, which makes that exact.

Legend: `P` predictions, `V` rows of the table, `W` width of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SliceLoss = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]
"""From the fp32 logits of some predictions, and which these are, to the sum of their losses and the number of right ones;
the logits become their own gradient."""


class _SlicedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PW: torch.Tensor,
        weight_VW: torch.Tensor,
        bias_V: torch.Tensor,
        loss_of: SliceLoss,
        vocab_size: int,
        chunk: int,
        wanted: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bias = weight_VW[:vocab_size], bias_V[:vocab_size]
        loss_sum = hidden_PW.new_zeros((), dtype=torch.float32)
        correct = torch.zeros((), dtype=torch.int64, device=hidden_PW.device)
        grad_hidden = torch.empty_like(hidden_PW) if wanted else None
        # Sums over many predictions stay in fp32 also where the weights are half precision.
        grad_weight = torch.zeros_like(weight_VW, dtype=torch.float32) if wanted else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if wanted else None
        slices = max(1, -(-len(hidden_PW) // chunk))
        rows = max(1, -(-len(hidden_PW) // slices))
        for start in range(0, len(hidden_PW), rows):
            part = slice(start, start + rows)
            hidden = hidden_PW[part]
            logits = torch.addmm(bias, hidden, weight.t()).float()
            loss, hits = loss_of(logits, part)
            loss_sum += loss
            correct += hits
            if grad_hidden is not None and grad_weight is not None and grad_bias is not None:
                gradient = logits.to(hidden.dtype)
                torch.mm(gradient, weight, out=grad_hidden[part])
                if grad_weight.dtype == hidden.dtype:
                    grad_weight[:vocab_size].addmm_(gradient.t(), hidden)
                else:
                    grad_weight[:vocab_size] += gradient.t() @ hidden
                grad_bias[:vocab_size] += logits.sum(0)
        if wanted:
            ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
            ctx.dtypes = weight_VW.dtype, bias_V.dtype
        ctx.mark_non_differentiable(correct)
        return loss_sum, correct

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale, (grad_hidden, grad_weight, grad_bias) = gradients[0], ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        # In place: a second table in memory would be the largest tensor of the step. A second backward pass over the
        # same graph is refused by autograd, which sees that saved tensors have changed.
        return (
            grad_hidden.mul_(scale.to(grad_hidden.dtype)),
            grad_weight.mul_(scale).to(weight_dtype),
            grad_bias.mul_(scale).to(bias_dtype),
            None,
            None,
            None,
            None,
        )


def sliced_loss(
    hidden_PW: torch.Tensor,
    weight_VW: torch.Tensor,
    bias_V: torch.Tensor,
    loss_of: SliceLoss,
    vocab_size: int,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of a loss over `hidden @ weight.T + bias` without the logits matrix, and how many predictions are right.

    Args:
        hidden_PW: what the table is multiplied with.
        weight_VW: the embedding table, padding rows included.
        bias_V: one for each row.
        loss_of: the loss of a slice of logits and its gradient.
        vocab_size: rows that are real; those after it take no part.
        chunk: predictions of one slice.

    Returns:
        loss sum (fp32 scalar, differentiable) and correct count (int64 scalar).
    """
    wanted = torch.is_grad_enabled() and (hidden_PW.requires_grad or weight_VW.requires_grad)
    return _SlicedLoss.apply(hidden_PW, weight_VW, bias_V, loss_of, vocab_size, chunk, wanted)


def _softmax_in_place(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn (P, V) fp32 logits into probabilities; return the sum of cross entropies and the number predicted right."""
    target = logits.gather(1, labels[:, None]).squeeze(1)
    highest = logits.amax(1)
    # Equality with the highest is argmax without a second, slow pass; ties are left to the first as argmax does
    # only where rounding makes them likely.
    hits = (target == highest).sum() if logits.device.type == "cpu" else (logits.argmax(1) == labels).sum()
    torch.softmax(logits, 1, out=logits)
    # The highest probability is exp(0) / sum, at least 1 / V: its logarithm is exact where that of a rare label is not.
    log_sum = highest - logits.amax(1).log()
    return (log_sum - target).sum(), hits


def linear_cross_entropy(
    hidden_PW: torch.Tensor,
    weight_VW: torch.Tensor,
    bias_V: torch.Tensor,
    labels_P: torch.Tensor,
    vocab_size: int,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of cross entropies of `hidden @ weight.T + bias` against the labels, and how many predictions are right.

    Arguments and results as `sliced_loss`; `labels_P` are the true ids, int64, below `vocab_size`.
    """

    def cross_entropy(logits: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        labels = labels_P[part]
        loss, hits = _softmax_in_place(logits, labels)
        logits[torch.arange(len(labels), device=labels.device), labels] -= 1.0
        return loss, hits

    return sliced_loss(hidden_PW, weight_VW, bias_V, cross_entropy, vocab_size, chunk)


def liger_cross_entropy(
    hidden_PW: torch.Tensor, weight_VW: torch.Tensor, bias_V: torch.Tensor, labels_P: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by liger-kernel (>= 0.8), whose Triton kernel turns logits into gradients in place; P must not be 0.

    Arguments and results as `linear_cross_entropy`.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    found = liger_fused_linear_cross_entropy(
        hidden_PW,
        weight_VW[:vocab_size],
        labels_P,
        bias=bias_V[:vocab_size],
        reduction="sum",
        accum_dtype=torch.float32,
        return_predicted_tokens=True,
    )
    return found.loss, (found.predicted_tokens == labels_P).sum()
