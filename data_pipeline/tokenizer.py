"""The tokenizer protocol, and reading one from a folder or importing a finished vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data_pipeline.byte_bpe import (
    FILE_NAMES,
    MERGES_FILE,
    VOCAB_FILE,
    ByteBPETokenizer,
    byte_bpe_of_json,
    read_byte_bpe,
)
from data_pipeline.config import TokenizerConfig
from data_pipeline.sentencepiece_model import MODEL_FILE, SentencePieceTokenizer, unigram_of_json
from data_pipeline.tokenizer_folder import (
    DESCRIPTOR,
    Normalisation,
    TokenizerError,
    read_descriptor,
    stored_flags,
)
from data_pipeline.wordpiece import MAX_WORD_CHARACTERS, PREFIX, WordPieceTokenizer, read_vocab

__all__ = ["Tokenizer", "TokenizerError", "import_tokenizer", "load_tokenizer"]


class Tokenizer(Protocol):
    """Text to ids. Legend: `V` vocabulary entries, `N` ids of a batch.

    Attributes:
        kind: "wordpiece", "unigram", "bpe" or "byte_bpe".
        flags: the stored normalisation flags.
        tokens: the V entries in the order of ids.
        word_starts: (V,) bool, ids that begin a word (special tokens are words of their own).
        ordinary_ids: int32, ids that a random replacement may be: no special, unknown, byte or unused entries.
        fingerprint: sha256 (hex) of vocabulary and flags.
    """

    kind: str
    flags: Normalisation
    tokens: list[str]
    word_starts: np.ndarray
    ordinary_ids: np.ndarray
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        """Number of entries V."""

    @property
    def pad_id(self) -> int:
        """Id of padding."""

    @property
    def unk_id(self) -> int:
        """Id of the unknown token."""

    @property
    def cls_id(self) -> int:
        """Id of the token before the first part."""

    @property
    def sep_id(self) -> int:
        """Id of the token after each part."""

    @property
    def mask_id(self) -> int:
        """Id of the mask."""

    def encode_flat(self, texts: Sequence[str], rare: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts end to end, no special tokens added; markers written in the text are ordinary text.

        Args:
            texts: what to encode.
            rare: all `wordpiece.rare_characters` of the texts, where the caller knows them: found in whole documents, they need no
                second look at every sentence.

        Returns:
            ids: (N,) int32.
            lengths: (len(texts),) int64, ids of each text; they sum to N.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens shown by name."""

    def count_removed_marks(self, rare: str) -> int:
        """Combining marks that accent stripping deletes from texts with these `wordpiece.rare_characters`."""

    def count_overlong_words(self, texts: Sequence[str]) -> int:
        """Words that become one unknown token because of their length alone."""

    def save(self, directory: str | Path) -> None:
        """Write the folder that `load_tokenizer` and `transformers.AutoTokenizer` read."""


