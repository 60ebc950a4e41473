"""The learning rate as a pure function of the update number, so that a resumed run needs no state to be exact.

Update numbers `n` count from 1 and leave out skipped steps. With `W` warm-up steps (at least 1), `T` steps in all, peak
rate `r`, `f` = `final_ratio` and `D` = `decay_steps`:

    n <= W:  r * n / W                                   warmup_shape "linear"
             r * (n / W) ** warmup_power                 warmup_shape "polynomial"
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
        return peak * (update / warmup) ** schedule.warmup_power
    share = _decay(update, warmup, total_steps, schedule)
    return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * share)


def _decay(update: int, warmup: int, total: int, schedule: ScheduleConfig) -> float:
    """What is left of the peak after the warm-up, 1 to 0."""
    if schedule.shape == "constant":
        return 1.0
    if schedule.shape == "exponential":
        exponent = (update - warmup) / schedule.decay_steps
        return schedule.decay_rate ** (math.floor(exponent) if schedule.staircase else exponent)
    if schedule.shape == "warmup_stable_decay":
        into = max(update - (total - schedule.decay_steps), 0)
        share = min(into / (schedule.decay_steps + 1), 1.0)
        return 1 - math.sqrt(share) if schedule.decay_shape == "sqrt" else (1 - share) ** schedule.power
    begin = warmup if schedule.decay_from == "warmup" else 0
    progress = min((update - begin) / (total + 1 - begin), 1.0)
    if schedule.shape == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    return (1 - progress) ** (schedule.power if schedule.shape == "polynomial" else 1.0)
