"""Batches to checkpoints to Hugging Face weights: the encoder, the training step and the runtime."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pretrain.config import TrainConfig, load_config
    from pretrain.encoder import BertForPreTraining
    from pretrain.export import export_to_hf
    from pretrain.model_config import EncoderConfig

__all__ = ["BertForPreTraining", "EncoderConfig", "TrainConfig", "export_to_hf", "load_config"]

_HOME = {
    "BertForPreTraining": "pretrain.encoder",
    "EncoderConfig": "pretrain.model_config",
    "TrainConfig": "pretrain.config",
    "export_to_hf": "pretrain.export",
    "load_config": "pretrain.config",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: reading a configuration must not import torch or DeepSpeed."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
