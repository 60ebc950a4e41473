"""Checkpoints that are complete or absent: written aside, synced, hashed, renamed; the newest whole one wins.

checkpoints/
  step-000000200/
    manifest.json        size and sha256 of every other file; written last
    trainer_state.json   schema, run id, step, loader state, world size, fingerprints, configuration
    model.safetensors    all weights in fp32, for the export and for reading without DeepSpeed
    deepspeed/           DeepSpeed's own files: weights, optimizer, fp32 masters, cut by rank
  latest                 name of the newest one, for people; resuming looks at the folders themselves
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.artefacts import write_text

if TYPE_CHECKING:
    import torch

SCHEMA = 1
ENGINE_TAG = "deepspeed"
WEIGHTS = "model.safetensors"
_STATE, _MANIFEST, _LATEST, _PINNED = "trainer_state.json", "manifest.json", "latest", "pinned"
_BYTES_A_PARAMETER = 20
_NAME = re.compile(r"step-(\d+)")
TEMPORARY = ".incomplete"


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged, of another run or not loadable here; the message says what to do."""


class SaveError(CheckpointError):
    """A checkpoint could not be written; those before it are whole."""


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What resuming needs beside the tensors."""

    step: int
    """Optimizer steps taken, skipped ones included: the data position is step x global batch."""
    skipped_steps: int
    """Of these, steps whose gradient was not finite; the learning rate's position is step - skipped_steps."""
    skipped_in_a_row: int
    run_id: str
    loader: dict[str, Any]
    world_size: int
    zero_stage: int
    precision: str
    tokenizer: str
    data: str
    git: str
    config: dict[str, Any] = field(repr=False)
    mlflow_run_id: str = ""
    skipped_before_phase: int = 0
    """Of the skipped steps, those before the current phase."""
    seconds_used: float = 0.0
    """Of training, for `schedule.budget_hours`."""
    held_out_loss: float | None = None
    """MLM loss on the held-out examples, where this step was validated; "nan" is stored as null."""
    schema: int = SCHEMA


def step_name(step: int) -> str:
    """Folder name of a step; sorted names are sorted steps up to a billion, and nothing here relies on it."""
    return f"step-{step:09d}"


def step_of(folder: Path) -> int | None:
    """The step that a folder name states, or None where it is no checkpoint's name."""
    match = _NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def list_steps(root: Path) -> list[Path]:
    """Checkpoint folders, ascending by step number; whole or not, of this run or not."""
    if not root.is_dir():
        return []
    found = [(step, path) for path in root.iterdir() if path.is_dir() and (step := step_of(path)) is not None]
    return [path for _, path in sorted(found)]


def incomplete_folder(root: Path, step: int) -> Path:
    """Where a step is written before it is whole."""
    return root / f"{step_name(step)}{TEMPORARY}"


def clear_incomplete(root: Path) -> None:
    """Remove what a killed save or removal left behind; one process, before or between saves."""
    for path in root.glob(f"*{TEMPORARY}"):
        shutil.rmtree(path)


