"""Text to shards to batches: the offline data pipeline and the deterministic loader."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_pipeline.loader import build_loader
    from data_pipeline.records import Batch, Document
    from data_pipeline.tokenizer import Tokenizer

__all__ = ["Batch", "Document", "Tokenizer", "build_loader"]

_HOME = {
    "Batch": "data_pipeline.records",
    "Document": "data_pipeline.records",
    "Tokenizer": "data_pipeline.tokenizer",
    "build_loader": "data_pipeline.loader",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that building shards never imports torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
