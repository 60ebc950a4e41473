"""Steps, faults and resuming on two ranks, in each ZeRO stage: assertions over one run of tests/runtime_worker.py."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.shard_index import ShardIndex
from pretrain.stops import EXIT_DONE, EXIT_STOPPED

WORKER = Path(__file__).with_name("runtime_worker.py")
STAGES = ("0", "1", "2", "3")
RATES = [1e-2 * rate for rate in (1 / 4, 2 / 4, 3 / 4, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7)]

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, write_dataset: Callable[..., ShardIndex]) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for part, blocks in (("train", 6), ("validation", 2)):
        write_dataset(folder / part, shards=2, blocks=blocks, examples=9, seed=blocks)
    return folder


def run_ranks(scenarios: str, data: Path, out: Path, *, ranks: int) -> dict[str, Any]:
    """Start the worker on `ranks` processes and return what rank 0 found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in range(ranks):
        environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        with open(out / f"rank-{rank}.log", "w") as log:
            command = [sys.executable, str(WORKER), scenarios, str(data), str(out)]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=540) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join((out / f"rank-{rank}.log").read_text()[-3000:] for rank in range(ranks))
    assert codes == [0] * ranks, logs
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def results(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    scenarios = "worked_example,equals_plain_torch,resumed,overflow,faults"
    return run_ranks(scenarios, data, tmp_path_factory.mktemp("two-ranks"), ranks=2)


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


def test_r21_one_rank_with_four_micro_batches_equals_the_same(data: Path, tmp_path: Path) -> None:
    found = run_ranks("worked_example,equals_plain_torch", data, tmp_path, ranks=1)
    assert found["worked_example"]["accumulated"] == pytest.approx([2.6, 2.6])
    for stage in STAGES:
        assert found["equals_plain_torch"][stage]["gradient"] < 1e-6
        assert found["equals_plain_torch"][stage]["weight"] < 1e-6


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


def test_r22_endless_overflow_ends_the_job_and_the_last_checkpoint_is_finite(results: dict[str, Any]) -> None:
    assert "3 steps in a row, up to step 7" in results["faults"]["endless"]
    assert results["faults"]["endless_steps"] == [4, 6]


def test_r22_weights_that_are_not_finite_never_become_a_checkpoint(results: dict[str, Any]) -> None:
    assert "not finite" in results["faults"]["poisoned"]
    assert results["faults"]["poisoned_left"] == []


def test_r27_keeps_the_newest_and_passes_over_a_damaged_one(results: dict[str, Any]) -> None:
    assert results["faults"]["kept"] == [6, 8]
    assert results["faults"]["after_damage"] == [0, 6]