def file_records(folder: Path, *, part: int = 0, parts: int = 1) -> dict[str, dict[str, Any]]:
    """Sync and hash every `parts`-th file, so that ranks can share the work.

    Returns:
        relative path -> {"bytes", "sha256"}.
    """
    records = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file())[part::parts]:
        with open(path, "rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
            os.fsync(handle.fileno())
        records[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    return records


def write_state(folder: Path, state: TrainerState) -> None:
    """Write trainer_state.json."""
    write_text(folder / _STATE, json.dumps(asdict(state), indent=1, sort_keys=True) + "\n")


def write_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write model.safetensors: fp32 tensors on the CPU."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS)


def publish(root: Path, step: int, records: dict[str, dict[str, Any]]) -> Path:
    """Turn a fully written incomplete folder into the checkpoint of `step`; one process calls this.

    Args:
        root: the checkpoints folder.
        step: its step.
        records: of every file in it, from `file_records`.
    """
    incomplete, final = incomplete_folder(root, step), root / step_name(step)
    manifest = {"schema": SCHEMA, "step": step, "files": dict(sorted(records.items()))}
    write_text(incomplete / _MANIFEST, json.dumps(manifest, indent=1) + "\n")
    for folder in [incomplete, *(path for path in incomplete.rglob("*") if path.is_dir())]:
        _sync_folder(folder)
    if final.exists():  # a damaged one of the same step, written before a resume from an earlier step
        _remove(final)
    os.rename(incomplete, final)
    _sync_folder(root)
    write_text(root / _LATEST, final.name + "\n")
    return final


def read_state(folder: Path) -> TrainerState:
    """trainer_state.json of a checkpoint.

    Raises:
        CheckpointError: missing, not JSON, or of another schema.
    """
    path = folder / _STATE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if content.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{path}: expected schema {SCHEMA}, found {content.get('schema')!r}: another version's file"
        )
    names = {item.name for item in fields(TrainerState)}
    missing = {item.name for item in fields(TrainerState) if item.default is MISSING} - content.keys()
    if missing:
        raise CheckpointError(f"{path}: lacks {', '.join(sorted(missing))}")
    return TrainerState(**{name: content[name] for name in names & content.keys()})


def verify(folder: Path, *, hashes: bool = True) -> None:
    """Compare a checkpoint with its manifest.

    Args:
        folder: the checkpoint.
        hashes: also read and hash every file; without, only names and sizes.

    Raises:
        CheckpointError: no manifest, or a file is missing, of another size or of another content.
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: no readable {_MANIFEST} ({error}): the save did not finish") from error
    for name, record in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != record["bytes"]:
            raise CheckpointError(f"{path}: expected {record['bytes']} bytes, found {size}")
        if hashes:
            with open(path, "rb") as handle:
                if hashlib.file_digest(handle, "sha256").hexdigest() != record["sha256"]:
                    raise CheckpointError(f"{path}: its content differs from the manifest's sha256")


def newest_complete(root: Path, *, run_id: str = "", report: Callable[[str], None] = print) -> Path | None:
    """The checkpoint to go on from: the highest step that is whole and of this run; None where there is none.

    Args:
        root: the checkpoints folder.
        run_id: only checkpoints with this id; empty takes any.
        report: told about each one that is passed over, and why.
    """
    for folder in reversed(list_steps(root)):
        try:
            state = read_state(folder)
            if run_id and state.run_id != run_id:
                report(f"{folder}: belongs to another run ({state.run_id}), not used")
                continue
            verify(folder)
        except CheckpointError as error:
            report(f"damaged checkpoint not used: {error}")
            continue
        return folder
    return None


def retain(
    root: Path, *, keep: int, written: Path, run_id: str, pinned: Iterable[int] = (), keep_best: bool = False
) -> list[Path]:
    """Remove this run's older checkpoints until `keep` are left, by step number.

    Never removes the one just written, pinned steps, folders in which a file `pinned` lies (`touch` it at any time), with
    `keep_best` the one with the lowest held-out loss, or what carries another run's id or no readable state.

    Returns:
        What was removed.
    """
    own = [folder for folder in list_steps(root) if _belongs(folder, run_id)]
    protected = {written, *(folder for folder in own if step_of(folder) in set(pinned) or (folder / _PINNED).exists())}
    if keep_best:
        protected.add(best(own) or written)
    removed = []
    for folder in own[:-keep]:
        if folder not in protected:
            _remove(folder)
            removed.append(folder)
    return removed


def best(folders: Iterable[Path]) -> Path | None:
    """The checkpoint with the lowest finite held-out MLM loss, the earlier of equals; None where none has one."""
    losses = [(loss, folder) for folder in folders if (loss := read_state(folder).held_out_loss) is not None]
    return min((pair for pair in losses if math.isfinite(pair[0])), key=lambda pair: pair[0], default=(0.0, None))[1]


def require_space(root: Path, *, parameters: int, count: int) -> None:
    """Refuse a disk that cannot hold the checkpoints of a run.

    A checkpoint takes about 20 bytes a parameter: weights twice, in DeepSpeed's files and in model.safetensors, fp32
    masters and two moments.

    Args:
        root: the checkpoints folder; it need not exist.
        parameters: of the model.
        count: checkpoints that lie there at a time.

    Raises:
        CheckpointError: too little is free; both numbers are named.
    """
    there = next(folder for folder in (root.resolve(), *root.resolve().parents) if folder.is_dir())
    used = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    needed, free = _BYTES_A_PARAMETER * parameters * count, shutil.disk_usage(there).free
    if needed - used > free:
        raise CheckpointError(
            f"{root}: {count} checkpoints of {_BYTES_A_PARAMETER * parameters / 2**30:.2f} GiB do not fit: "
            f"{free / 2**30:.2f} GiB are free and {used / 2**30:.2f} GiB are in use there. "
            "Free space, name another run.dir, or lower checkpoint.keep"
        )


def resolve(path: Path, report: Callable[[str], None] = print) -> Path:
    """A checkpoint from what a user names: a step folder, a checkpoints folder, or a run folder.

    Raises:
        CheckpointError: nothing whole is there.
    """
    if (path / _STATE).is_file():
        verify(path)
        return path
    for root in (path, path / "checkpoints", path / "pretrain" / "checkpoints"):
        found = newest_complete(root, report=report)
        if found is not None:
            return found
    raise CheckpointError(f"{path}: no complete checkpoint here; name a step folder or a run folder")


def load_model_weights(step_dir: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint in fp32 on the CPU, whatever the ZeRO stage; DeepSpeed is not imported.

    Names are those of `model.named_parameters()` and persistent buffers. A tied tensor appears once, under its first
    name: load with `strict=False` where the module registers it twice. Use `resolve` for what a user names, and
    `read_state(step_dir).config["model"]` for the encoder's configuration (vocabulary filled in).

    Raises:
        CheckpointError: the folder is damaged.
    """
    from safetensors.torch import load_file

    verify(step_dir, hashes=False)
    return load_file(step_dir / WEIGHTS)


def _belongs(folder: Path, run_id: str) -> bool:
    try:
        return read_state(folder).run_id == run_id
    except CheckpointError:
        return False


def _remove(folder: Path) -> None:
    """Rename first: a kill in the middle leaves no half folder under a checkpoint's name."""
    doomed = folder.with_name(f"{folder.name}.removed{TEMPORARY}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
