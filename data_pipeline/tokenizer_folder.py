"""What every tokenizer backend stores and checks: normalisation flags, special tokens, descriptor, fingerprint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_pipeline.artefacts import write_text

DESCRIPTOR = "clozeworks_tokenizer.json"
SCHEMA = 1
_SURROGATE = re.compile("[\ud800-\udfff]")
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class TokenizerError(ValueError):
    """A vocabulary that cannot be used; the message names the file, what was expected and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalisation:
    """How text is normalised before it is split. Stored with the vocabulary; nothing later overrides it.

    Attributes:
        lowercase: lower-case the text (Unicode rules, independent of the locale).
        strip_accents: decompose and drop combining marks (category Mn). In scripts such as Devanagari or Thai these
            are vowels, so it is a setting of its own.
        split_cjk: put each CJK ideograph into a word of its own.
    """

    lowercase: bool
    strip_accents: bool
    split_cjk: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialIds:
    """Ids of the five structural tokens."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int

    @classmethod
    def find(cls, ids: dict[str, int], source: str | Path, names: Sequence[str] = SPECIAL_TOKENS) -> SpecialIds:
        """Look the tokens up by name.

        Raises:
            TokenizerError: one is missing.
        """
        missing = [name for name in names if name not in ids]
        if missing:
            raise TokenizerError(
                f"{source}: the vocabulary lacks {', '.join(missing)}; pretraining needs all of {', '.join(names)}"
            )
        return cls(**{field: ids[name] for field, name in zip(cls.__slots__, names, strict=True)})


class SpecialEntries:
    """What the backends of `Tokenizer` answer alike: the size of the vocabulary and the ids of its special entries."""

    tokens: list[str]
    _special: SpecialIds

    @property
    def vocab_size(self) -> int:
        """Number of entries V."""
        return len(self.tokens)

    @property
    def pad_id(self) -> int:
        """Id of padding: `[PAD]`, `<pad>`."""
        return self._special.pad

    @property
    def unk_id(self) -> int:
        """Id of the unknown token: `[UNK]`, `<unk>`; byte-level BPE never gives it."""
        return self._special.unk

    @property
    def cls_id(self) -> int:
        """Id of the first token of an example: `[CLS]`, `<s>`."""
        return self._special.cls

    @property
    def sep_id(self) -> int:
        """Id of the token that ends a part: `[SEP]`, `</s>`."""
        return self._special.sep

    @property
    def mask_id(self) -> int:
        """Id of the mask: `[MASK]`, `<mask>`."""
        return self._special.mask


def fingerprint(kind: str, flags: Normalisation, special: SpecialIds, vocabulary: bytes) -> str:
    """sha256 over everything that decides ids: kind, flags, special ids and the vocabulary's bytes."""
    head = json.dumps({"kind": kind, **asdict(flags), **asdict(special)}, sort_keys=True)
    return hashlib.sha256(head.encode() + b"\n" + vocabulary).hexdigest()


def write_descriptor(
    directory: Path, *, kind: str, flags: Normalisation, special: SpecialIds, vocab_size: int, digest: str
) -> None:
    """Write the file that makes a folder a tokenizer of ours. Written last: its presence says that all is there."""
    content = {
        "schema": SCHEMA,
        "kind": kind,
        **asdict(flags),
        "vocab_size": vocab_size,
        "special_ids": asdict(special),
        "fingerprint": digest,
    }
    write_text(directory / DESCRIPTOR, json.dumps(content, indent=2) + "\n")


def read_descriptor(directory: Path) -> dict[str, Any]:
    """The stored descriptor.

    Raises:
        TokenizerError: no descriptor, not JSON, or of another schema.
    """
    path = directory / DESCRIPTOR
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise TokenizerError(
            f"{path}: not found, so {directory} holds no finished tokenizer; "
            "build it first, or name it as tokenizer.path to import a vocabulary from elsewhere"
        ) from error
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON ({error}); write the tokenizer again") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise TokenizerError(f"{path}: expected schema {SCHEMA}; this file was written by another version")
    return content


def stored_flags(descriptor: dict[str, Any]) -> Normalisation:
    """The normalisation flags of a descriptor."""
    return Normalisation(**{name: bool(descriptor[name]) for name in Normalisation.__slots__})


def without_surrogates(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which are not text but can stand in a Python string."""
    return _SURROGATE.sub("\ufffd", text)
