"""Steps, faults and resuming on two ranks, in each ZeRO stage: assertions over one run of tests/runtime_worker.py."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.shard_index import ShardIndex
from pretrain.sample_log import check, main
from pretrain.stops import EXIT_DONE, EXIT_STOPPED

WORKER = Path(__file__).with_name("runtime_worker.py")
STAGES = ("0", "1", "2", "3")
RATES = [1e-2 * rate for rate in (1 / 4, 2 / 4, 3 / 4, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7)]

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(1800)]  # one fixture runs all launches


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, write_dataset: Callable[..., ShardIndex]) -> Path:
    folder = tmp_path_factory.mktemp("runtime") / "data"
    for part, blocks in (("train", 6), ("validation", 2)):
        write_dataset(folder / part, shards=2, blocks=blocks, examples=9, seed=blocks)
    return folder


PLANS = {
    "one-rank": "1:worked_example,equals_plain_torch,halves,phased,second_config,validated,spiked",
    "two-ranks": "2:worked_example,equals_plain_torch,resumed,overflow,faults,elastic,halves,agreement,timed,straggling,validated,"
    "asynchronous,refusing_disk,signalled_save",
    "four-ranks": "4:elastic,halves,tracked",
    "eight-ranks": "8:elastic",
    "hung": "2:hung:fails",
}


@pytest.fixture(scope="module")
def launches(data: Path) -> dict[str, dict[str, Any]]:
    """What rank 0 of each launch found; later ones go on with checkpoints of earlier ones."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), str(data), str(data.parent), *(f"{name}:{PLANS[name]}" for name in PLANS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        logs = [path.read_text()[-3000:] for name in PLANS for path in sorted((data.parent / name).glob("rank-*.log"))]
        pytest.fail("\n".join([done.stderr[-2000:], *logs]))
    results = {name: data.parent / name / "results.json" for name in PLANS}
    return {name: json.loads(file.read_text()) for name, file in results.items() if file.exists()}


