"""Checkpoints to scores to a report. Import as `from eval.tasks import ...`; never bind the name `eval` itself."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eval.suite import run_suite
    from eval.tasks import TASKS

__all__ = ["TASKS", "run_suite"]

_HOME = {"TASKS": "eval.tasks", "run_suite": "eval.suite"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: listing the tasks must not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
