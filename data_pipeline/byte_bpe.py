"""Byte-level BPE, the vocabularies of GPT-2 and RoBERTa: encoded with `tokenizers`, stored as `vocab.json` + `merges.txt`.

Sentences are encoded one by one, so each begins with a space (`add_prefix_space`): a word has the same ids wherever it
stands. A line break is a space. Otherwise ids equal those of `transformers` for the same files. Every text can be written
with the 256 bytes, so there is no unknown token, and markers such as `<mask>` in a corpus are ordinary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HFTokenizer

from data_pipeline.artefacts import write_text
from data_pipeline.sentencepiece_model import text_normalizer
from data_pipeline.tokenizer_folder import (
    Normalisation,
    SpecialEntries,
    SpecialIds,
    TokenizerError,
    fingerprint,
    without_surrogates,
    write_descriptor,
)
from data_pipeline.wordpiece import count_marks

VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"
FILE_NAMES = ((VOCAB_FILE, MERGES_FILE), ("encoder.json", "vocab.bpe"))
"""Names of the two files as `transformers` and as GPT-2's authors write them."""
SPECIAL_NAMES = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
WORD_START = "Ġ"
"""How a leading space is written: tokens that begin with it begin a word."""
_MARKER = re.compile(r"<\|.*\|>")
_LINE_BREAK = r"[ \t]*\r?\n\s*"


