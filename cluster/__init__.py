"""Where it runs: the world of ranks, Slurm job text, submission."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.submission import submit
    from cluster.world import World, current_world

__all__ = ["World", "current_world", "submit"]

_HOME = {"World": "cluster.world", "current_world": "cluster.world", "submit": "cluster.submission"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `python -m cluster.hostfile` and the ranks need none of the others.

    The function `submit` lives in submission.py and not in submit.py: a submodule's name would hide it here.
    """
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
