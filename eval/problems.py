"""What the fine-tuning loop trains on: encoded examples with their targets and their loss, one class per kind of head.

A *unit* is what a batch counts and a metric scores (an example, a question, a sentence); it has one or more *rows* of
flat tokens. Legend: `U` units of a batch, `E` rows, `T` tokens, `K` outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from eval.packing import Encoded, ranges


class Problem(Protocol):
    """Encoded examples with targets.

    Attributes:
        encoded: all rows.
        outputs: K, what the head must have.
        per_token: whether the head answers for every token.
    """

    encoded: Encoded
    outputs: int
    per_token: bool

    def __len__(self) -> int:
        """Number of units."""

    def rows(self, units: np.ndarray) -> np.ndarray:
        """Rows of these units, unit by unit."""

    def loss(self, logits: torch.Tensor, units: np.ndarray) -> torch.Tensor:
        """Scalar mean loss of these units, whose rows gave the logits."""


@dataclass(kw_only=True)
class RowPerUnit:
    """What problems have in common whose units are rows: an example, a window, a sentence with its neighbours."""

    encoded: Encoded

    def __len__(self) -> int:
        return len(self.encoded)

    def rows(self, units: np.ndarray) -> np.ndarray:
        """A unit is a row."""
        return units


@dataclass(kw_only=True)
class ClassProblem(RowPerUnit):
    """One label for each row.

    Attributes:
        labels: (E,) int64, or None where there are none (prediction only).
        outputs: number of labels.
    """

    labels: np.ndarray | None
    outputs: int
    per_token: bool = False

    def loss(self, logits: torch.Tensor, units: np.ndarray) -> torch.Tensor:
        """Mean cross entropy."""
        return F.cross_entropy(logits, targets(self.labels, units).to(logits.device))


@dataclass(kw_only=True)
class RegressionProblem(RowPerUnit):
    """One score for each row.

    Attributes:
        labels: (E,) float64, or None.
    """

    labels: np.ndarray | None
    outputs: int = 1
    per_token: bool = False

    def loss(self, logits: torch.Tensor, units: np.ndarray) -> torch.Tensor:
        """Mean squared error: (E, 1) logits against (E,) scores, never broadcast against each other (R32)."""
        return F.mse_loss(logits[:, 0], targets(self.labels, units).to(logits.device, logits.dtype))


@dataclass(kw_only=True)
class ChoiceProblem:
    """One right answer among `choices` rows (SWAG: arXiv 1810.04805, section 4.4).

    Attributes:
        encoded: `choices` consecutive rows for each unit.
        labels: (U,) int64, or None.
    """

    encoded: Encoded
    labels: np.ndarray | None
    choices: int
    outputs: int = 1
    per_token: bool = False

    def __len__(self) -> int:
        return len(self.encoded) // self.choices

    def rows(self, units: np.ndarray) -> np.ndarray:
        """The rows of all choices."""
        return (units[:, None] * self.choices + np.arange(self.choices)).reshape(-1)

    def loss(self, logits: torch.Tensor, units: np.ndarray) -> torch.Tensor:
        """Mean cross entropy over the choices of each unit."""
        return F.cross_entropy(logits.view(-1, self.choices), targets(self.labels, units).to(logits.device))


@dataclass(kw_only=True)
class SpanProblem(RowPerUnit):
    """Start and end of an answer in each window (arXiv 1810.04805, sections 4.2 and 4.3).

    Attributes:
        starts, ends: (E,) int64, token positions counted from the window's start; 0 (`[CLS]`) for no answer. Or None.
    """

    starts: np.ndarray | None
    ends: np.ndarray | None
    outputs: int = 2
    per_token: bool = True

    def loss(self, logits: torch.Tensor, units: np.ndarray) -> torch.Tensor:
        """Mean over start and end of the cross entropy over the window's tokens."""
        lengths = self.encoded.lengths[units]
        places = torch.from_numpy(np.repeat(np.arange(len(units)), lengths) * int(lengths.max())) + torch.from_numpy(
            ranges(np.zeros_like(lengths), lengths)
        )
        padded = logits.new_full((len(units) * int(lengths.max()), 2), float("-inf"))
        padded = padded.index_copy(0, places.to(logits.device), logits).view(len(units), -1, 2)
        start = F.cross_entropy(padded[:, :, 0], targets(self.starts, units).to(logits.device))
        end = F.cross_entropy(padded[:, :, 1], targets(self.ends, units).to(logits.device))
        return (start + end) / 2


@dataclass(kw_only=True)
class TagProblem(RowPerUnit):
    """A label for the first piece of each word (arXiv 1810.04805, section 5.3).

    Attributes:
        tags: (N,) int64 for every id of `encoded`, -1 where no prediction is asked for (later pieces, specials).
    """

    tags: np.ndarray
    outputs: int
    per_token: bool = True

    def loss(self, logits: torch.Tensor, units: np.ndarray) -> torch.Tensor:
        """Mean cross entropy over the tagged tokens of the batch."""
        tokens = ranges(self.encoded.offsets[units], self.encoded.lengths[units])
        return F.cross_entropy(logits, torch.from_numpy(self.tags[tokens]).to(logits.device), ignore_index=-1)


def targets(labels: np.ndarray | None, units: np.ndarray) -> torch.Tensor:
    """The labels of these units as a tensor.

    Raises:
        ValueError: the problem has no labels.
    """
    if labels is None:
        raise ValueError("these examples have no labels: they can be predicted, not trained on")
    return torch.from_numpy(labels[units])
