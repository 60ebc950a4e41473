"""Attention on packed examples: backends agree, examples do not see each other, dropout is really there."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest
import torch

from pretrain.attention import (
    AttentionPlan,
    _DroppedAttention,
    _has_flash_attention,
    _one_group,
    attention,
    choose_backend,
    describe_attention,
    plan_attention,
)
from pretrain.dropout import dropout, dropout_add, keep_mask, kept_share

HEADS, WIDTH = 2, 8
LENGTHS = [[33, 33, 32, 32, 31, 31], [5, 5, 5], [7, 3, 64, 60, 61, 3], [1, 9]]
KINDS = [(False, 0), (True, 0), (False, 4), (True, 6)]


def ends(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def run(lengths, backend, causal, window, dtype=torch.float64, device="cpu", width=WIDTH):
    """Output and gradient; backend "one group" is how CUDA re-pads."""
    cu_seqlens, tokens = ends(lengths).to(device), sum(lengths)
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(tokens, 3 * width, generator=generator).to(device, dtype).requires_grad_()
    if backend == "one group":
        plan = AttentionPlan("padded", cu_seqlens, max(lengths))
        _one_group(plan, tokens)
    else:
        plan = plan_attention(cu_seqlens, max(lengths), tokens, dtype, 0.0, backend)
    out = attention(qkv, plan, HEADS, 0.0, causal, window)
    weights = torch.randn(out.shape, generator=generator).to(device, dtype)
    (out * weights).sum().backward()
    return out.detach(), qkv.grad


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("causal", "window"), KINDS)
@pytest.mark.parametrize("rows", ["padded", "one group"])
def test_repadded_rows_agree_with_the_reference(lengths, causal, window, rows):
    expected, expected_gradient = run(lengths, "reference", causal, window)
    found, gradient = run(lengths, rows, causal, window)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-12, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("causal", "window"), KINDS)
@pytest.mark.parametrize("backend", ["padded", "varlen", "flash_attn"])
def test_cuda_backends_agree_with_the_reference(lengths, causal, window, backend):
    if backend == "flash_attn" and find_spec("flash_attn") is None:
        pytest.skip("flash_attn is not installed")
    expected, expected_gradient = run(lengths, "reference", causal, window, torch.float32, "cuda", 64 * HEADS)
    found, gradient = run(lengths, backend, causal, window, torch.bfloat16, "cuda", 64 * HEADS)
    torch.testing.assert_close(found.float(), expected, atol=3e-2, rtol=0)
    torch.testing.assert_close(gradient.float(), expected_gradient, atol=1e-1, rtol=0)


def test_rows_are_grouped_so_that_little_is_padded():
    lengths = [128] * 20 + [5, 40, 77, 126, 121, 6, 39]
    plan = plan_attention(ends(lengths), 128, sum(lengths), torch.float32, 0.0)
    rows = sum(group.count * group.length for group in plan.groups)
    assert len(plan.groups) > 1
    assert sum(lengths) < rows < 1.03 * sum(lengths)


def test_equal_lengths_are_not_copied():
    plan = plan_attention(ends([6, 6]), 6, 12, torch.float32, 0.0)
    assert plan.pad_R is None
    assert plan.groups[0].key_mask_BL is None
    # Falling lengths in large groups neither; in small groups rows are padded and fewer.
    large, small = [40] * 5 + [39] * 4 + [20] * 9, [9, 8, 7, 6]
    plan = plan_attention(ends(large), 40, sum(large), torch.float32, 0.0)
    assert plan.pad_R is None and [(g.start, g.count, g.length) for g in plan.groups] == [
        (0, 5, 40),
        (200, 4, 39),
        (356, 9, 20),
    ]
    assert plan_attention(ends(small), 9, sum(small), torch.float32, 0.0).pad_R is not None


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("causal", "window"), KINDS)
def test_attention_with_dropout_has_the_gradient_of_its_mask(lengths, causal, window):
    """The hand-written backward pass against finite differences: the same seed draws the same mask."""
    tokens = sum(lengths)
    plan = plan_attention(ends(lengths), max(lengths), tokens, torch.float64, 0.3)
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(tokens, 3 * WIDTH, generator=generator, dtype=torch.float64).requires_grad_()

    def value(x):
        torch.manual_seed(3)
        return (attention(x, plan, HEADS, 0.3, causal, window) ** 2).sum()

    value(qkv).backward()
    direction = torch.randn(qkv.shape, generator=generator, dtype=torch.float64)
    step = 1e-6
    with torch.no_grad():
        slope = (value(qkv + step * direction) - value(qkv - step * direction)) / (2 * step)
    assert slope.item() == pytest.approx((qkv.grad * direction).sum().item(), rel=1e-6)


def test_attention_dropout_keeps_the_mean_and_is_not_left_out():
    lengths = [12, 12]
    qkv = torch.randn(24, 3 * WIDTH, generator=torch.Generator().manual_seed(4))
    plain = attention(qkv, plan_attention(ends(lengths), 12, 24, qkv.dtype, 0.0), HEADS)
    plan = plan_attention(ends(lengths), 12, 24, qkv.dtype, 0.2)
    torch.manual_seed(5)
    draws = torch.stack([attention(qkv, plan, HEADS, 0.2) for _ in range(2000)])
    assert not torch.equal(draws[0], draws[1])
    assert (draws.mean(0) - plain).abs().max() < 6 * draws.std(0).max() / math.sqrt(2000)


def test_half_precision_masks_do_not_overflow():
    lengths = [9, 4, 8]
    qkv = (torch.randn(21, 3 * WIDTH, generator=torch.Generator().manual_seed(6)) * 30).half()
    for rate in (0.0, 0.1):
        plan = plan_attention(ends(lengths), 9, 21, qkv.dtype, rate)
        assert attention(qkv, plan, HEADS, rate, True, 2).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.0, 0.2])
@pytest.mark.parametrize(("causal", "window"), KINDS)
def test_no_row_is_fully_masked_and_none_gives_nan(causal, window, rate, dtype):
    """Padding queries see real keys; scores near the type's limits stay finite, forward and backward."""
    lengths = [40, 36, 1, 9, 2]
    qkv = torch.randn(sum(lengths), 3 * WIDTH, generator=torch.Generator().manual_seed(6)).to(dtype)
    qkv = (qkv * 100).requires_grad_()
    plan = plan_attention(ends(lengths), max(lengths), sum(lengths), dtype, rate)
    out = attention(qkv, plan, HEADS, rate, causal, window)
    out.sum().backward()
    masks = [mask for mask in plan.masks.values() if mask is not None]
    assert any(not mask.all() for mask in masks)  # there is padding
    assert all(mask.any(-1).all() for mask in masks)
    assert out.isfinite().all() and qkv.grad.isfinite().all()


