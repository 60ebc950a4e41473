"""All ranks run the same thing: settings, code, data, libraries and environment compared before anything is built (R41)."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.config import ConfigError
from pretrain.collectives import gather_objects
from pretrain.config import TrainConfig
from pretrain.run_folder import changed_keys, versions

_PACKAGES = ("pretrain", "data_pipeline", "cluster")
_VARIABLES = ("DS_ACCELERATOR", "TRITON_INTERPRET", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Of the environment, what changes which code or arithmetic a rank uses. DeepSpeed's launcher over pdsh (0.19.8) hands on only
names that begin as MLFLOW, PYTHON, NCCL, UCX, MV2 do, so the other nodes may lack what the first one has."""
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one rank is about to run."""

    host: str
    config: dict[str, Any]
    code: str
    """sha256 of our source files."""
    vocabulary: str
    data: str
    versions: dict[str, str]
    environment: dict[str, str]
    """`_VARIABLES` that are set."""


def code_fingerprint(root: Path = _ROOT) -> str:
    """sha256 over the names and bytes of this program's Python files: it also sees what no commit holds."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def require_agreement(config: TrainConfig, *, vocabulary: str, data: str) -> None:
    """Compare this rank's settings, code, vocabulary, data, libraries and environment with rank 0's; every rank calls this.

    Raises:
        ConfigError: on every rank, naming the first rank that differs and in what.
    """

    mine = Facts(
        host=socket.gethostname(),
        config=config.as_tree(),
        code=code_fingerprint(),
        vocabulary=vocabulary,
        data=data,
        versions=versions(),
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
    )
    problem = first_difference(gather_objects(mine))
    if problem:
        raise ConfigError(problem)


def first_difference(ranks: Sequence[Facts]) -> str:
    """What the first rank that differs from rank 0 has otherwise; empty where all agree."""
    first = ranks[0]
    for rank, other in enumerate(ranks):
        lines = changed_keys(first.config, other.config, live=())
        lines += [
            f"{name}: {getattr(first, name)[:12]} -> {getattr(other, name)[:12]}"
            for name in ("code", "vocabulary", "data")
            if getattr(first, name) != getattr(other, name)
        ]
        for kind in ("versions", "environment"):
            lines += changed_keys({kind: getattr(first, kind)}, {kind: getattr(other, kind)}, live=())
        if lines:
            changes = "\n".join(f"  {line}" for line in lines)
            return (
                f"rank {rank} on {other.host} does not run what rank 0 on {first.host} runs:\n{changes}\n"
                "give every node the same code, environment and data, and every rank the same command line"
            )
    return ""