def normalisation_of(config: TokenizerConfig, kind: str = WordPieceTokenizer.kind) -> Normalisation:
    """The flags of a configuration for a kind of tokenizer; an accent setting of None follows `lowercase`, as in BERT.

    `split_cjk` is a rule of WordPiece: the others split text without white space by themselves. Byte-level BPE keeps case
    unless `lowercase` is set on purpose, as in GPT-2 and RoBERTa.
    """
    lowercase = config.lowercase and (kind != ByteBPETokenizer.kind or "lowercase" in config.model_fields_set)
    strip = lowercase if config.strip_accents is None else config.strip_accents
    split_cjk = config.split_cjk and kind == WordPieceTokenizer.kind
    return Normalisation(lowercase=lowercase, strip_accents=strip, split_cjk=split_cjk)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Read a folder that `Tokenizer.save` wrote.

    Raises:
        TokenizerError: no tokenizer there, or its vocabulary or flags were changed after it was written.
    """
    directory = Path(directory)
    descriptor = read_descriptor(directory)
    flags = stored_flags(descriptor)
    tokenizer: Tokenizer
    if descriptor["kind"] == WordPieceTokenizer.kind:
        tokenizer = WordPieceTokenizer(read_vocab(directory / "vocab.txt"), flags, directory / "vocab.txt")
    elif descriptor["kind"] == ByteBPETokenizer.kind:
        tokenizer = read_byte_bpe(directory / VOCAB_FILE, directory / MERGES_FILE, flags)
    else:
        tokenizer = _read_model(directory / MODEL_FILE, flags)
    if tokenizer.fingerprint != descriptor["fingerprint"]:
        raise TokenizerError(
            f"{directory}: the vocabulary does not match the fingerprint in {DESCRIPTOR}; "
            "it was edited after it was written. Restore it, or train it again"
        )
    return tokenizer


def import_tokenizer(path: str | Path, config: TokenizerConfig) -> Tokenizer:
    """A finished vocabulary: a folder of ours or of Hugging Face, or one file.

    Files: `vocab.txt` (WordPiece), `.model` (SentencePiece), `merges.txt` or `vocab.bpe` (byte-level BPE, with the JSON
    of its ids beside it where there is one), `tokenizer.json`. Flags stored beside the vocabulary hold; a flag written in
    the configuration that contradicts them is an error. A bare vocabulary takes the configuration's flags.

    Raises:
        TokenizerError: nothing usable at `path`, or the flags contradict each other.
    """
    path = Path(path)
    if path.is_dir():
        return _import_folder(path, config)
    if not path.exists():
        raise TokenizerError(f"{path}: no such file or folder; tokenizer.path must name a finished vocabulary")
    if path.suffix == ".json":
        return _import_json(path, config)
    if path.suffix == ".model":
        return _read_model(path, normalisation_of(config, "unigram"))
    if path.suffix == ".bpe" or path.name.endswith(MERGES_FILE):
        beside = (path.with_name(vocab) for vocab, _ in FILE_NAMES)
        return read_byte_bpe(next((vocab for vocab in beside if vocab.exists()), None), path, _byte_flags(config))
    return WordPieceTokenizer(read_vocab(path), normalisation_of(config), path)


def _byte_flags(config: TokenizerConfig) -> Normalisation:
    return normalisation_of(config, ByteBPETokenizer.kind)


def _import_folder(path: Path, config: TokenizerConfig) -> Tokenizer:
    if (path / DESCRIPTOR).exists():
        tokenizer = load_tokenizer(path)
        _refuse_contradiction(path, tokenizer.flags, config)
        return tokenizer
    for vocab, merges in FILE_NAMES:
        if (path / vocab).exists() and (path / merges).exists():
            return read_byte_bpe(path / vocab, path / merges, _byte_flags(config))
    if (path / "tokenizer.json").exists() and not (path / MODEL_FILE).exists():
        return _import_json(path / "tokenizer.json", config)
    if (path / "vocab.txt").exists():
        flags = _transformers_flags(path / "tokenizer_config.json", config)
        return WordPieceTokenizer(read_vocab(path / "vocab.txt"), flags, path / "vocab.txt")
    if found := sorted(path.glob("*.model")):
        return _read_model(found[0], normalisation_of(config, "unigram"))
    raise TokenizerError(
        f"{path}: expected {DESCRIPTOR}, tokenizer.json, vocab.txt, merges or a .model file in the folder"
    )


def _read_model(path: Path, flags: Normalisation) -> Tokenizer:
    try:
        return SentencePieceTokenizer(path.read_bytes(), flags, path)
    except OSError as error:
        raise TokenizerError(f"{path}: cannot read the model ({error.strerror})") from error


def _import_json(path: Path, config: TokenizerConfig) -> Tokenizer:
    content = _read_json(path)
    model, normalizer = content.get("model") or {}, content.get("normalizer") or {}
    if model.get("type") == "BPE":
        return byte_bpe_of_json(content, _byte_flags(config), path)
    if model.get("type") == "Unigram":
        tokenizer = unigram_of_json(content, path)
        _refuse_contradiction(path, tokenizer.flags, config)
        return tokenizer
    if model.get("type") != "WordPiece" or normalizer.get("type") != "BertNormalizer":
        raise TokenizerError(
            f"{path}: expected a WordPiece model with a BertNormalizer, a Unigram model or byte-level BPE, found "
            f"{model.get('type')!r} with {normalizer.get('type')!r}"
        )
    prefix, limit = model.get("continuing_subword_prefix"), model.get("max_input_chars_per_word")
    if prefix != PREFIX or limit != MAX_WORD_CHARACTERS or not normalizer.get("clean_text", True):
        raise TokenizerError(
            f"{path}: expected the prefix {PREFIX!r}, words up to {MAX_WORD_CHARACTERS} characters and clean_text, "
            f"found {prefix!r}, {limit!r} and {normalizer.get('clean_text')!r}"
        )
    lowercase, strip = bool(normalizer["lowercase"]), normalizer.get("strip_accents")
    flags = Normalisation(
        lowercase=lowercase,
        strip_accents=lowercase if strip is None else bool(strip),
        split_cjk=bool(normalizer["handle_chinese_chars"]),
    )
    _refuse_contradiction(path, flags, config)
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    if [model["vocab"][token] for token in tokens] != list(range(len(tokens))):
        raise TokenizerError(f"{path}: the ids of the vocabulary are not 0 to {len(tokens) - 1}")
    return WordPieceTokenizer(tokens, flags, path)


def _transformers_flags(path: Path, config: TokenizerConfig) -> Normalisation:
    """Flags of a `tokenizer_config.json` where there is one, else those of the configuration."""
    flags = normalisation_of(config)
    if not path.exists():
        return flags
    stored = _read_json(path)
    lowercase = bool(stored.get("do_lower_case", flags.lowercase))
    strip = stored.get("strip_accents")
    if strip is None:
        strip = lowercase if "do_lower_case" in stored else flags.strip_accents
    flags = Normalisation(
        lowercase=lowercase,
        strip_accents=bool(strip),
        split_cjk=bool(stored.get("tokenize_chinese_chars", flags.split_cjk)),
    )
    _refuse_contradiction(path, flags, config)
    return flags


def _refuse_contradiction(path: Path, flags: Normalisation, config: TokenizerConfig) -> None:
    """A flag set on purpose that differs from the stored one would be ignored silently: refuse it."""
    for name in Normalisation.__slots__:
        wanted, stored = getattr(config, name), getattr(flags, name)
        if name in config.model_fields_set and wanted is not None and wanted != stored:
            raise TokenizerError(
                f"{path}: the vocabulary was made with {name} = {str(stored).lower()}, but tokenizer.{name} is "
                f"{str(wanted).lower()}; leave tokenizer.{name} out or import another vocabulary"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise TokenizerError(f"{path}: cannot read it ({error.strerror})") from error
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: expected a JSON object")
    return content
