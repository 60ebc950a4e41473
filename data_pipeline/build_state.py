"""What a build folder remembers: the settings of each stage, and who is building in it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_pipeline.artefacts import write_text
from data_pipeline.config import ConfigError

SETTINGS_NAME = "build.json"
_ORPHAN_SECONDS = 10.0


class BuildError(ValueError):
    """A build that cannot go on; the message says why and what to do."""


def claim_stage(data_dir: Path, stage: str, settings: Mapping[str, Any], folders: tuple[str, ...]) -> None:
    """Note the settings of a stage before it writes, or refuse when its folders hold the output of other settings.

    Args:
        data_dir: the build's folder.
        stage: its name in `build.json`.
        settings: everything that decides the stage's output.
        folders: of `data_dir`, what the stage writes.

    Raises:
        ConfigError: names the first setting that differs and the folders to remove.
    """
    path = data_dir / SETTINGS_NAME
    known: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    wanted = json.loads(json.dumps(settings))
    occupied = [str(data_dir / folder) for folder in folders if (data_dir / folder).exists()]
    if occupied and stage not in known:
        raise ConfigError(
            f"{', '.join(occupied)}: exists, and {path} does not say how it was made; "
            "remove it, or choose another data.dir"
        )
    if occupied and known[stage] != wanted:
        key, old, new = _first_difference(known[stage], wanted, "")
        raise ConfigError(
            f"{', '.join(occupied)}: made with {key} = {old}, now it is {new}; "
            "remove what is there to build it again (earlier stages are reused), or choose another data.dir"
        )
    if known.get(stage) != wanted:
        write_text(path, json.dumps(known | {stage: wanted}, indent=1, sort_keys=True) + "\n")


def require_stage(data_dir: Path, stage: str, settings: Mapping[str, Any]) -> None:
    """Check that a stage of another build was made with these settings.

    Raises:
        ConfigError: it was not, or that build never began the stage; names the first setting that differs.
    """
    path = data_dir / SETTINGS_NAME
    known: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    if stage not in known:
        raise ConfigError(f"data.tokens_from: {data_dir} holds no finished build; build it first")
    wanted = json.loads(json.dumps(settings))
    if known[stage] != wanted:
        key, there, here = _first_difference(known[stage], wanted, stage)
        if key.startswith(f"{stage}.corpus"):  # the stage depends on another table
            key = key.removeprefix(f"{stage}.")
        raise ConfigError(
            f"data.tokens_from: {data_dir} was made with {key} = {there}, here it is {here}; make them the same, or leave "
            "data.tokens_from empty"
        )


def _first_difference(old: Any, new: Any, name: str) -> tuple[str, str, str]:
    """Name of the first setting that differs, its two values as JSON."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                return _first_difference(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    return name, _short(old), _short(new)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextmanager
def build_lock(data_dir: Path) -> Iterator[None]:
    """Hold the folder for one build, and wait for the workers of a killed one to end.

    Raises:
        BuildError: another build is running in the folder.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    with open(data_dir / ".build.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BuildError(f"{data_dir}: another build is running in this folder; wait for it or end it") from error
        with worker_lock_file(data_dir).open("w") as workers:
            deadline = time.monotonic() + _ORPHAN_SECONDS
            while not _try_lock(workers.fileno()):
                if time.monotonic() > deadline:
                    raise BuildError(f"{data_dir}: workers of an earlier build are still writing; end them first")
                time.sleep(0.1)
        yield


def worker_lock_file(data_dir: Path) -> Path:
    """The file that every running task holds a shared lock on."""
    return data_dir / ".workers.lock"


@contextmanager
def worker_lock(data_dir: Path) -> Iterator[None]:
    """Held by a task while it writes."""
    with worker_lock_file(data_dir).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def remove_leftovers(folder: Path) -> None:
    """Temporary files of a killed build; nobody writes in the folder while the lock is held."""
    if folder.is_dir():
        for entry in os.scandir(folder):
            if entry.name.startswith(".") and entry.name.endswith(".tmp"):
                os.unlink(entry.path)


def settle_tasks(folder: Path, wanted: dict[str, int], complete: bool) -> dict[str, int]:
    """How stage 1 is divided: as noted when it began; an unfinished one that was divided otherwise starts afresh.

    Args:
        folder: of stage 1.
        wanted: what this run asks for: `tasks`, and groups of each split.
        complete: stage 1 is finished.
    """
    note = folder / "tasks.json"
    if note.exists():
        noted = json.loads(note.read_bytes())
        if complete or noted == wanted:
            return noted
        aside = folder.with_name(f".{folder.name}.old")  # moved first: a kill never leaves half of it in place
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        shutil.rmtree(aside)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(note, json.dumps(wanted) + "\n")
    return wanted
