"""Reading a Hugging Face folder into the encoder."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import TokenizerError, import_tokenizer
from pretrain.encoder import BertForPreTraining
from pretrain.hf_config import InterchangeError, from_hf_config
from pretrain.model_config import EncoderConfig
from pretrain.name_map import NAMES, current_names, from_hf_tensors


class ImportedModel(NamedTuple):
    """What a folder held.

    Attributes:
        config: the encoder; `pooler` and `sentence_objective` say what the weights had.
        model: in evaluation mode, fp32, on the CPU.
        missing: our tensors that the folder lacks (a whole head, say); they hold their random start.
        unused: tensors of the folder that have no place here.
    """

    config: EncoderConfig
    model: BertForPreTraining
    missing: list[str]
    unused: list[str]


def import_from_hf(directory: str | Path, **overrides: Any) -> ImportedModel:
    """Read config.json and the weights of a BERT, RoBERTa, ALBERT, DistilBERT or ModernBERT folder.

    Args:
        directory: holds config.json and model.safetensors, whole or in parts, or pytorch_model.bin.
        overrides: fields of `EncoderConfig` to set instead of what the folder says, dropout for example; `bilstm=1` puts
            a new LSTM on top, which no folder holds (the paper's LTR + BiLSTM ablation).

    Raises:
        InterchangeError: a file is missing or damaged, the model is of another kind, tensors of the encoder itself are
            missing, or shapes differ from config.json.
    """
    directory = Path(directory)
    content = _read_config(directory / "config.json")
    config = from_hf_config(content, str(directory / "config.json"))
    tensors = current_names(_read_weights(directory), config.architecture)
    table = NAMES[config.architecture]
    present = {ours: f"{theirs[0]}.weight" in tensors for ours, theirs in table.heads}
    poolers = [f"{table.prefix}.{theirs[0]}.weight" for ours, theirs in table.encoder if ours == "encoder.pooler"]
    seen = {
        "pooler": any(name in tensors for name in poolers),
        "sentence_objective": "none",
    }
    if present.get("sentence_head.classifier") and seen["pooler"] and not config.causal:
        seen["sentence_objective"] = "sop" if config.architecture == "albert" else "nsp"
    config = EncoderConfig.model_validate({**config.model_dump(), **seen, **overrides})
    model = BertForPreTraining(config)
    own = model.state_dict()
    on_top = [name for name in own if name.startswith("encoder.bilstm.")]
    held = {name: tensor for name, tensor in own.items() if name not in on_top}
    try:
        state, missing, unused = from_hf_tensors(tensors, held, config)
    except ValueError as error:
        raise InterchangeError(f"{directory}: {error}") from error
    lost = [name for name in missing if name.startswith("encoder.") and not name.startswith("encoder.pooler")]
    if lost:
        raise InterchangeError(f"{directory}: the weights lack {', '.join(lost)}")
    model.load_state_dict({**own, **state})
    return ImportedModel(config, model.float().eval(), missing + on_top, unused)


def folder_fingerprint(directory: Path) -> str:
    """sha256 (hex) over a Hugging Face folder's configuration and weights: what a score names its model by."""
    weights = [path for path in sorted(directory.iterdir()) if path.suffix in (".safetensors", ".bin")]
    return files_fingerprint([directory / "config.json", *weights])


def files_fingerprint(paths: Sequence[Path], settings: str = "") -> str:
    """sha256 (hex) over a text and the names and contents of files."""
    digest = hashlib.sha256(settings.encode())
    for path in paths:
        digest.update(path.name.encode())
        with open(path, "rb") as handle:
            while chunk := handle.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InterchangeError(f"{path}: cannot be read ({error.strerror}); expected a Hugging Face folder") from error
    except ValueError as error:
        raise InterchangeError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise InterchangeError(f"{path}: expected a JSON object")
    return content


def _read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """All floating tensors as fp32; a .bin is unpickled with nothing but tensors allowed."""
    try:
        if (directory / "model.safetensors").is_file():
            tensors = load_file(directory / "model.safetensors")
        elif (index := directory / "model.safetensors.index.json").is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            tensors = {name: tensor for part in names for name, tensor in load_file(directory / part).items()}
        elif (directory / "pytorch_model.bin").is_file():
            tensors = torch.load(directory / "pytorch_model.bin", map_location="cpu", weights_only=True)
        else:
            raise InterchangeError(f"{directory}: expected model.safetensors or pytorch_model.bin")
    except (SafetensorError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        if isinstance(error, InterchangeError):
            raise
        raise InterchangeError(f"{directory}: the weights cannot be read ({error})") from error
    except pickle.UnpicklingError as error:
        raise InterchangeError(
            f"{directory}/pytorch_model.bin: holds more than tensors and is not unpickled; convert it to safetensors"
        ) from error
    # Integer tensors are buffers (position ids in old files).
    return {name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()}


def check_tokens(directory: str | Path, tokens: Sequence[str]) -> None:
    """Refuse a folder whose own vocabulary gives other tokens to the ids: its embeddings would be those of other words.

    A folder without a vocabulary that this project reads passes.

    Raises:
        InterchangeError: the vocabularies differ; the first id that does is named.
    """
    try:
        theirs = import_tokenizer(directory, TokenizerConfig()).tokens
    except TokenizerError:
        return
    if list(tokens) != theirs:
        pairs = enumerate(zip(tokens, theirs, strict=False))
        first = next((f"id {i} is {a!r}, there {b!r}" for i, (a, b) in pairs if a != b), "")
        sizes = f"{len(tokens)} entries, there {len(theirs)}"
        raise InterchangeError(
            f"{directory}: its vocabulary is not that of the data ({first or sizes}); "
            f"build the data with tokenizer.path={directory}"
        )


def start_from(model: BertForPreTraining, directory: str | Path) -> list[str]:
    """Fill a model with the weights of a Hugging Face folder, to continue pre-training from it (`model.init_from`).

    Args:
        model: built from the run's configuration.
        directory: a folder of the same architecture and sizes.

    Returns:
        names of the model's tensors that the folder lacks; these keep their random start.

    Raises:
        InterchangeError: as `import_from_hf`, or a setting that decides shapes or outputs differs; each is named.
    """
    loaded = import_from_hf(directory, pad_vocab_to=model.config.pad_vocab_to)
    free = {"preset", "init_from", "pooler", "sentence_objective", "hidden_dropout", "attention_dropout"}
    free |= {"initializer_range", "activation_checkpointing", "head_chunk", "kernels", "bilstm"}
    pairs = {name: (getattr(model.config, name), getattr(loaded.config, name)) for name in EncoderConfig.model_fields}
    wrong = [f"{name} {ours!r} (folder: {theirs!r})" for name, (ours, theirs) in pairs.items() if ours != theirs]
    wrong = [line for line in wrong if line.split()[0] not in free]
    if wrong:
        raise InterchangeError(f"{directory}: cannot start from it, [model] differs in {', '.join(wrong)}")
    lacking = set(loaded.missing)
    own = model.state_dict()
    state = {name: tensor for name, tensor in loaded.model.state_dict().items() if name in own and name not in lacking}
    model.load_state_dict({**own, **state})
    return [name for name in own if name not in state]
