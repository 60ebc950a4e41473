"""The model under evaluation: a Hugging Face folder or a checkpoint of ours, its fingerprint, its tokenizer and fresh copies
of its encoder."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.config import ConfigError, TokenizerConfig, validate
from data_pipeline.tokenizer import Tokenizer, TokenizerError, import_tokenizer, load_tokenizer
from eval.tasks import TaskError

if TYPE_CHECKING:
    from pretrain.encoder import Encoder


class ModelSource:
    """A model's folder, read once.

    Args:
        folder: as `pretrain.export` writes it, or any Hugging Face folder of the family that it imports; or a run folder or
            a checkpoint of ours, which serves encoders that have no Hugging Face architecture too.
        tokenizer: of a checkpoint, where it is not below the `data.dir` that the run was trained with.
        bilstm: layers of a new bidirectional LSTM on top of the encoder (arXiv 1810.04805, section 5.1).

    Attributes:
        folder: where it lies; the step's folder of a run.
        fingerprint: sha256 (hex) over configuration and weights.
        tokenizer: of the model.
        bilstm: as given.

    Raises:
        TaskError: no model or no tokenizer there, or one that does not fit the other.
    """

    def __init__(self, folder: Path, *, tokenizer: Path | None = None, bilstm: int = 0) -> None:
        from pretrain.hf_config import InterchangeError

        self.folder, self.bilstm = folder, bilstm
        self.tokenizer: Tokenizer
        self._encoder: Encoder
        try:
            if (folder / "config.json").is_file():
                self._read_hugging_face()
            else:
                self._read_checkpoint(tokenizer)
        except (TokenizerError, InterchangeError) as error:
            raise TaskError(str(error)) from error
        if bilstm:
            self._encoder = _with_bilstm(self._encoder, bilstm)
        entries = self._encoder.config.vocab_size
        if self.tokenizer.vocab_size > entries:
            raise TaskError(f"{folder}: the tokenizer has {self.tokenizer.vocab_size} entries, the model {entries}")

    def _read_hugging_face(self) -> None:
        from pretrain.hf_import import folder_fingerprint, import_from_hf

        self.tokenizer = import_tokenizer(self.folder, TokenizerConfig())
        self._encoder = import_from_hf(self.folder).model.encoder
        self.fingerprint = folder_fingerprint(self.folder)

    def _read_checkpoint(self, tokenizer: Path | None) -> None:
        from pretrain.checkpoint import WEIGHTS, CheckpointError, resolve
        from pretrain.export import load_checkpoint_model
        from pretrain.hf_import import files_fingerprint

        try:
            self.folder = resolve(self.folder)
            model, state = load_checkpoint_model(self.folder)
        except (CheckpointError, ConfigError) as error:
            raise TaskError(
                f"{self.folder}: no config.json; --model takes a Hugging Face folder, see pretrain.export, or a run folder "
                f"or checkpoint of ours ({error})"
            ) from error
        self._encoder = model.encoder
        self.tokenizer = load_tokenizer(tokenizer or Path(state.config["data"]["dir"]) / "tokenizer")
        if self.tokenizer.fingerprint != state.tokenizer:
            raise TaskError(f"{self.folder}: trained with another vocabulary; name the right one with --tokenizer")
        settings = json.dumps(state.config["model"], sort_keys=True)
        self.fingerprint = files_fingerprint([self.folder / WEIGHTS], settings)

    @property
    def max_positions(self) -> int:
        """Longest example of the encoder."""
        return self._encoder.config.max_positions

    def encoder(self, seed: int = 0) -> Encoder:
        """A copy with the checkpoint's weights, to be trained further; the seed draws those of a new BiLSTM."""
        encoder = copy.deepcopy(self._encoder)
        if self.bilstm and encoder.bilstm is not None:
            import torch

            torch.manual_seed(seed)
            encoder.bilstm.reset_parameters()
        return encoder


def _with_bilstm(encoder: Encoder, layers: int) -> Encoder:
    from pretrain.encoder import Encoder as EncoderClass
    from pretrain.model_config import EncoderConfig

    if encoder.config.bilstm:
        raise TaskError(f"--bilstm {layers}: the model has a BiLSTM of {encoder.config.bilstm} layers already")
    # The pooler is named: where there is none yet, there is none now either.
    table = encoder.config.model_dump() | {"bilstm": layers, "pooler": encoder.pooler is not None}
    larger = EncoderClass(validate(EncoderConfig, table, "--bilstm"))
    new = {name: tensor for name, tensor in larger.state_dict().items() if name.startswith("bilstm.")}
    larger.load_state_dict(encoder.state_dict() | new)
    return larger
