"""Scenarios of tests/runtime_worker.py: saves in the background, disks that refuse, signals in the middle of a save."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from runtime_common import make_config, records, weights_of, zero

from cluster.world import World
from pretrain import checkpoint, collectives, engine
from pretrain.checkpoint import SaveError, list_steps, load_model_weights, read_state, step_of, verify
from pretrain.run_data import RunData
from pretrain.stops import StopRequest
from pretrain.trainer import train

KINDS = {"1-fp32": zero(1), "3-fp32": zero(3), "2-bf16": zero(2, bf16={"enabled": True})}


def _run(world: World, data: Path, run: Path, stop: StopRequest | None = None, **tables: dict[str, Any]) -> int:
    """Six steps with dropout, saved at every second one."""
    saves = {"every": 2, "keep": 9, **tables.pop("checkpoint", {})}
    config = make_config(data, run, train={"steps": 6}, validation={"every": 0}, checkpoint=saves, **tables)
    opened = RunData(config)
    return train(opened.model_config(), world, opened, stop or StopRequest())


def _steps(run: Path) -> list[int | None]:
    return [step_of(folder) for folder in list_steps(run / "checkpoints")]


def _same(one: Any, other: Any) -> bool:
    """Bit-equal, as deep as dictionaries, lists and objects go."""
    if torch.is_tensor(one):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one if key != "ds_config")
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_same(*pair) for pair in zip(one, other, strict=True))
    if hasattr(one, "__dict__") and not isinstance(one, type):
        return type(one) is type(other) and _same(vars(one), vars(other))
    return bool(one == other)


def _same_checkpoints(one: Path, other: Path) -> bool:
    verify(one)
    verify(other)
    names = {path.relative_to(one) for path in one.rglob("*") if path.is_file()}
    assert names == {path.relative_to(other) for path in other.rglob("*") if path.is_file()}
    tensors = [name for name in names if name.suffix == ".pt"]
    assert len(tensors) > 0
    states = [
        (torch.load(one / name, weights_only=False), torch.load(other / name, weights_only=False)) for name in tensors
    ]
    states.append((load_model_weights(one), load_model_weights(other)))
    states.append((read_state(one).loader, read_state(other).loader))
    return all(_same(*pair) for pair in states)


@contextlib.contextmanager
def _held_hashing(world: World, root: Path) -> Iterator[list[str]]:
    """Rank 1 does not hash the files of the first save before its step 4 has begun; what is there by then."""
    step, hashing, go = engine.TrainEngine.step, checkpoint.file_records, threading.Event()
    there: list[str] = []

    def counted(trainer: Any, batches: Any, *, number: int, **more: Any) -> Any:
        if number == 4:
            there.extend(path.name for path in root.iterdir())
            go.set()
        return step(trainer, batches, number=number, **more)

    def waiting(folder: Path, **part: int) -> Any:
        if world.rank == 1:
            go.wait()
        return hashing(folder, **part)

    engine.TrainEngine.step, checkpoint.file_records = counted, waiting  # type: ignore[method-assign,assignment]
    try:
        yield there
    finally:
        engine.TrainEngine.step, checkpoint.file_records = step, hashing  # type: ignore[method-assign]


def asynchronous(world: World, data: Path, out: Path) -> dict[str, Any]:
    """Checkpoints written in the background against those of a run that waits, file by file; training goes on meanwhile."""
    results: dict[str, Any] = {}
    for kind, table in KINDS.items():
        waiting, going_on = out / f"waiting-{kind}", out / f"going-on-{kind}"
        codes = [_run(world, data, waiting, deepspeed=table)]
        with _held_hashing(world, going_on / "checkpoints") as there:
            codes.append(_run(world, data, going_on, deepspeed=table, checkpoint={"asynchronous": True}))
        if world.rank == 0:
            folders = zip(*(list_steps(run / "checkpoints") for run in (waiting, going_on)), strict=True)
            results[kind] = {
                "codes": codes,
                "there_at_step_4": there,
                "steps": _steps(going_on),
                "left": [path.name for path in (going_on / "checkpoints").iterdir() if "incomplete" in path.name],
                "same": [_same_checkpoints(*pair) for pair in folders],
                "same_losses": [
                    a["loss"] == b["loss"] for a, b in zip(records(waiting), records(going_on), strict=True)
                ],
            }
    return results


@contextlib.contextmanager
def _small_files(world: World) -> Iterator[None]:
    """From step 3 on rank 1 can write no file of more than 64 kB: the operating system refuses, as on a full disk."""
    step = engine.TrainEngine.step
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(trainer: Any, batches: Any, *, number: int, **more: Any) -> Any:
        if number == 3 and world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
        return step(trainer, batches, number=number, **more)

    engine.TrainEngine.step = limited  # type: ignore[method-assign]
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        engine.TrainEngine.step = step  # type: ignore[method-assign]


def refusing_disk(world: World, data: Path, out: Path) -> dict[str, Any]:
    """Rank 1 cannot write its part of the save at step 4: at once, then in the background; at last the disk has room."""
    run, results = out / "refused", {}
    for name, background in (("waiting", False), ("going_on", True)):
        told = ""
        with _small_files(world):
            try:
                _run(world, data, run, deepspeed=zero(1), checkpoint={"asynchronous": background})
            except SaveError as error:
                told = str(error)
        results[name] = {
            "told": told,
            "same_everywhere": len(set(collectives.gather_objects(told))) == 1,
            "left": sorted(path.name for path in (run / "checkpoints").iterdir()),
        }
        collectives.barrier()
    results["code"] = _run(world, data, run, deepspeed=zero(1), checkpoint={"asynchronous": True})
    results["steps"] = _steps(run)
    return results


@contextlib.contextmanager
def _signal_in_save(world: World, number: signal.Signals) -> Iterator[None]:
    """Rank 1 sends itself a signal from inside its first fsync: in the middle of writing a checkpoint."""
    sync, kept, sent = os.fsync, signal.getsignal(number), []

    def signalling(descriptor: int) -> None:
        if world.rank == 1 and not sent:
            sent.append(True)
            os.kill(os.getpid(), number)
        sync(descriptor)

    os.fsync = signalling  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = sync
        signal.signal(number, kept)


def signalled_save(world: World, data: Path, out: Path) -> dict[str, Any]:
    """R40: the run stops after the next step with both checkpoints whole, and goes on to the same end as `asynchronous`'s."""
    results: dict[str, Any] = {}
    for name, background, number in (("waiting", False, signal.SIGUSR1), ("going_on", True, signal.SIGTERM)):
        run, saves = out / f"signalled-{name}", {"asynchronous": background}
        with _signal_in_save(world, number):
            stop = StopRequest()
            stop.listen()
            codes = [_run(world, data, run, stop, deepspeed=zero(1), checkpoint=saves)]
        for folder in list_steps(run / "checkpoints"):
            verify(folder)
        stopped, trained = _steps(run), [line["step"] for line in records(run)][-1]
        collectives.barrier()
        codes.append(_run(world, data, run, deepspeed=zero(1), checkpoint=saves))
        if world.rank == 0:
            one, two = weights_of(out / "waiting-1-fp32"), weights_of(run)
            results[name] = {
                "codes": codes,
                "stopped": stopped,
                "trained": trained,
                "steps": _steps(run),
                "same_weights": all(torch.equal(one[key], two[key]) for key in one),
                "same_losses": [line["loss"] for line in records(run)]
                == [line["loss"] for line in records(out / "waiting-1-fp32")],
            }
    return results
