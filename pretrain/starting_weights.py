"""What a run's weights are at step 0: random ones, those of a Hugging Face folder (`model.init_from`), or a teacher's.

And what it minimises: the ordinary loss, or the one against a teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from data_pipeline.config import ConfigError
from data_pipeline.tokenizer import TokenizerError, load_tokenizer
from pretrain.config import TrainConfig
from pretrain.distillation import DistillationObjective, load_teacher, start_student
from pretrain.encoder import BertForPreTraining
from pretrain.hf_config import InterchangeError
from pretrain.hf_import import check_tokens, start_from
from pretrain.kernels import choose_kernels


def starting_model(config: TrainConfig, *, fresh: bool, say: Callable[[str], None]) -> BertForPreTraining:
    """The model of a run at step 0, drawn from torch's generator where no folder gives its weights.

    Args:
        config: with the vocabulary filled in.
        fresh: no checkpoint will be loaded over the weights; false reads no folder.
        say: told what was read.

    Raises:
        ConfigError: the folder cannot be read, is of another shape, or has another vocabulary than the data; or the
            kernels that are asked for do not run here.
    """
    choose_kernels(config.model.kernels, "cuda" if torch.cuda.is_available() else "cpu")
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


def teaching_objective(
    model: BertForPreTraining, config: TrainConfig, *, fresh: bool, say: Callable[[str], None]
) -> DistillationObjective | None:
    """The loss against the teacher of `[distillation]`, None without the table; a fresh student gets its weights.

    Args:
        model: the student.
        config, fresh, say: as for `starting_model`.

    Raises:
        ConfigError: teacher and student do not fit together.
    """
    table = config.distillation
    if table is None:
        return None
    try:
        teacher = load_teacher(table, model, _tokens(config))
        objective = DistillationObjective(model, teacher, table)
        if fresh and table.start_from_teacher:
            lacking = start_student(model, teacher)
            rest = f"; random: {', '.join(lacking)}" if lacking else ""
            say(f"student of {model.config.layers} layers from the {teacher.config.layers} of {table.teacher}{rest}")
    except InterchangeError as error:
        raise ConfigError(f"[distillation]: {error}") from error
    return objective


def _tokens(config: TrainConfig) -> list[str]:
    folder = Path(config.data.dir) / "tokenizer"
    try:
        return load_tokenizer(folder).tokens
    except TokenizerError as error:
        raise ConfigError(f"{error} (its vocabulary is compared with that of the weights)") from error
