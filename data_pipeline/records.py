"""The records that pass between stages: a document, a block of examples, a batch of flat tokens.

Legend: `E` examples, `N` tokens of a block, `M` mask sets, `P` predictions, `T` tokens of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
from datatrove.data import Document

if TYPE_CHECKING:
    import torch

__all__ = ["Batch", "Block", "Document"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A few hundred examples as integer columns: one member of a shard. Specified in docs/data-format.md.

    Attributes:
        input_ids: (N,) uint16 or uint32, clean ids of all examples end to end, structural specials included.
        lengths: (E,) uint16, ids of each example; they sum to N.
        segment_a_lengths: (E,) uint16, leading ids with segment id 0 (`[CLS] A [SEP]`); the rest has 1.
        nsp_labels: (E,) int8, 0 the second part continues the first, 1 it does not, -1 no sentence objective.
        mask_counts: (M, E) uint16, predictions of each example in each mask set; M may be 0 (dynamic masking).
        mask_positions: (P,) uint16, predicted positions counted from the example's start, ascending within an
            example; all examples of set 0, then all of set 1, and so on.
        mask_inputs: (P,) dtype of `input_ids`, what the encoder sees there: the mask id, a random id or the same id.
    """

    input_ids: np.ndarray
    lengths: np.ndarray
    segment_a_lengths: np.ndarray
    nsp_labels: np.ndarray
    mask_counts: np.ndarray
    mask_positions: np.ndarray
    mask_inputs: np.ndarray

    @property
    def examples(self) -> int:
        """Number of examples E."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Number of ids N, structural specials included."""
        return len(self.input_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Examples as flat, unpadded tokens: the only contract between the pipeline and the encoder.

    Attributes:
        input_ids_T: int64, ids as the encoder sees them (masks applied).
        segment_ids_T: int64, 0 or 1.
        position_ids_T: int64, counted from each example's start.
        cu_seqlens: (E+1,) int32, `cu_seqlens[i]:cu_seqlens[i+1]` are example i's tokens.
        max_seqlen: length of the longest example.
        mask_positions_P: int64, indices into T of the predicted tokens, ascending.
        mask_labels_P: int64, their true ids.
        cls_positions_E: int64, indices into T of each example's first token.
        nsp_labels_E: int64, 0, 1 or -1 (no sentence objective).
    """

    input_ids_T: torch.Tensor
    segment_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    mask_positions_P: torch.Tensor
    mask_labels_P: torch.Tensor
    cls_positions_E: torch.Tensor
    nsp_labels_E: torch.Tensor

    @property
    def examples(self) -> int:
        """Number of examples E."""
        return len(self.cls_positions_E)

    @property
    def tokens(self) -> int:
        """Number of real tokens T; there is no padding."""
        return len(self.input_ids_T)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch with every tensor on `device`."""
        moved = {
            field.name: getattr(self, field.name).to(device, non_blocking=non_blocking)
            for field in fields(self)
            if field.name != "max_seqlen"
        }
        return replace(self, **moved)