def test_a_row_without_any_key_gives_no_nan():
    """It never occurs; if it did, the dropped attention would give the mean of all values."""
    qkv = torch.randn(1, 4, 3, HEADS, 4, requires_grad=True)
    mask = torch.ones(1, 4, 4, dtype=torch.bool)
    mask[0, 2] = False
    out = _DroppedAttention.apply(qkv, mask, 0.1)
    out.sum().backward()
    assert out.isfinite().all() and qkv.grad.isfinite().all()


def test_backend_table_never_drops_dropout():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert choose_backend(cpu, torch.float32, 0.1) == "padded"
    assert choose_backend(cuda, torch.float32, 0.0) == "padded"
    assert choose_backend(cuda, torch.bfloat16, 0.1) in ("flash_attn", "padded")
    assert choose_backend(cuda, torch.bfloat16, 0.0) in ("flash_attn", "varlen")
    assert "padded" in describe_attention(cpu, torch.float32, 0.1)
    with pytest.raises(ValueError, match="no dropout"):
        plan_attention(ends([3]), 3, 3, torch.bfloat16, 0.1, "varlen")


def test_gpus_without_flash_attention_use_rows(monkeypatch):
    """Both varlen kernels need compute capability 8.0: a V100 (7.0) trains in fp16 without them."""
    monkeypatch.setattr("pretrain.attention._has_flash_attention", _has_flash_attention.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((7, 0), {"padded"}), ((8, 0), {"flash_attn", "varlen"})):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert choose_backend(torch.device("cuda"), torch.float16, 0.0) in expected


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_keeps_the_stated_share_and_the_mean(rate):
    torch.manual_seed(7)
    keep = keep_mask((1000, 401), rate)
    assert keep.float().mean().item() == pytest.approx(1 - rate, abs=0.003)
    assert kept_share(rate) == pytest.approx(1 - rate, abs=1e-5)
    x = torch.ones(1000, 401, requires_grad=True)
    torch.manual_seed(7)
    out = dropout(x, rate, True)
    assert torch.equal(out != 0, keep)
    torch.testing.assert_close(out[keep], torch.full_like(out[keep], 1 / kept_share(rate)))
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())
    assert dropout(x, rate, False) is x


def test_dropout_with_residual_equals_the_sum():
    x, residual = (torch.randn(30, 7, requires_grad=True) for _ in range(2))
    torch.manual_seed(8)
    expected = residual + dropout(x, 0.3, True)
    torch.manual_seed(8)
    found = dropout_add(x, residual, 0.3, True)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(30, 7)
    torch.testing.assert_close(
        torch.autograd.grad(found, (x, residual), weights), torch.autograd.grad(expected, (x, residual), weights)
    )
