"""LAMB under DeepSpeed on one and two real ranks equals a plain per-parameter LAMB in one process."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "tests" / "lamb_worker.py"
TOLERANCE = 1e-6


def _import_worker() -> Any:
    spec = importlib.util.spec_from_file_location("lamb_worker", WORKER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


worker = _import_worker()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What the ranks wrote, by world size."""
    folder = tmp_path_factory.mktemp("lamb")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(WORKER), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return {size: torch.load(folder / f"results-{size}.pt", weights_only=False) for size in (1, 2)}


@cache
def reference(name: str, *, clip: bool = True, ratio_of: str = "parameter") -> dict[int, dict[str, torch.Tensor]]:
    """Weights after steps 1 and STEPS in float64, by the formulas of the paper, one parameter after another.

    `ratio_of="group"` is the mistake that this is all about: one ratio for everything that ZeRO has flattened together.
    """
    model = worker.build_model().double()
    state: dict[Any, Any] = {}
    weights = {}
    for step in range(1, worker.STEPS + 1):
        model.zero_grad()
        model(*worker.batch(step)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), worker.CLIP)
        plain_lamb(worker.groups_of(model), state, lr=worker.rate(step), ratio_of=ratio_of, **worker.OPTIONS[name])
        if step in (1, worker.STEPS):
            weights[step] = {key: p.detach().clone() for key, p in model.named_parameters()}
    return weights


@torch.no_grad()
def plain_lamb(
    groups: list[dict[str, Any]],
    state: dict[Any, Any],
    *,
    lr: float,
    eps: float = 1e-6,
    bias_correction: bool = True,
    adapt_undecayed: bool = True,
    min_ratio: float = 0.0,
    max_ratio: float = float("inf"),
    ratio_of: str = "parameter",
) -> None:
    """One step of https://arxiv.org/abs/1904.00962, algorithm 2."""
    for group in groups:
        decay, updates = group["weight_decay"], {}
        for p in group["params"]:
            m, v, t = state.get(p, (torch.zeros_like(p), torch.zeros_like(p), 0))
            m, v, t = 0.9 * m + 0.1 * p.grad, 0.999 * v + 0.001 * p.grad**2, t + 1
            state[p] = (m, v, t)
            if bias_correction:
                m, v = m / (1 - 0.9**t), v / (1 - 0.999**t)
            updates[p] = m / (v.sqrt() + eps) + decay * p
        for p, update in updates.items():
            weight_norm, update_norm = p.norm(), update.norm()
            if ratio_of == "group":
                weight_norm = torch.cat([w.flatten() for w in updates]).norm()
                update_norm = torch.cat([u.flatten() for u in updates.values()]).norm()
            ratio = torch.tensor(1.0)
            if weight_norm > 0 and update_norm > 0 and (decay or adapt_undecayed):
                ratio = (weight_norm / update_norm).clamp(min_ratio, max_ratio)
            p -= lr * ratio * update


@pytest.fixture
def one_thread() -> Iterator[None]:
    """bf16 sums are rounded where threads cut them: the reference counts with one thread, as the ranks do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def bf16_reference() -> dict[int, dict[str, torch.Tensor]]:
    """The same with bf16 weights and gradients and fp32 masters."""
    model = worker.build_model().bfloat16()
    masters = copy.deepcopy(model).float()
    pairs = list(zip(model.parameters(), masters.parameters(), strict=True))
    state: dict[Any, Any] = {}
    weights = {}
    for step in range(1, worker.HALF_PRECISION_STEPS + 1):
        model.zero_grad()
        ids, targets = worker.batch(step)
        model(ids, targets.float()).backward()
        for low, high in pairs:
            assert low.grad is not None
            high.grad = low.grad.float()
        torch.nn.utils.clip_grad_norm_(masters.parameters(), worker.CLIP)
        plain_lamb(worker.groups_of(masters), state, lr=worker.rate(step))
        with torch.no_grad():
            for low, high in pairs:
                low.copy_(high)
        if step in (1, worker.HALF_PRECISION_STEPS):
            weights[step] = {key: p.detach().clone() for key, p in masters.named_parameters()}
    return weights


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference; the names are the same."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", worker.OPTIONS)
def test_weights_equal_one_process_reference(results: Any, size: int, stage: int, name: str) -> None:
    """After one and after fifty steps, whatever the stage and the number of ranks."""
    weights = results[size][f"{name} stage {stage}"]["weights"]
    for step in (1, worker.STEPS):
        assert difference(weights[step], reference(name)[step]) < TOLERANCE


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bf16_master_weights_equal_reference(results: Any, one_thread: None, size: int, stage: int) -> None:
    """bf16 weights with fp32 masters: three different wrappers of DeepSpeed."""
    weights = results[size][f"bf16 stage {stage}"]["weights"]
    for step, expected in bf16_reference().items():
        assert difference(weights[step], expected) < TOLERANCE


@pytest.mark.parametrize("size", [1, 2])
def test_optimizer_offload_equals_reference(results: Any, size: int) -> None:
    """Partitions and moments on the CPU."""
    weights = results[size]["offload"]["weights"]
    assert difference(weights[worker.STEPS], reference("paper")[worker.STEPS]) < TOLERANCE


def test_cases_are_the_interesting_ones(results: Any) -> None:
    """Tensors cross the border, clipping matters, norms are zero, a ratio of the whole group would be far off."""
    for stage in (1, 2):
        assert results[2][f"paper stage {stage}"]["split"] == ["embedding", "norm.weight"]
    assert len({results[2][f"bf16 stage {stage}"]["wrapper"] for stage in (0, 1, 2)}) == 3
    last, start = reference("paper")[worker.STEPS], dict(worker.build_model().named_parameters())
    assert not start["gate"].any() and last["gate"].any()
    assert not last["unused"].any() and torch.equal(last["unused_bias"], start["unused_bias"].double())
    for other in (
        reference("variant"),
        reference("paper", clip=False),
        reference("paper", ratio_of="group"),
    ):
        assert difference(other[worker.STEPS], last) > 1000 * TOLERANCE


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_resume_is_bit_equal(results: Any, size: int, stage: int) -> None:
    """A DeepSpeed checkpoint half way, loaded by a new engine, ends in the very same weights."""
    resumed = results[size][f"resumed stage {stage}"]["weights"][worker.STEPS]
    assert difference(resumed, results[size][f"paper stage {stage}"]["weights"][worker.STEPS]) == 0


def test_universal_checkpoint_carries_the_state(results: Any) -> None:
    """Two ranks under ZeRO-1 until half way, one under ZeRO-2 from there."""
    weights = results[1]["universal"]["weights"][worker.STEPS]
    assert difference(weights, reference("paper")[worker.STEPS]) < TOLERANCE


def test_zero_3_is_refused(results: Any) -> None:
    """With a sentence that says what to do."""
    assert results[1]["stage 3"].startswith("LAMB does not run under ZeRO-3: set ")
