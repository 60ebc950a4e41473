"""LAMB in one process: its formulas, its options and what it refuses."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from pretrain.lamb import Lamb, square_sums, trust_ratios


def _group(**options: Any) -> dict[str, Any]:
    return {"weight_decay": 0.01, "adapt_undecayed": True, "min_ratio": None, "max_ratio": None, **options}


def test_first_step_by_hand() -> None:
    """w = (3, 4), g = (1, -2): with bias correction r is the sign of g, so u = (1.3, -0.6), |w| = 5, |u|^2 = 2.05."""
    weight = torch.tensor([3.0, 4.0], requires_grad=True)
    weight.grad = torch.tensor([1.0, -2.0])
    Lamb([weight], lr=0.1, weight_decay=0.1, eps=0.0).step()
    ratio = 5 / 2.05**0.5
    torch.testing.assert_close(weight.detach(), torch.tensor([3 - 0.13 * ratio, 4 + 0.06 * ratio]))


def test_first_step_by_hand_without_bias_correction() -> None:
    """r = 0.1 g / sqrt(0.001 g^2) = sign(g) sqrt(10): as large a ratio makes up for it where nothing decays."""
    weight = torch.tensor([3.0, 4.0], requires_grad=True)
    weight.grad = torch.tensor([1.0, -2.0])
    Lamb([weight], lr=0.1, weight_decay=0.1, eps=0.0, bias_correction=False).step()
    update = torch.tensor([10**0.5 + 0.3, -(10**0.5) + 0.4])
    torch.testing.assert_close(weight.detach(), torch.tensor([3.0, 4.0]) - 0.1 * 5 / update.norm() * update)


def test_trust_ratios() -> None:
    """Norms 2/4, 0/1, 1/0, 0/0 and 9/1."""
    squares = torch.tensor([[4.0, 0.0, 1.0, 0.0, 81.0], [16.0, 1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    assert trust_ratios(squares, _group()).tolist() == [0.5, 1, 1, 1, 9]
    assert trust_ratios(squares, _group(min_ratio=0.6, max_ratio=0.9)).tolist() == [0.6, 1, 1, 1, 0.9]
    assert trust_ratios(squares, _group(weight_decay=0.0)).tolist() == [0.5, 1, 1, 1, 9]
    assert trust_ratios(squares, _group(weight_decay=0.0, adapt_undecayed=False)).tolist() == [1, 1, 1, 1, 1]


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 3 * 1024 + 5])
def test_square_sums_at_the_borders_of_blocks(size: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        piece = torch.linspace(-1, 2, size).to(dtype)
        found = square_sums([piece, piece[:0]])
        assert found.dtype == torch.float64
        torch.testing.assert_close(
            found, torch.tensor([float(piece.double().square().sum()), 0.0]).double(), rtol=5e-7, atol=0
        )


def test_norm_of_a_large_tensor_is_exact() -> None:
    """A float32 sum of squares loses 0.4 % over eight million equal elements."""
    size = 2**23
    weight = torch.full((size,), 0.1, requires_grad=True)
    weight.grad = torch.full((size,), 1e-3)
    optimizer = Lamb([weight], lr=1.0, weight_decay=0.0, eps=0.0)
    optimizer.step()
    # |w| / |u| = 0.1 / 1 and u = 1 everywhere: the step leads to zero
    assert weight.detach().abs().max() < 1e-7, weight.max()


def test_state_goes_through_save_and_load() -> None:
    """Keys as in torch's AdamW; a loaded optimizer continues bit for bit."""

    def build() -> tuple[torch.Tensor, Lamb]:
        weight = torch.linspace(-1, 1, 10).requires_grad_()
        return weight, Lamb([weight], lr=0.01)

    def run(weight: torch.Tensor, optimizer: Lamb, steps: range) -> None:
        for step in steps:
            weight.grad = torch.sin(weight.detach() * 3 + step)
            optimizer.step()

    straight, optimizer = build()
    run(straight, optimizer, range(6))
    first, optimizer = build()
    run(first, optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    second, resumed = build()
    resumed.load_state_dict(torch.load(file))
    assert set(resumed.state[second]) == {"step", "exp_avg", "exp_avg_sq"}
    with torch.no_grad():
        second.copy_(first)
    run(second, resumed, range(3, 6))
    assert torch.equal(straight, second)


def test_tensors_without_gradient_stay() -> None:
    """And get no state."""
    used, unused = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    used.grad = torch.ones(2)
    optimizer = Lamb([used, unused], lr=0.1)
    optimizer.step()
    assert not torch.equal(used, torch.ones(2)) and torch.equal(unused, torch.ones(3)) and unused not in optimizer.state


def test_forget_starts_anew() -> None:
    """A step at rate 0 leaves only state behind, and `forget` removes it."""
    weight = torch.ones(4, requires_grad=True)
    optimizer = Lamb([weight], lr=0.0)
    weight.grad = torch.zeros(4)
    optimizer.step()
    assert torch.equal(weight, torch.ones(4)) and optimizer.state[weight]["step"] == 1
    optimizer.forget()
    assert not optimizer.state


@pytest.mark.parametrize(
    "options", [{"betas": (1.0, 0.9)}, {"eps": -1.0}, {"min_ratio": -0.1}, {"min_ratio": 2.0, "max_ratio": 1.0}]
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Lamb([torch.ones(2, requires_grad=True)], lr=0.1, **options)


def test_unknown_flat_tensor_is_refused() -> None:
    """A wrapper that flattens, and says nothing about where the parameters are, would make the ratios wrong."""
    optimizer = Lamb([torch.ones(2, 3, requires_grad=True)], lr=0.1)
    flat = torch.ones(6, requires_grad=True)
    flat.grad = torch.ones(6)
    optimizer.param_groups[0]["params"] = [flat]
    with pytest.raises(RuntimeError, match=r"shape \(6,\)"):
        optimizer.step()
