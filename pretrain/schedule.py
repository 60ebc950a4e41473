"""The learning rate as a pure function of the update number, so that a resumed run needs no state to be exact.

Update numbers count from 1 and leave out skipped steps. With `W` warm-up steps (at least 1), `T` steps in all and
peak rate `r`:

    n <= W:  r * n / W
    n >  W:  r * (f + (1 - f) * shape(p)),  p = (n - W) / (T + 1 - W)

`f` is `final_ratio`. The peak is reached once, at n = W; the end of the decay lies at n = T + 1, so that no step is
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
        return peak * update / warmup
    progress = min((update - warmup) / (total_steps + 1 - warmup), 1.0)
    share = _decay(progress, schedule)
    return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * share)


def _decay(progress: float, schedule: ScheduleConfig) -> float:
    """What is left of the peak, 1 to 0, after this share of the decay."""
    if schedule.shape == "constant":
        return 1.0
    if schedule.shape == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2  # https://arxiv.org/abs/1608.03983, eq. 5, without restarts
    power = schedule.power if schedule.shape == "polynomial" else 1.0
    return (1 - progress) ** power
