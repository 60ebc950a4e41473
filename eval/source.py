"""The model under evaluation: a Hugging Face folder, its fingerprint, its tokenizer and fresh copies of its encoder."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import Tokenizer, TokenizerError, import_tokenizer
from eval.tasks import TaskError

if TYPE_CHECKING:
    from pretrain.encoder import Encoder


class ModelSource:
    """A checkpoint folder, read once.

    Args:
        folder: as `pretrain.export` writes it, or any folder of the family that it imports.

    Attributes:
        folder: where it lies.
        fingerprint: sha256 (hex) over configuration and weights.
        tokenizer: of the folder.

    Raises:
        TaskError: no model or no tokenizer there, or one that does not fit the other.
    """

    def __init__(self, folder: Path) -> None:
        from pretrain.hf_config import InterchangeError
        from pretrain.hf_import import import_from_hf

        if not (folder / "config.json").is_file():
            raise TaskError(f"{folder}: no config.json; --model takes a Hugging Face folder, see pretrain.export")
        self.folder = folder
        try:
            self.tokenizer: Tokenizer = import_tokenizer(folder, TokenizerConfig())
        except TokenizerError as error:
            raise TaskError(str(error)) from error
        try:
            self._encoder: Encoder = import_from_hf(folder).model.encoder
        except InterchangeError as error:
            raise TaskError(str(error)) from error
        self.fingerprint = _fingerprint(folder)
        entries = self._encoder.config.vocab_size
        if self.tokenizer.vocab_size > entries:
            raise TaskError(f"{folder}: the tokenizer has {self.tokenizer.vocab_size} entries, the model {entries}")

    @property
    def max_positions(self) -> int:
        """Longest example of the encoder."""
        return self._encoder.config.max_positions

    def encoder(self) -> Encoder:
        """A copy with the checkpoint's weights, to be trained further."""
        return copy.deepcopy(self._encoder)


def _fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    weights = [path for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".bin")]
    for path in (folder / "config.json", *weights):
        digest.update(path.name.encode())
        with open(path, "rb") as handle:
            while chunk := handle.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()
