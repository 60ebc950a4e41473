"""`python -m pretrain.export --checkpoint RUN_OR_STEP --output DIR`: weights that `transformers` loads as they are.

The folder is written aside, loaded back through `transformers` and compared with the model - ids and logits - before it
gets its name. Once it has been evaluated, the same command with `--scores EVAL_DIR` puts the task scores into its card.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from data_pipeline.artefacts import write_text
from data_pipeline.config import ConfigError, validate
from data_pipeline.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from pretrain.checkpoint import CheckpointError, TrainerState, load_model_weights, read_state, resolve
from pretrain.encoder import BertForPreTraining
from pretrain.hf_config import InterchangeError, model_class, to_hf_config
from pretrain.hf_import import folder_fingerprint
from pretrain.model_card import model_card, read_scores
from pretrain.model_config import EncoderConfig
from pretrain.name_map import to_hf_tensors

RECORD = "clozeworks_export.json"
TOLERANCE = 1e-5
"""Largest difference of logits in fp32, relative to the largest logit where that is above 1."""

_PARITY_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "HELLO Hello hello, $5+3^2`",
    "caf\u00e9 cafe\u0301 na\u00efve \u0130STANBUL I\u015eIK",
    "BERT\u6a21\u578b2 \u0905\u092a\u0928\u0947 \u092e\u0947\u0902 \u0e17\u0e35\u0e48\u0e19\u0e35\u0e48",
    "a\u200db co\u00adop a\u0085b a\u2028b a\tb\u00a0c\u3000d \ufeffabc",
    "",
)


def export_to_hf(
    model: BertForPreTraining,
    tokenizer_dir: str | Path,
    output: str | Path,
    *,
    record: Mapping[str, Any] | None = None,
    card: Mapping[str, Any] | None = None,
) -> Path:
    """Write a Hugging Face folder after proving that it gives the same ids and logits.

    Args:
        model: fp32 on the CPU.
        tokenizer_dir: a folder of `Tokenizer.save`; its files are copied.
        output: the folder to make; an earlier export there is replaced, anything else is refused.
        record: facts to keep beside the weights, for the rerun that finds them done.
        card: facts for the model card.

    Raises:
        InterchangeError: the architecture has no counterpart, the vocabularies differ, `output` holds something else,
            or ids or logits differ.
        TokenizerError: no tokenizer in `tokenizer_dir`.
    """
    output, config = Path(output), model.config
    tokenizer = load_tokenizer(tokenizer_dir)
    if (tokenizer.vocab_size, tokenizer.pad_id) != (config.vocab_size, config.pad_id):
        raise InterchangeError(
            f"{tokenizer_dir}: {tokenizer.vocab_size} entries with padding id {tokenizer.pad_id}, the model was made for "
            f"{config.vocab_size} with padding id {config.pad_id}"
        )
    if output.exists() and any(output.iterdir()) and not (output / RECORD).is_file():
        raise InterchangeError(f"{output}: is not empty and not an export; name another folder")
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write_model(model, tokenizer, temporary)
        _copy_tokenizer(Path(tokenizer_dir), temporary, config)
        difference = check_parity(model, tokenizer, temporary)
        facts = {"tokenizer": tokenizer.fingerprint, "largest_logit_difference": difference, **(record or {})}
        facts["parameters"] = sum(tensor.numel() for tensor in to_hf_tensors(model.state_dict(), config).values())
        write_text(temporary / RECORD, json.dumps(facts, indent=1, sort_keys=True) + "\n")
        write_text(temporary / "README.md", model_card(config, facts, card or {}))
        for path in [*temporary.iterdir(), temporary]:
            _sync(path)
        if output.exists():
            old = output.with_name(f".{output.name}.{os.getpid()}.old")
            os.rename(output, old)
            os.rename(temporary, output)
            shutil.rmtree(old)
        else:
            os.rename(temporary, output)
        _sync(output.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return output


def _write_model(model: BertForPreTraining, tokenizer: Tokenizer, folder: Path) -> None:
    ids = {"pad_id": tokenizer.pad_id, "cls_id": tokenizer.cls_id, "sep_id": tokenizer.sep_id}
    content = {**to_hf_config(model.config, ids), "dtype": "float32"}
    write_text(folder / "config.json", json.dumps(content, indent=2, sort_keys=True) + "\n")
    try:
        tensors = to_hf_tensors(model.state_dict(), model.config)
    except KeyError as error:
        raise InterchangeError(error.args[0]) from error
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _copy_tokenizer(source: Path, folder: Path, config: EncoderConfig) -> None:
    """The tokenizer's files as they are, with the longest input named where `transformers` looks for it."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        content = json.loads(settings.read_text(encoding="utf-8"))
        content["model_max_length"] = config.max_positions
        write_text(settings, json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def _quiet_transformers() -> Any:
    """No progress bars or notices while loading; what they said is dropped unless loading fails."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


@torch.no_grad()
def check_parity(model: BertForPreTraining, tokenizer: Tokenizer, folder: Path) -> float:
    """Load the folder through `transformers` and compare ids and logits on a full row and a padded one.

    Returns:
        the largest absolute difference of any logit.

    Raises:
        InterchangeError: ids differ (the text is named), or logits differ by more than the tolerance.
    """
    import transformers

    with _quiet_transformers():
        theirs = getattr(transformers, model_class(model.config)).from_pretrained(folder, dtype=torch.float32).eval()
        auto_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in _PARITY_TEXTS:
        ours = tokenizer.encode_flat([text])[0].tolist()
        read = auto_tokenizer(text, add_special_tokens=False)["input_ids"]
        if ours != read:
            raise InterchangeError(f"the exported tokenizer reads {text!r} as {read}, the data pipeline as {ours}")
    difference, scale = compare_logits(model, theirs)
    if not difference <= TOLERANCE * max(1.0, scale):
        raise InterchangeError(
            f"logits of the exported model differ by {difference:.2e} (largest logit {scale:.1f}); nothing was written"
        )
    return difference


@torch.no_grad()
def compare_logits(model: BertForPreTraining, theirs: Any) -> tuple[float, float]:
    """Logits of both models on one full row and one padded row.

    Args:
        model: ours.
        theirs: the model of `transformers` with the same weights.

    Returns:
        largest absolute difference, largest absolute logit.
    """
    config, training = model.config, model.training
    model.eval()
    longest = min(config.max_positions, 24)
    lengths = torch.tensor([longest, max(4, longest // 3)])
    real = torch.arange(longest) < lengths[:, None]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, config.vocab_size, (2, longest), generator=generator)
    ids[ids == config.pad_id] = (config.pad_id + 1) % config.vocab_size
    ids = torch.where(real, ids, config.pad_id)
    segments = (
        (torch.arange(longest) >= lengths[:, None] // 2).long() * real if config.type_vocab > 1 else real.long() * 0
    )
    arguments = {"input_ids": ids, "attention_mask": real.long()}
    if config.type_vocab:
        arguments["token_type_ids"] = segments
    output = theirs(**arguments)
    logits = output.prediction_logits if hasattr(output, "prediction_logits") else output.logits
    cu_seqlens = torch.tensor([0, lengths[0], lengths.sum()], dtype=torch.int32)
    positions = torch.arange(longest).expand(2, -1)[real]
    x_TD = model.encoder(ids[real], segments[real], positions, cu_seqlens, longest)
    own = model.mlm_head.logits(x_TD, model.word_embedding)
    if logits.shape[-1] != own.shape[-1]:
        raise InterchangeError(f"the exported model scores {logits.shape[-1]} ids, this one {own.shape[-1]}")
    difference = (own - logits[real]).abs().max()
    if model.sentence_head is not None:
        second = output.seq_relationship_logits if hasattr(output, "seq_relationship_logits") else output.sop_logits
        pooled = model.encoder.pool(x_TD, cu_seqlens[:-1].long())
        difference = torch.maximum(difference, (model.sentence_head(pooled) - second).abs().max())
    model.train(training)
    return difference.item(), own.abs().max().item()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint_model(step: Path) -> tuple[BertForPreTraining, TrainerState]:
    """The model of a complete checkpoint, fp32 on the CPU, and the state saved with it.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ConfigError: its configuration is of another version.
    """
    state = read_state(step)
    # Kernels are a matter of the machine that computes, not of the model.
    config = validate(EncoderConfig, {**state.config["model"], "kernels": "auto"}, step)
    model = BertForPreTraining(config)
    weights = load_model_weights(step)
    model.load_state_dict(weights, strict=True)
    return model.eval(), state


def _last_validation(step_dir: Path, step: int) -> dict[str, Any]:
    """The newest held-out scores up to `step` from the run's metrics, empty where there are none."""
    path = step_dir.parent.parent / "metrics.jsonl"
    found: dict[str, Any] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if entry.get("kind") == "validation" and entry.get("step", 0) <= step:
                    found = entry
    return found


def _export_checkpoint(checkpoint: Path, output: Path, tokenizer_dir: Path | None, scores: Path | None) -> str:
    step_dir = resolve(checkpoint, report=lambda line: print(line, file=sys.stderr))
    state = read_state(step_dir)
    manifest = json.loads((step_dir / "manifest.json").read_text(encoding="utf-8"))
    weights = manifest["files"]["model.safetensors"]["sha256"]
    record = {"run_id": state.run_id, "step": state.step, "weights_sha256": weights, "data": state.data}
    card = {"validation": _last_validation(step_dir, state.step), "config": state.config, "git": state.git}
    if _is_exported(output, record, state.tokenizer):
        said = f"{output}: step {state.step} is exported already"
    else:
        model, state = load_checkpoint_model(step_dir)
        folder = tokenizer_dir or Path(state.config["data"]["dir"]) / "tokenizer"
        if load_tokenizer(folder).fingerprint != state.tokenizer:
            raise InterchangeError(
                f"{folder}: not the vocabulary that the run was trained with; name it with --tokenizer"
            )
        export_to_hf(model, folder, output, record=record, card=card)
        difference = _read_record(output)["largest_logit_difference"]
        said = f"{output}: {model_class(model.config)} of step {state.step}, largest logit difference {difference:.1e}"
    if scores is not None:
        found = read_scores(scores, folder_fingerprint(output))
        config = validate(EncoderConfig, state.config["model"], step_dir)
        write_text(output / "README.md", model_card(config, _read_record(output), {**card, "scores": found}))
        said += f"; {len(found)} task scores on its card"
    return said


def _read_record(output: Path) -> dict[str, Any]:
    return json.loads((output / RECORD).read_text(encoding="utf-8"))


def _is_exported(output: Path, record: Mapping[str, Any], tokenizer: str) -> bool:
    """Whether the folder holds just this: the same weights and vocabulary, written by a version that kept every fact."""
    if not (output / RECORD).is_file():
        return False
    done = _read_record(output)
    return {**done, **record} == done and done.get("tokenizer") == tokenizer and "parameters" in done


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0 done, 2 nothing could be exported."""
    parser = argparse.ArgumentParser(prog="python -m pretrain.export", description="Write a Hugging Face folder.")
    parser.add_argument("--checkpoint", required=True, type=Path, help="a run folder or one of its steps")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer folder; default: the one the run was trained with")
    parser.add_argument(
        "--scores", type=Path, help="output folder of eval.run on this export: its scores join the card"
    )
    parsed = parser.parse_args(arguments)
    try:
        print(_export_checkpoint(parsed.checkpoint, parsed.output, parsed.tokenizer, parsed.scores))
    except (CheckpointError, ConfigError, InterchangeError, TokenizerError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
