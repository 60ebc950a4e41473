"""What a run's weights are at step 0: random ones, those of a Hugging Face folder (`model.init_from`), or a teacher's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data_pipeline.config import ConfigError
from data_pipeline.tokenizer import TokenizerError, load_tokenizer
from pretrain.config import TrainConfig
from pretrain.encoder import BertForPreTraining
from pretrain.hf_config import InterchangeError
from pretrain.hf_import import check_tokens, start_from


def starting_model(config: TrainConfig, *, fresh: bool, say: Callable[[str], None]) -> BertForPreTraining:
    """The model of a run at step 0, drawn from torch's generator where no folder gives its weights.

    Args:
        config: with the vocabulary filled in.
        fresh: no checkpoint will be loaded over the weights; false reads no folder.
        say: told what was read.

    Raises:
        ConfigError: the folder cannot be read, is of another shape, or has another vocabulary than the data.
    """
    model = BertForPreTraining(config.model)
    source = config.model.init_from
    if not source or not fresh:
        return model
    try:
        check_tokens(source, _tokens(config))
        lacking = start_from(model, source)
    except InterchangeError as error:
        raise ConfigError(f"key 'model.init_from': {error}") from error
    rest = f"; random: {', '.join(lacking)}" if lacking else ""
    say(f"weights from {source}{rest}")
    return model


def _tokens(config: TrainConfig) -> list[str]:
    folder = Path(config.data.dir) / "tokenizer"
    try:
        return load_tokenizer(folder).tokens
    except TokenizerError as error:
        raise ConfigError(f"{error} (its vocabulary is compared with that of the weights)") from error
