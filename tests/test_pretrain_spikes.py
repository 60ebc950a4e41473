"""What counts as a loss spike."""

from __future__ import annotations

import math

import pytest

from pretrain.spikes import LossSpike, SpikeWatch


def test_a_jump_over_the_ratio_is_a_spike_and_says_where_the_data_go_on() -> None:
    watch = SpikeWatch(2.0)
    for step, loss in enumerate((5.0, 4.0, 3.0, 3.0, 3.0, 5.9), start=1):
        watch.look(step, loss, {"position": step})
    with pytest.raises(LossSpike, match=r"step 7: the MLM loss jumped from 3\.0000 to 6\.1000") as caught:
        watch.look(7, 6.1, {"position": 7})
    assert caught.value.loader == {"position": 7}


def test_the_first_lines_other_numbers_and_a_ratio_of_0_are_no_spikes() -> None:
    watch, off = SpikeWatch(2.0), SpikeWatch(0.0)
    for step, loss in enumerate((1.0, 9.0, 1.0, 9.0, math.nan, math.inf), start=1):
        watch.look(step, loss, {})
        off.look(step, 10.0**step, {})
