"""`srun --ntasks-per-node=1 python -m cluster.preflight --config F`: what differs or is missing, before hours are queued.

Every node writes down what it sees into the run folder; the first one compares. Checked: same code, configuration and Python on
every node; room and write access in the run folder; clocks; the shards of the data against the hashes of their index.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.job import JobError
from cluster.submission import run_dir
from cluster.world import World, WorldError, current_world

PACKAGES = ("cluster", "data_pipeline", "pretrain", "eval")
CLOCK_SECONDS = 5.0
"""Clocks may differ by this much: more confuses make-like tools, logs and certificates."""
WAIT_SECONDS = 600.0
"""The first node waits this long for the others; hashing terabytes of shards takes its time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What one node sees."""

    node: str
    code: str
    config: str
    python: str
    clock_offset: float
    """This node's clock less that of the file server, in seconds."""
    free_gib: float
    problems: tuple[str, ...]
    """What is wrong with this node's share of the data."""


def code_hash(root: Path) -> str:
    """SHA-256 over names and contents of the packages' Python files below `root`."""
    digest = hashlib.sha256()
    for file in sorted(file for package in PACKAGES for file in (root / package).rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def shard_problems(data: Path, rank: int, size: int) -> list[str]:
    """Shards of this rank's share that are missing or whose size or hash is not what index.json says."""
    problems = []
    for part in ("train", "validation"):
        index = data / part / "index.json"
        try:
            shards = json.loads(index.read_text(encoding="utf-8"))["shards"]
        except (OSError, ValueError, KeyError) as error:
            problems.append(f"{index}: cannot be read ({error}); build the data first")
            continue
        for shard in shards[rank::size]:
            file = data / part / shard["name"]
            if not file.is_file():
                problems.append(f"{file}: missing")
            elif file.stat().st_size != shard["bytes"]:
                problems.append(f"{file}: {file.stat().st_size} bytes, expected {shard['bytes']}")
            else:
                with file.open("rb") as stream:
                    found = hashlib.file_digest(stream, "sha256").hexdigest()
                if found != shard["sha256"]:
                    problems.append(f"{file}: SHA-256 is {found}, expected {shard['sha256']}")
    return problems


def compare(facts: Sequence[Facts], *, min_free_gib: float) -> list[str]:
    """What is wrong between and on the nodes, one line each; empty when all is well."""
    problems = [f"{one.node}: {problem}" for one in facts for problem in one.problems]
    for key, name in (("code", "code"), ("config", "configuration"), ("python", "Python")):
        seen: dict[str, list[str]] = {}
        for one in facts:
            seen.setdefault(getattr(one, key), []).append(one.node)
        if len(seen) > 1:
            groups = "; ".join(f"{value[:12]} on {', '.join(nodes)}" for value, nodes in seen.items())
            problems.append(f"the {name} differs: {groups}")
    first, last = min(facts, key=lambda one: one.clock_offset), max(facts, key=lambda one: one.clock_offset)
    if last.clock_offset - first.clock_offset > CLOCK_SECONDS:
        skew = last.clock_offset - first.clock_offset
        problems.append(
            f"the clock of {last.node} is {skew:.1f} s ahead of {first.node}'s; allowed: {CLOCK_SECONDS:g} s"
        )
    problems += [
        f"{one.node}: {one.free_gib:.1f} GiB free for the run folder, expected {min_free_gib:g}"
        for one in facts
        if one.free_gib < min_free_gib
    ]
    return problems


def look(world: World, config: Path, overrides: Sequence[str], folder: Path) -> Facts:
    """This node's facts; writes a small file into `folder` to try it out."""
    probe = folder / f"probe-{world.rank}"
    before = time.time()
    probe.write_text("probe")
    offset = (before + time.time()) / 2 - probe.stat().st_mtime
    probe.unlink()
    text = config.read_text(encoding="utf-8")
    data = tomllib.loads(text).get("data", {}).get("dir", "")
    for override in overrides:
        key, _, value = override.partition("=")
        if key.strip() == "data.dir":
            data = value.strip().strip("\"'")
    return Facts(
        node=os.environ.get("SLURMD_NODENAME", platform.node()),
        code=code_hash(Path(__file__).resolve().parent.parent),
        config=hashlib.sha256("\0".join([text, *overrides]).encode()).hexdigest(),
        python=f"{platform.python_version()} {sys.executable}",
        clock_offset=offset,
        free_gib=shutil.disk_usage(folder).free / 2**30,
        problems=tuple(shard_problems(Path(data), world.rank, world.size)),
    )


def gather(world: World, facts: Facts, folder: Path) -> list[Facts]:
    """Leave this node's facts in the folder; rank 0 waits for all of them and returns them, the others return none.

    Raises:
        WorldError: a node did not answer in time.
    """
    file = folder / f"facts-{world.rank}.json"
    file.with_suffix(".tmp").write_text(json.dumps(asdict(facts)))
    file.with_suffix(".tmp").rename(file)
    if world.rank:
        return []
    until, files = time.monotonic() + WAIT_SECONDS, [folder / f"facts-{rank}.json" for rank in range(world.size)]
    while not all(file.exists() for file in files):
        if time.monotonic() > until:
            silent = [rank for rank, file in enumerate(files) if not file.exists()]
            raise WorldError(f"no answer from node {silent} in {folder}: is it on a file system that all nodes share?")
        time.sleep(0.2)
    return [_facts(json.loads(file.read_text())) for file in files]


def _facts(values: Mapping[str, object]) -> Facts:
    return Facts(**{**values, "problems": tuple(values["problems"])})  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0, 1 with the problems, or 2 with one message."""
    parser = argparse.ArgumentParser(prog="python -m cluster.preflight", description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, type=Path, help="TOML file, see configs/")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="TABLE.KEY=VALUE")
    parser.add_argument("--min-free-gib", type=float, default=50, help="room for checkpoints (default: 50)")
    options = parser.parse_args(arguments)
    try:
        world = current_world()
        job = os.environ.get("SLURM_JOB_ID", str(os.getpid())) + "-" + os.environ.get("SLURM_STEP_ID", "0")
        folder = Path(run_dir(options.config, options.overrides)) / "cluster" / f"preflight-{job}"
        folder.mkdir(parents=True, exist_ok=True)
        facts = gather(world, look(world, options.config, options.overrides, folder), folder)
    except (JobError, WorldError, OSError) as error:
        print(f"preflight: {error}", file=sys.stderr)
        return 2
    if world.rank:
        return 0
    shutil.rmtree(folder, ignore_errors=True)
    problems = compare(facts, min_free_gib=options.min_free_gib)
    for problem in problems:
        print(f"preflight: {problem}", file=sys.stderr)
    if not problems:
        print(f"preflight: {world.size} node(s) agree, the data is complete, {facts[0].free_gib:,.0f} GiB free")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
