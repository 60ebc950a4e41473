"""Training only those rows of the word table that the training examples use.

A row that no example uses gets no gradient: AdamW's moments for it stay zero and its update is the decay alone. So the table
may be cut down to the rows in use for the time of training, and the others be multiplied by their decay at the end; the
optimizer, the clipping and the gradient then pass over thousands of rows instead of tens of thousands.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import nn

from eval.packing import Encoded
from pretrain.encoder import Encoder


class RowsInUse:
    """Puts a smaller word table into an encoder, until `put_back`.

    Args:
        encoder: changed in place.
        encoded: all examples of the training.

    Attributes:
        encoded: the same examples, with ids that count the rows in use.
    """

    def __init__(self, encoder: Encoder, encoded: Encoded) -> None:
        self._encoder, self._table = encoder, encoder.embeddings.word
        ids = np.unique(encoded.ids)
        self._ids = torch.from_numpy(ids.astype(np.int64))
        rows = self._table.weight.detach()[self._ids.to(self._table.weight.device)]
        encoder.embeddings.word = nn.Embedding.from_pretrained(rows, freeze=False)
        self.encoded = dataclasses.replace(encoded, ids=np.searchsorted(ids, encoded.ids).astype(np.int32))

    def put_back(self, decay: float) -> None:
        """The whole table again, with the trained rows; the others times `decay`, the product of 1 - rate * weight decay
        over all steps."""
        trained = self._encoder.embeddings.word.weight.detach()
        table = self._table.to(trained.device)
        with torch.no_grad():
            table.weight.mul_(decay)
            table.weight[self._ids.to(trained.device)] = trained
        self._encoder.embeddings.word = table
