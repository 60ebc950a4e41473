"""What all ranks do together, beside training itself; the process group has been joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def all_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, in place."""
    dist.all_reduce(values)
    return values


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier()


def gather_objects(value: Any) -> list[Any]:
    """`value` of every rank, in the order of ranks, on every rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def broadcast_object(value: Any) -> Any:
    """Rank 0's `value` on every rank."""
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def on_rank_zero(action: Callable[[], T]) -> T:
    """Rank 0's result of `action`, or its error, on every rank: none goes on alone, none waits for one that failed."""
    outcome: tuple[Any, Exception | None] = (None, None)
    if dist.get_rank() == 0:
        try:
            outcome = (action(), None)
        except Exception as error:  # noqa: BLE001 - raised again below, on every rank
            outcome = (None, error)
    result, failure = broadcast_object(outcome)
    if failure is not None:
        raise failure
    return result


def on_every_rank(action: Callable[[], None]) -> None:
    """Run `action` on every rank; where one fails, its error is raised on all, with the rank in front."""
    failure: Exception | None = None
    try:
        action()
    except Exception as error:  # noqa: BLE001 - raised again below, on every rank
        failure = error
    for rank, found in enumerate(gather_objects(failure)):
        if found is not None:
            raise type(found)(f"rank {rank}: {found}")
