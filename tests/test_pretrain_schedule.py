"""The learning rate against hand-computed values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.config import ScheduleConfig, TrainConfig
from pretrain.phases import phases_of
from pretrain.schedule import learning_rate, rate_in_time


def rates(total: int, **schedule: object) -> list[float]:
    config = ScheduleConfig.model_validate(schedule)
    return [learning_rate(n, peak=1.0, total_steps=total, schedule=config) for n in range(1, total + 1)]


def test_r24_linear_rate_equals_the_documented_formula() -> None:
    found = rates(10, shape="linear", warmup_steps=4)
    assert found == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7], abs=1e-15)
    assert found[0] < 1 and found.count(1.0) == 1 and found.index(1.0) == 3
    assert 0.0 not in found


def test_polynomial_cosine_and_constant_shapes() -> None:
    assert rates(10, shape="polynomial", power=2, warmup_steps=4)[4] == pytest.approx((6 / 7) ** 2)
    assert rates(9, shape="cosine", warmup_steps=5)[6] == pytest.approx((1 + math.cos(math.pi * 2 / 5)) / 2)
    assert rates(6, shape="constant", warmup_steps=2) == [0.5, 1, 1, 1, 1, 1]
    assert rates(10, shape="linear", warmup_steps=4, final_ratio=0.5)[9] == pytest.approx(0.5 + 0.5 / 7)


def test_exponential_shape() -> None:
    smooth = rates(8, shape="exponential", decay_rate=0.5, decay_steps=2, warmup_steps=2)
    assert smooth == pytest.approx([0.5, 1, 2**-0.5, 2**-1, 2**-1.5, 2**-2, 2**-2.5, 2**-3], abs=1e-15)
    stepped = rates(8, shape="exponential", decay_rate=0.5, decay_steps=2, staircase=True, warmup_steps=2)
    assert stepped == [0.5, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_warmup_stable_decay_shape() -> None:
    found = rates(9, shape="warmup_stable_decay", warmup_steps=2, decay_steps=3)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4], abs=1e-15)
    square = rates(9, shape="warmup_stable_decay", warmup_steps=2, decay_steps=3, power=2)
    assert square[6:] == pytest.approx([9 / 16, 4 / 16, 1 / 16], abs=1e-15)


def test_decay_from_the_start_is_hidden_by_the_warm_up() -> None:
    found = rates(9, shape="polynomial", power=0.5, warmup_steps=4, decay_from="start")
    assert found[:4] == [0.25, 0.5, 0.75, 1]
    assert found[4:] == pytest.approx([(1 - n / 10) ** 0.5 for n in range(5, 10)], abs=1e-15)


def test_polynomial_warm_up() -> None:
    found = rates(6, shape="constant", warmup_steps=4, warmup_shape="polynomial", warmup_power=2)
    assert found == [1 / 16, 4 / 16, 9 / 16, 1, 1, 1]


def test_warm_up_from_a_share_of_the_peak() -> None:
    found = rates(10, shape="linear", warmup_steps=4, warmup_from=0.2)
    assert found[:5] == pytest.approx([0.4, 0.6, 0.8, 1, 6 / 7], abs=1e-15)


def rates_in_time(shares: list[float], **schedule: object) -> list[float]:
    """At these shares of a budget of two hours."""
    config = ScheduleConfig.model_validate({"budget_hours": 2, **schedule})
    return [rate_in_time(7200 * share, peak=2.0, schedule=config) for share in shares]


def test_the_rate_in_time_equals_the_documented_formula() -> None:
    quarters = [0, 0.25, 0.5, 0.75, 1, 1.5]
    assert rates_in_time(quarters, warmup_share=0.5) == pytest.approx([0, 1, 2, 1, 0, 0], abs=1e-15)
    assert rates_in_time(quarters) == pytest.approx([2, 1.5, 1, 0.5, 0, 0], abs=1e-15)
    assert rates_in_time([0.06, 0.53, 1], warmup_share=0.06) == pytest.approx([2, 1, 0], abs=1e-15)  # 24hBERT
    # cramming's budget-triangle2: from a quarter of the peak up to 75 % of the time, then down
    triangle = rates_in_time([0, 0.375, 0.75, 0.875, 1], warmup_share=0.75, warmup_from=0.25)
    assert triangle == pytest.approx([0.5, 1.25, 2, 1, 0], abs=1e-15)
    hidden = rates_in_time([0.1, 0.25, 0.5], warmup_share=0.2, decay_from="start", final_ratio=0.5)
    assert hidden == pytest.approx([1, 1 + 0.75, 1 + 0.5], abs=1e-15)
    square = rates_in_time([0.25, 0.5], shape="polynomial", power=2, warmup_share=0.25, warmup_power=1)
    assert square == pytest.approx([2, 2 * (2 / 3) ** 2], abs=1e-15)
    assert rates_in_time([0.5], shape="cosine") == pytest.approx([1], abs=1e-15)
    assert rates_in_time([0.5, 1], shape="constant", warmup_share=0.75) == pytest.approx([4 / 3, 2], abs=1e-15)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budget_hours": 1, "warmup_steps": 5}, "set schedule.warmup_share"),
        ({"budget_hours": 1, "shape": "exponential", "decay_steps": 5}, "counts steps"),
        ({"warmup_share": 0.1}, "only with schedule.budget_hours"),
        ({"shape": "exponential"}, "is needed"),
        ({"shape": "linear", "decay_steps": 5}, "has no meaning"),
        ({"warmup_power": 2.0}, "warmup_shape=polynomial"),
    ],
)
def test_keys_that_the_shape_does_not_read_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScheduleConfig.model_validate(settings)


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert rates(4, shape="linear") == pytest.approx([1, 3 / 4, 2 / 4, 1 / 4])


# The documentation's formulas once more, for W = 7 warm-up steps, T = 40 steps, f = 0.1, D = 6.
W, T, D = 7, 40, 6
FORMULAS: dict[str, tuple[dict[str, object], Callable[[int], float]]] = {
    "linear": ({}, lambda n: 1 - (n - W) / (T + 1 - W)),
    "linear from the start": ({"decay_from": "start"}, lambda n: 1 - n / (T + 1)),
    "polynomial": ({"power": 0.5}, lambda n: (1 - (n - W) / (T + 1 - W)) ** 0.5),
    "cosine": ({}, lambda n: (1 + math.cos(math.pi * (n - W) / (T + 1 - W))) / 2),
    "constant": ({}, lambda n: 1.0),
    "exponential": ({"decay_rate": 0.9, "decay_steps": D}, lambda n: 0.9 ** ((n - W) / D)),
    "exponential in steps": (
        {"decay_rate": 0.9, "decay_steps": D, "staircase": True},
        lambda n: 0.9 ** ((n - W) // D),
    ),
    "warmup_stable_decay": (
        {"decay_steps": D, "power": 2.0},
        lambda n: (1 - max(n - T + D, 0) / (D + 1)) ** 2,
    ),
    "warmup_stable_decay by a root": (
        {"decay_steps": D, "decay_shape": "sqrt"},
        lambda n: 1 - math.sqrt(max(n - T + D, 0) / (D + 1)),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_r24_r25_every_step_has_the_documented_rate_in_whatever_place_a_run_starts(name: str) -> None:
    """Ten steps of the run before were skipped, some of them in a phase before this one, which began after step 100."""
    more, formula = FORMULAS[name]
    schedule = {"shape": name.split()[0], "warmup_steps": W, "final_ratio": 0.1, **more}
    expected = [n / W if n <= W else 0.1 + 0.9 * formula(n) for n in range(1, T + 1)]
    assert rates(T, **schedule) == pytest.approx(expected, rel=1e-13)
    tree = {
        "data": {"dir": "d"}, "run": {"dir": "r"}, "model": {"layers": 1}, "optimizer": {"lr": 1.0},
        "train": {"steps": 100 + T + 6, "global_batch": 1, "micro_batch": 1},
        "phases": [{"steps": 100}, {"steps": T + 6, "schedule": schedule}],
    }  # fmt: skip
    whole = {**tree, "phases": [], "train": {**tree["train"], "steps": T}, "schedule": schedule}
    (one,) = phases_of(TrainConfig.model_validate(whole))
    assert [one.rate(n + 10, skipped=10, skipped_before=0) for n in range(1, T + 1)] == rates(T, **schedule)
    _, second = phases_of(TrainConfig.model_validate(tree))
    found = [second.rate(100 + n + 6, skipped=10, skipped_before=4) for n in range(1, T + 1)]
    assert found == rates(T + 6, **schedule)[:T]


SHAPES = ["linear", "polynomial", "cosine", "constant", "exponential", "warmup_stable_decay"]


@given(st.sampled_from(SHAPES), st.integers(0, 20), st.integers(21, 60))
def test_no_shape_ever_leaves_the_range_or_rises_after_warm_up(shape: str, warmup: int, total: int) -> None:
    more = {"decay_steps": 1} if shape in ("exponential", "warmup_stable_decay") else {}
    found = rates(total, shape=shape, warmup_steps=warmup, **more)
    assert all(0 < rate <= 1 for rate in found)
    assert found == sorted(found[: max(warmup, 1)]) + sorted(found[max(warmup, 1) :], reverse=True)


def test_updates_count_from_one() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        learning_rate(0, peak=1.0, total_steps=10, schedule=ScheduleConfig())
