"""What DeepSpeed hands over to be written in a checkpoint: written at once, or copied and written later by a thread.

DeepSpeed's own decoupled writer (0.19.8, runtime/checkpoint_engine/decoupled_checkpoint_engine.py) was looked at first: it
waits for its files before the very next update, so it hides no more than one forward and backward pass, gives up after
five minutes, and needs the asynchronous I/O extension compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pretrain.host_copy import HostCopies


class HeldFiles:
    """Stands in for the checkpoint engine of a DeepSpeed engine, whose other calls it passes on.

    Args:
        trainer: DeepSpeed's engine; its `checkpoint_engine` is replaced, and so is the copying of its recovery scripts.

    Attributes:
        copies: where states are copied to, to be written later; None writes them at once.
    """

    def __init__(self, trainer: Any) -> None:
        self.copies: HostCopies | None = None
        self._writer, scripts = trainer.checkpoint_engine, trainer._copy_recovery_script
        self._left: list[Callable[[], Any]] = []
        trainer.checkpoint_engine = self
        trainer._copy_recovery_script = lambda path: self._left.append(partial(scripts, path))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def save(self, state_dict: Any, path: str) -> None:
        """Write or copy; an error is kept for `take`, because the other ranks go on into a collective."""
        if self.copies is not None:
            self._left.append(partial(self._writer.save, self.copies.tree(state_dict), path))
            return
        try:
            self._writer.save(state_dict, path)
        except Exception as error:  # noqa: BLE001 - raised by what `take` returns
            self._left.append(partial(_raise, error))

    def take(self) -> Callable[[], None]:
        """A function that does what is left since the last call: writes, or raises what went wrong."""
        left, self._left = self._left, []

        def finish() -> None:
            for action in left:
                action()

        return finish


def _raise(error: Exception) -> None:
    raise error