class ByteBPETokenizer(SpecialEntries):
    """The `Tokenizer` protocol for byte-level BPE.

    Args:
        tokens: the vocabulary in the order of ids. Special tokens (`SPECIAL_NAMES`) that it lacks are added at the end.
        merges: pairs in the order in which they are applied.
        flags: lower-casing and accent stripping; `split_cjk` has no meaning here and must be false.
        source: where the vocabulary came from, for messages.

    Raises:
        TokenizerError: a byte is missing, an entry occurs twice, or a merge makes something that is no entry.
    """

    kind = "byte_bpe"

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[tuple[str, str]],
        flags: Normalisation,
        source: str | Path = "vocabulary",
    ) -> None:
        self.tokens = [*tokens, *(name for name in SPECIAL_NAMES.values() if name not in set(tokens))]
        self.merges = list(merges)
        self.flags = flags
        ids = {token: index for index, token in enumerate(self.tokens)}
        _check(self.tokens, ids, self.merges, source)
        self._special = SpecialIds(**{field: ids[name] for field, name in SPECIAL_NAMES.items()})
        special = set(SPECIAL_NAMES.values())
        is_special = np.array([token in special or bool(_MARKER.fullmatch(token)) for token in self.tokens])
        self.ordinary_ids = np.flatnonzero(~is_special).astype(np.int32)
        self.word_starts = is_special | np.array([token.startswith(WORD_START) for token in self.tokens])
        content = json.dumps([self.tokens, self.merges], ensure_ascii=True, separators=(",", ":"))
        self.fingerprint = fingerprint(self.kind, flags, self._special, content.encode())
        self._pipeline = byte_pipeline(models.BPE(ids, self.merges), flags)

    def __reduce__(self) -> tuple[type, tuple[list[str], list[tuple[str, str]], Normalisation]]:
        return type(self), (self.tokens, self.merges, self.flags)

    def encode_flat(self, texts: Sequence[str], rare: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts end to end, see `Tokenizer`. A text of white space alone has none."""
        prepared = [("" if text.isspace() else text) if text.isascii() else _clean(text) for text in texts]
        rows = [encoding.ids for encoding in self._pipeline.encode_batch_fast(prepared, add_special_tokens=False)]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        ids = np.fromiter((i for row in rows for i in row), dtype=np.int32, count=int(lengths.sum()))
        return ids, lengths

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens shown by name."""
        special = {getattr(self._special, field): name for field, name in SPECIAL_NAMES.items()}
        parts: list[str] = []
        run: list[int] = []
        for index in [*(int(i) for i in ids), None]:
            if index is not None and index not in special:
                run.append(index)
                continue
            if run:
                parts.append(self._pipeline.decode(run, skip_special_tokens=False).strip())
                run = []
            if index is not None:
                parts.append(special[index])
        return " ".join(parts)

    def count_removed_marks(self, rare: str) -> int:
        """Combining marks (category Mn) that normalisation deletes, see `Tokenizer`; 0 with accent stripping off."""
        return count_marks(rare) if self.flags.strip_accents else 0

    def count_overlong_words(self, texts: Sequence[str]) -> int:
        """Always 0: a word of any length is split into pieces."""
        return 0

    def save(self, directory: str | Path) -> None:
        """Write `vocab.json`, `merges.txt`, `tokenizer.json`, `tokenizer_config.json` (the last two for `transformers`)."""
        directory = Path(directory)
        ids = {token: index for index, token in enumerate(self.tokens)}
        write_text(directory / VOCAB_FILE, json.dumps(ids, ensure_ascii=False) + "\n")
        write_text(directory / MERGES_FILE, "".join(["#version: 0.2\n", *(f"{a} {b}\n" for a, b in self.merges)]))
        write_text(directory / "tokenizer.json", self._exported().to_str(pretty=True) + "\n")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            **{f"{field}_token": name for field, name in SPECIAL_NAMES.items()},
        }
        write_text(directory / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
        write_descriptor(
            directory,
            kind=self.kind,
            flags=self.flags,
            special=self._special,
            vocab_size=self.vocab_size,
            digest=self.fingerprint,
        )

    def _exported(self) -> HFTokenizer:
        """The pipeline with special tokens matched, `<s> A </s> B </s>` around the text."""
        ids = {token: index for index, token in enumerate(self.tokens)}
        pipeline = byte_pipeline(models.BPE(ids, self.merges), self.flags)
        pipeline.add_special_tokens(
            [
                AddedToken(name, special=True, normalized=False, lstrip=name == "<mask>")
                for name in SPECIAL_NAMES.values()
            ]
        )
        pipeline.post_processor = processors.TemplateProcessing(
            single="<s>:0 $A:0 </s>:0",
            pair="<s>:0 $A:0 </s>:0 $B:1 </s>:1",
            special_tokens=[("<s>", self.cls_id), ("</s>", self.sep_id)],
        )
        return pipeline


def byte_pipeline(model: models.BPE, flags: Normalisation) -> HFTokenizer:
    """A `tokenizers` pipeline without special tokens: markers in text are ordinary text."""
    pipeline = HFTokenizer(model)
    before = text_normalizer(flags, compose=flags.strip_accents)
    joined = normalizers.Replace(Regex(_LINE_BREAK), " ")
    pipeline.normalizer = joined if before is None else normalizers.Sequence([joined, before])
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    pipeline.decoder = decoders.ByteLevel()
    return pipeline


def train_byte_bpe(texts: Iterable[str], vocab_size: int, flags: Normalisation, min_frequency: int) -> ByteBPETokenizer:
    """Train with the BPE trainer of `tokenizers`; special tokens come first, then the bytes, then the merges.

    Its ids follow the order of merges, and ties go to the pair of lower ids, so the same texts give the same vocabulary.

    Raises:
        TokenizerError: no room for the bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(alphabet) + len(SPECIAL_NAMES)
    if vocab_size < least:
        raise TokenizerError(f"tokenizer.vocab_size = {vocab_size}: byte-level BPE needs {least} or more")
    pipeline = byte_pipeline(models.BPE(), flags)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_NAMES.values()),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    pipeline.train_from_iterator(map(_clean, texts), trainer)
    model = json.loads(pipeline.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return ByteBPETokenizer(tokens, [tuple(pair) for pair in model["merges"]], flags)


def read_byte_bpe(vocab: Path | None, merges: Path, flags: Normalisation) -> ByteBPETokenizer:
    """Read the files of GPT-2 or RoBERTa.

    Args:
        vocab: token to id as JSON; None: ids as GPT-2 numbers them, the 256 bytes and then the merges.

    Raises:
        TokenizerError: not such files.
    """
    pairs = _read_merges(merges)
    if vocab is None:
        # The bytes that stand for themselves come first in GPT-2's encoder.json, in the order of their characters.
        tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in pairs)]
        return ByteBPETokenizer(tokens, pairs, flags, merges)
    try:
        ids = json.loads(vocab.read_bytes())
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{vocab}: cannot read it as JSON: {error}") from error
    return ByteBPETokenizer(_in_order(ids, vocab), pairs, flags, vocab)


def byte_bpe_of_json(content: dict[str, Any], flags: Normalisation, source: Path) -> ByteBPETokenizer:
    """A `tokenizer.json` with a BPE model on bytes.

    Raises:
        TokenizerError: another kind of BPE, or a normaliser of its own.
    """
    model, before = content["model"], content.get("pre_tokenizer") or {}
    normaliser = json.loads(byte_pipeline(models.BPE(), flags).to_str())["normalizer"]
    if before.get("type") != "ByteLevel" or content.get("normalizer") not in (None, normaliser):
        raise TokenizerError(
            f"{source}: expected a BPE model with a ByteLevel pre-tokenizer and no normaliser, found "
            f"{before.get('type')!r} and {content.get('normalizer')!r}"
        )
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    merges = [(left, right) for left, right in pairs]
    ids = model["vocab"] | {entry["content"]: entry["id"] for entry in content.get("added_tokens", [])}
    return ByteBPETokenizer(_in_order(ids, source), merges, flags, source)


def _in_order(ids: Any, source: Path) -> list[str]:
    if not isinstance(ids, dict) or sorted(ids.values()) != list(range(len(ids))):
        raise TokenizerError(f"{source}: expected a JSON object of tokens with the ids 0, 1, 2, ...")
    return sorted(ids, key=ids.__getitem__)


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot read the merges: {error}") from error
    pairs = []
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.removesuffix("\r").split(" ")
        if len(parts) != 2 or not all(parts):
            raise TokenizerError(f"{path}: line {number}: expected two tokens with a space between them, got {line!r}")
        pairs.append((parts[0], parts[1]))
    return pairs


def _check(tokens: list[str], ids: dict[str, int], merges: list[tuple[str, str]], source: str | Path) -> None:
    if len(ids) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise TokenizerError(f"{source}: the entry {twice!r} occurs twice; ids must be unique")
    if missing := [byte for byte in pre_tokenizers.ByteLevel.alphabet() if byte not in ids]:
        raise TokenizerError(f"{source}: {len(missing)} of the 256 bytes have no entry; is it byte-level BPE?")
    for left, right in merges:
        if not {left, right, left + right} <= ids.keys():
            raise TokenizerError(
                f"{source}: the merge {left!r} {right!r} does not fit the vocabulary; are the files a pair?"
            )


def _clean(text: str) -> str:
    return "" if text.isspace() else without_surrogates(text)
