"""The learning rate as a pure function of the update number, so that a resumed run needs no state to be exact; or, where a
run has a time budget, of the share of it that is used.

Update numbers `n` count from 1 and leave out skipped steps. With `W` warm-up steps (at least 1), `T` steps in all, peak
rate `r`, `f` = `final_ratio`, `s` = `warmup_from` and `D` = `decay_steps`:

    n <= W:  r * (s + (1 - s) * n / W)                   warmup_shape "linear"
             r * (s + (1 - s) * (n / W) ** warmup_power) warmup_shape "polynomial"
    n >  W:  r * (f + (1 - f) * shape(n))

    linear               1 - p           p = (n - W) / (T + 1 - W), or n / (T + 1) with decay_from "start"
    polynomial           (1 - p) ** power
    cosine               (1 + cos(pi * p)) / 2           https://arxiv.org/abs/1608.03983, equation 5, no restarts
    constant             1
    exponential          decay_rate ** ((n - W) / D), the exponent rounded down with `staircase`
    warmup_stable_decay  1 up to n = T - D, then (1 - q) ** power, or 1 - sqrt(q) with decay_shape "sqrt",
                         q = (n - T + D) / (D + 1)       https://arxiv.org/abs/2404.06395, 2405.18392

With decay_from "warmup" the peak is reached once, at n = W; the end of the decay lies at n = T + 1, so that no step is
spent at rate 0.  Example: r = 1, W = 4, T = 10, linear: 1/4 2/4 3/4 1 6/7 5/7 4/7 3/7 2/7 1/7.

With `budget_hours` set (https://arxiv.org/abs/2104.07705, section 3.4) the place is `u`, the share of the budget that is used,
at most 1, and `w` = `warmup_share`:

    u < w:   r * (s + (1 - s) * (u / w) ** warmup_power)
    u >= w:  r * (f + (1 - f) * shape(u))                linear, polynomial, cosine and constant as above, with
                                                         p = (u - w) / (1 - w), or u with decay_from "start"

`u` of a step is what rank 0's `stopwatch.TrainingClock` showed when the step before it began, on every rank: it travels with
the sums that are reduced anyway. So the first step is at u = 0, and no two runs have quite the same rates.
Example: r = 1, w = 0.5, linear: 0, 1/2, 1, 1/2, 0 at u = 0, 1/4, 1/2, 3/4, 1.
"""

from __future__ import annotations

import math

from pretrain.config import ScheduleConfig


def learning_rate(update: int, *, peak: float, total_steps: int, schedule: ScheduleConfig) -> float:
    """The rate of one optimizer update.

    Args:
        update: number of the update, from 1.
        peak: `optimizer.lr`.
        total_steps: `train.steps`.
        schedule: shape, warm-up and end.

    Raises:
        ValueError: `update` is below 1.
    """
    if update < 1:
        raise ValueError(f"updates count from 1, got {update}")
    warmup = max(schedule.warmup_steps, 1)
    if update <= warmup:
        return peak * _rise(update / warmup, schedule)
    share = _decay(update, warmup, total_steps, schedule)
    return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * share)


def rate_in_time(seconds: float, *, peak: float, schedule: ScheduleConfig) -> float:
    """The rate where `schedule.budget_hours` is set.

    Args:
        seconds: of the budget that are used.
        peak: `optimizer.lr`.
        schedule: shape, warm-up, end and budget.
    """
    used = min(max(seconds, 0.0) / schedule.budget_seconds, 1.0)
    warmup = schedule.warmup_share
    if used < warmup:
        return peak * _rise(used / warmup, schedule)
    begin = warmup if schedule.decay_from == "warmup" else 0.0
    share = _fall((used - begin) / (1 - begin), schedule)
    return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * share)


def _rise(progress: float, schedule: ScheduleConfig) -> float:
    """The share of the peak inside the warm-up, of which `progress` (0 to 1) has passed."""
    return schedule.warmup_from + (1 - schedule.warmup_from) * progress**schedule.warmup_power


def _decay(update: int, warmup: int, total: int, schedule: ScheduleConfig) -> float:
    """What is left of the peak after the warm-up, 1 to 0."""
    if schedule.shape == "exponential":
        exponent = (update - warmup) / schedule.decay_steps
        return schedule.decay_rate ** (math.floor(exponent) if schedule.staircase else exponent)
    if schedule.shape == "warmup_stable_decay":
        into = max(update - (total - schedule.decay_steps), 0)
        share = min(into / (schedule.decay_steps + 1), 1.0)
        return 1 - math.sqrt(share) if schedule.decay_shape == "sqrt" else (1 - share) ** schedule.power
    begin = warmup if schedule.decay_from == "warmup" else 0
    return _fall(min((update - begin) / (total + 1 - begin), 1.0), schedule)


def _fall(progress: float, schedule: ScheduleConfig) -> float:
    """What is left of the peak where `progress` (0 to 1) of the decay has passed."""
    if schedule.shape == "constant":
        return 1.0
    if schedule.shape == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    return (1 - progress) ** (schedule.power if schedule.shape == "polynomial" else 1.0)