@pytest.fixture(scope="module")
def one_rank(launches: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return launches["one-rank"]


@pytest.fixture(scope="module")
def results(launches: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return launches["two-ranks"]


def test_r21_sums_of_2_over_2_and_24_over_8_give_2_6(results: dict[str, Any]) -> None:
    """The gradient of w x sum / count at w = 1 is the loss itself."""
    for name in ("over_ranks", "accumulated"):
        loss, gradient = results["worked_example"][name]
        assert loss == pytest.approx(2.6, abs=1e-12)
        assert gradient == pytest.approx(2.6, abs=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_r21_two_ranks_with_accumulation_equal_one_joint_batch(results: dict[str, Any], stage: str) -> None:
    found = results["equals_plain_torch"][stage]
    assert found["gradient"] < 1e-6
    assert found["norm"] < 1e-5
    assert found["loss"] < 5e-6  # of about 5.3, after steps that themselves differ by 1e-7
    assert found["weight"] < 1e-6


def test_r21_one_rank_with_four_micro_batches_equals_the_same(one_rank: dict[str, Any]) -> None:
    assert one_rank["worked_example"]["accumulated"] == pytest.approx([2.6, 2.6])
    for stage in STAGES:
        assert one_rank["equals_plain_torch"][stage]["gradient"] < 1e-6
        assert one_rank["equals_plain_torch"][stage]["weight"] < 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_r24_r25_rates_in_the_optimizer_equal_the_formula_also_after_a_resume(
    results: dict[str, Any], stage: str
) -> None:
    found = results["resumed"][stage]
    for run in ("straight", "stopped"):
        assert [line[0] for line in found[run]] == list(range(1, 11))
        assert [line[1] for line in found[run]] == pytest.approx(RATES, rel=1e-15)
    assert [line[1] for line in found["straight"]] == [line[1] for line in found["stopped"]]


@pytest.mark.parametrize("stage", STAGES)
def test_stopped_and_resumed_equals_no_interruption_bit_for_bit(results: dict[str, Any], stage: str) -> None:
    """Dropout is on; stops in warm-up and in decay; the lines of a killed job are gone."""
    found = results["resumed"][stage]
    assert found["codes"] == [EXIT_DONE, EXIT_STOPPED, EXIT_STOPPED, EXIT_DONE]
    assert found["starts"] == [0, 2, 6]
    assert found["straight"] == found["stopped"]
    assert len({line[2] for line in found["straight"]}) == 10  # the loss moves: equality is not of constants
    assert found["same_weights"]
    assert found["steps"] == [6, 10]
    assert found["state"]["position"] == 10 * 16


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_r22_an_overflow_changes_neither_weights_nor_the_rates_position(
    results: dict[str, Any], stage: str, precision: str
) -> None:
    found = results["overflow"][f"{precision}-{stage}"]
    assert "error" not in found, found
    assert found["code"] == EXIT_DONE
    assert found["skipped"] == [0, 0, 1, 1, 1, 1]
    assert found["norm"][2] == "inf" and all(isinstance(norm, float) for norm in found["norm"][3:])
    assert found["unchanged_at_3"] and found["moved_at_4"]
    assert found["rates"][3] == found["rates"][2]  # step 4 takes the rate that step 3 did not use
    whole = results["overflow"][f"fp32-{stage}"]  # a loss scale that were left in the gradient would show
    assert found["moved_at_2"] == pytest.approx(whole["moved_at_2"], rel=0.1)
    assert found["norm"][:2] == pytest.approx(whole["norm"][:2], rel=0.05)


def test_r22_endless_overflow_ends_the_job_and_the_last_checkpoint_is_finite(results: dict[str, Any]) -> None:
    assert "3 steps in a row, up to step 7" in results["faults"]["endless"]
    assert results["faults"]["endless_steps"] == [4, 6]


def test_r22_weights_that_are_not_finite_never_become_a_checkpoint(results: dict[str, Any]) -> None:
    assert "not finite" in results["faults"]["poisoned"]
    assert results["faults"]["poisoned_left"] == []


def test_r27_keeps_the_newest_and_passes_over_a_damaged_one(results: dict[str, Any]) -> None:
    assert results["faults"]["kept"] == [3, 6, 8]  # 3 is pinned
    assert results["faults"]["after_damage"] == [0, 6]
    assert "is at step 8, past train.steps=5" in results["faults"]["shortened"]


def assert_went_on(found: dict[str, Any]) -> None:
    assert found["weight"] < 1e-6  # a dropped moment would show: steps are of 1e-3 to 1e-2
    assert found["loss"] < 1e-5
    assert found["position"] == 6 * 32
    assert found["left"] == ["latest", "step-000000003", "step-000000006"]


@pytest.mark.parametrize("stages", ["0-0", "1-1", "2-2", "3-3", "1-2", "2-1"])
def test_r26_a_run_begun_on_one_rank_with_eight_micro_batches_goes_on_on_two(
    results: dict[str, Any], stages: str
) -> None:
    assert_went_on(results["elastic"][stages])


@pytest.mark.parametrize("stages", ["1-2", "2-1", "3-3"])
def test_r26_a_run_begun_on_two_ranks_goes_on_on_four(launches: dict[str, dict[str, Any]], stages: str) -> None:
    assert_went_on(launches["four-ranks"]["elastic"][stages])


def test_r26_a_run_begun_on_four_ranks_goes_on_on_eight(launches: dict[str, dict[str, Any]]) -> None:
    assert_went_on(launches["eight-ranks"]["elastic"]["1-1"])


@pytest.mark.parametrize("stages", ["0-1", "3-1", "1-3"])
def test_r26_what_cannot_be_carried_over_is_refused_and_nothing_is_touched(
    results: dict[str, Any], stages: str
) -> None:
    found = results["elastic"][stages]
    assert f"ZeRO stage {stages.replace('-', ' -> ')}" in found["refused"]
    assert found["steps"] == [3]


def test_r26_only_zero_1_and_2_are_carried_into_each_other(results: dict[str, Any]) -> None:
    reasons = results["elastic"]["reasons"]
    assert len(reasons) == 16
    for stages, reason in reasons.items():
        old, new = stages.split("-")
        carried = old == new or {old, new} == {"1", "2"}
        assert reason == "" if carried else f"ZeRO stage {old} -> {new}" in reason and f"stage {old}, on any" in reason


@pytest.mark.parametrize(
    ("run", "noted"),
    [
        ("two-ranks/straight-1", 160),
        ("two-ranks/stopped-1", 160),
        ("one-rank/whole", 192),
        ("two-ranks/elastic-1-2", 192),
        ("four-ranks/elastic-2-1", 192),
        ("eight-ranks/elastic-1-1", 192),
    ],
)
def test_every_example_once_an_epoch_over_stops_and_other_numbers_of_ranks(
    launches: dict[str, dict[str, Any]], data: Path, run: str, noted: int
) -> None:
    """114 examples: ten steps of 16 and six of 32 cross the border of the first epoch."""
    (line,) = check(data.parent / run)
    assert line.endswith(f"{noted} examples noted, 1 whole epochs of 114, every example once in each")


def test_a_lost_or_repeated_note_is_found(
    launches: dict[str, dict[str, Any]], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = data.parent / "two-ranks" / "straight-1" / "samples"
    for name, change in (("left out", lambda lines: lines[:2] + lines[3:]), ("a second time", lambda lines: lines * 2)):
        shutil.copytree(source, tmp_path / name / "samples")
        file = tmp_path / name / "samples" / "rank-1.jsonl"
        file.write_text("".join(line + "\n" for line in change(file.read_text().splitlines())))
        assert main([str(tmp_path / name)]) == 1
        assert name in capsys.readouterr().err


def test_phases_change_data_batch_and_schedule_and_resume_exactly(one_rank: dict[str, Any]) -> None:
    found = one_rank["phased"]["straight"]
    steps, rates, losses, examples = zip(*found["lines"], strict=True)
    assert steps == tuple(range(1, 9))
    assert examples == (8, 8, 16, 16, 16, 16, 16, 16)
    whole = [1e-2 * share for share in (1, 7 / 8, 6 / 8, 5 / 8, 4 / 8)]  # one decay over all 8 steps
    assert rates == pytest.approx([*whole, 1e-3 / 2, 1e-3, 1e-3 / 2], rel=1e-15)
    assert found["position"] == 3 * 16  # of the last phase's own data
    assert found["starts"] == [0, 2, 5]
    stopped = one_rank["phased"]["stopped"]
    assert stopped["lines"] == found["lines"] and len(set(losses)) == 8
    assert stopped["codes"] == [EXIT_STOPPED] * 3 + [EXIT_DONE]
    assert one_rank["phased"]["same_weights"]
    assert one_rank["phased"]["alive"][:3] == [0, 0, 0]  # of two phases' models one at a time is in memory


def test_phase_two_as_a_configuration_of_its_own_equals_phases_in_one(one_rank: dict[str, Any]) -> None:
    found = one_rank["second_config"]
    assert found["codes"] == [EXIT_STOPPED, EXIT_DONE]
    assert found["lines"] == one_rank["phased"]["straight"]["lines"][5:]
    assert found["same_weights"] and found["starts"] == [5, 6] and found["continues"] == 5
    assert found["position"] == 3 * 16
    for name, words in (
        ("start", "is at step 5, but schedule.start_step=4; set it to 5"),
        ("steps", "is at step 5, but train.steps=5: it counts the steps before, too"),
        ("model", "has another encoder: model.intermediate: 64 -> 128"),
        ("nothing", "holds no run"),
        ("itself", "it is run.dir itself"),
    ):
        assert words in found["refused"][name]
    assert found["refused"]["left"] == []


def test_a_loss_spike_goes_back_and_leaves_its_examples_out(one_rank: dict[str, Any]) -> None:
    found = one_rank["spiked"]
    assert found["code"] == EXIT_DONE
    assert found["starts"] == [0, 6]
    assert [(noted["step"], noted["position"]) for noted in found["rollbacks"]] == [(8, 8 * 16)]
    assert found["steps"] == list(range(1, 13))
    assert found["position"] == (12 + 2) * 16


def test_r41_a_rank_with_other_settings_is_named_before_training(results: dict[str, Any]) -> None:
    found = results["agreement"]
    assert "rank 1 on " in found["differing"] and "optimizer.lr: 0.001 -> 0.002" in found["differing"]
    assert found["same_everywhere"] and found["nothing_written"]


def test_too_small_a_disk_is_refused_before_training(results: dict[str, Any]) -> None:
    assert "4 checkpoints of " in results["agreement"]["no_room"]  # two that stay, the best, one that is being written
    assert "0.00 GiB are free" in results["agreement"]["no_room"]
    assert "a-file/run cannot be written" in results["agreement"]["no_folder"]


def test_the_rate_follows_rank_0s_clock_also_after_a_resume_until_the_budget_is_used(results: dict[str, Any]) -> None:
    """Nine seconds, one a step, a third of them warm-up; the rate of a step follows the clock before the step before it."""
    rates = [1e-2 * rate for rate in (0, 1 / 3, 2 / 3, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6)]
    straight, stopped = results["timed"]["straight"], results["timed"]["stopped"]
    assert [line[0] for line in straight["lines"]] == list(range(1, 10))
    assert [line[1] for line in straight["lines"]] == pytest.approx(rates, rel=1e-12)
    assert [line[2] for line in straight["lines"]] == pytest.approx(list(range(8, -1, -1)), abs=1e-9)
    assert straight["codes"] == [EXIT_DONE] and stopped["codes"] == [EXIT_STOPPED, EXIT_DONE]
    assert straight["lines"] == stopped["lines"] and results["timed"]["same_weights"]  # whatever rank 1's clock shows
    for run in (straight, stopped):
        assert run["saved"] == [9, 9.0] and run["finished"]
        assert set(run["slowest"]) <= {0, 1}


def test_r30_four_ranks_of_one_job_make_one_tracked_run(launches: dict[str, dict[str, Any]]) -> None:
    found = launches["four-ranks"]["tracked"]
    (metrics,), (params,), (tags,), record = found["metrics"], found["params"], found["tags"], found["record"]
    assert {"train/loss", "train/lr", "train/straggler_rank", "train/step_seconds_max"} <= metrics.keys()
    assert {"validation/mlm_loss", "system/cpu_utilization_percentage"} <= metrics.keys()
    assert params["optimizer.lr"] == "0.01" and tags["clozeworks.git"] == record["git"]
    assert tags["clozeworks.version.torch"] == record["versions"]["torch"] and tags["clozeworks.platform"]
    assert found["datasets"] == [record["data"][:36]] and found["artifacts"] == ["config.json"]


@pytest.mark.parametrize("stage", ["1", "3"])
def test_the_held_out_loss_is_exact_over_the_whole_set_and_no_example_comes_twice(
    one_rank: dict[str, Any], results: dict[str, Any], stage: str
) -> None:
    for launch in (one_rank, results):
        found = launch["validated"][stage]
        assert found["seen"] == [38, 38] and found["found"]["examples"] == 38
        assert found["found"]["predictions"] == found["predictions"] and 0 < found["mlm_accuracy"] < 1
        for name in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"):
            assert found["found"][name] == pytest.approx(found[name], rel=1e-6)
        assert found["found"]["perplexity"] == pytest.approx(math.exp(found["mlm_loss"]), rel=1e-5)
    one, two = (launch["validated"][stage]["found"] for launch in (one_rank, results))
    assert one == pytest.approx(two, rel=1e-6)


def test_the_rank_that_the_others_wait_for_is_named(results: dict[str, Any]) -> None:
    found = results["straggling"]["lines"]
    assert [line["straggler_rank"] for line in found] == [1, 0]
    assert [line["straggler_ratio"] for line in found] == pytest.approx([1.25 / 1.0, 2.0 / 1.5])
    for line in found:
        assert 0 < line["step_seconds_p50"] <= line["step_seconds_p95"] <= line["step_seconds_max"]


def test_r41_a_rank_that_hangs_in_a_step_is_shown_and_every_rank_ends(
    launches: dict[str, dict[str, Any]], data: Path
) -> None:
    assert "hung" not in launches
    shown = (data.parent / "hung" / "rank-1.log").read_text()
    assert re.search(r"rank 1 on \S+ made no progress for \d+ s while in step 1 ", shown)
    assert "in waits_for_nothing" in shown


def test_a_used_up_time_budget_of_one_rank_stops_all_with_a_checkpoint(results: dict[str, Any]) -> None:
    assert results["agreement"]["budget"] == EXIT_STOPPED
    assert results["agreement"]["budget_steps"] == [1]
    assert results["agreement"]["budget_lines"] == [1]  # what was not yet a whole interval is written too


@pytest.mark.parametrize("kind", ["1-fp32", "3-fp32", "2-bf16"])
def test_a_save_in_the_background_holds_what_a_save_that_waits_holds(results: dict[str, Any], kind: str) -> None:
    """Every tensor of every file, bit for bit, though the weights have moved on before the files were written."""
    found = results["asynchronous"][kind]
    assert found["codes"] == [EXIT_DONE, EXIT_DONE]
    assert found["there_at_step_4"] == ["step-000000002.incomplete"]  # training goes on, and nothing half is published
    assert found["steps"] == [2, 4, 6] and found["left"] == []
    assert found["same"] == [True] * 3
    assert found["same_losses"] == [True] * 6


def test_a_rank_that_cannot_write_its_part_ends_all_with_one_message(results: dict[str, Any]) -> None:
    for name in ("waiting", "going_on"):
        found = results["refusing_disk"][name]
        assert "step 4 could not be saved: rank 1 on " in found["told"] and "GiB are free there" in found["told"]
        assert found["same_everywhere"]
        assert found["left"] == ["latest", "step-000000002"]
    assert results["refusing_disk"]["code"] == EXIT_DONE
    assert results["refusing_disk"]["steps"] == [2, 4, 6]


@pytest.mark.parametrize("name", ["waiting", "going_on"])
def test_r40_a_signal_in_the_middle_of_a_save_stops_after_it_and_damages_nothing(
    results: dict[str, Any], name: str
) -> None:
    found = results["signalled_save"][name]
    assert found["codes"] == [EXIT_STOPPED, EXIT_DONE]
    assert found["stopped"][0] == 2 and found["stopped"][-1] == found["trained"] < 6
    if name == "waiting":
        assert found["stopped"] == [2, 3]
    assert found["same_weights"] and found["same_losses"]
