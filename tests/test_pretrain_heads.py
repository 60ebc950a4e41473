"""Heads: the sliced vocabulary product against the plain one, padding rows, counts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pretrain.heads import SentenceHead
from pretrain.linear_cross_entropy import linear_cross_entropy
from pretrain.model_config import load_encoder_config


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sliced_cross_entropy_equals_the_plain_one(chunk, dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(13, 6, generator=generator).to(dtype)
    table, bias = torch.randn(24, 6, generator=generator).to(dtype), torch.randn(24, generator=generator).to(dtype)
    labels = torch.randint(0, 21, (13,), generator=generator)
    labels[:4] = F.linear(hidden.float(), table.float(), bias.float())[:4, :21].argmax(1)
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, table, bias)]
    loss, correct = linear_cross_entropy(*leaves, labels, 21, chunk)
    (loss * 0.37).backward()
    plain = [tensor.float().requires_grad_() for tensor in (hidden, table, bias)]
    logits = F.linear(plain[0], plain[1], plain[2])[:, :21]
    expected = F.cross_entropy(logits, labels, reduction="sum")
    (expected * 0.37).backward()
    tolerance = 2e-6 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(loss, expected, atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(leaves, plain, strict=True):
        torch.testing.assert_close(ours.grad.float(), theirs.grad, atol=tolerance, rtol=tolerance)
    if dtype == torch.float32:
        assert correct.item() == (logits.argmax(1) == labels).sum().item() > 0
    assert not leaves[1].grad[21:].any()


def test_rare_labels_have_an_exact_loss():
    """A probability below what fp32 can hold still has its cross entropy."""
    hidden, table = torch.tensor([[200.0]]), torch.tensor([[1.0], [-1.0]])
    loss, correct = linear_cross_entropy(hidden, table, torch.zeros(2), torch.tensor([1]), 2, 8)
    assert loss.item() == pytest.approx(400.0)
    assert correct.item() == 0


def test_no_predictions_give_zero_and_zero_gradients():
    hidden, table, bias = (torch.zeros(*shape, requires_grad=True) for shape in ((0, 4), (8, 4), (8,)))
    loss, correct = linear_cross_entropy(hidden, table, bias, torch.zeros(0, dtype=torch.int64), 8, 4)
    loss.backward()
    assert (loss.item(), correct.item()) == (0.0, 0)
    assert not table.grad.any()


def test_sentence_head_ignores_examples_without_an_objective():
    head = SentenceHead(load_encoder_config({"preset": "bert-tiny"}))
    pooled, labels = torch.randn(4, 128), torch.tensor([0, 1, -1, 1])
    loss, correct = head.loss(pooled, labels)
    kept = labels >= 0
    assert loss.item() == pytest.approx(F.cross_entropy(head(pooled)[kept], labels[kept], reduction="sum").item())
    assert correct.item() == (head(pooled).argmax(1) == labels)[kept].sum().item()
