"""SentencePiece unigram and BPE: encoded with `sentencepiece`, stored as `spiece.model` and `tokenizer.json`.

Text is lower-cased and stripped of accents first, as the flags say, and then normalised by the model's own rules (NFKC).
Special tokens are control symbols, which `sentencepiece` never matches in text, so markers in a corpus are ordinary text. Those
that a model lacks are added at its end, as DeBERTa does with `[MASK]`. With byte fallback (mT5, Llama) a character that the model does
not know is written in its bytes: they continue the word that they stand in, may be predicted, and are never drawn at random.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer

from data_pipeline.artefacts import write_bytes, write_text
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

MODEL_FILE = "spiece.model"
WORD_START = "\u2581"
model_pb2: Any = sentencepiece_model_pb2  # generated code without type information
_PIECE = model_pb2.ModelProto.SentencePiece
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}


def text_normalizer(flags: Normalisation, compose: bool) -> normalizers.Normalizer | None:
    """What happens to text before the model's own rules; None where nothing is asked for.

    Args:
        compose: write letters with their marks, and Hangul, as one character (NFC). Where a model normalises by NFKC it must be
            so: of decomposed text `sentencepiece` and the same rules in `tokenizers` make different strings.
    """
    steps: list[normalizers.Normalizer] = []
    if flags.strip_accents:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if compose:
        steps.append(normalizers.NFC())
    if flags.lowercase:
        steps.append(normalizers.Lowercase())
    return normalizers.Sequence(steps) if steps else None


def normalise(text: str, normalizer: normalizers.Normalizer | None, flags: Normalisation) -> str:
    """`text_normalizer` applied, ASCII (which has no accents) by the short way."""
    if text.isascii():
        return text.lower() if flags.lowercase else text
    text = without_surrogates(text)
    return normalizer.normalize_str(text) if normalizer is not None else text


class SentencePieceTokenizer(SpecialEntries):
    """The `Tokenizer` protocol for a SentencePiece model.

    Args:
        model: bytes of the `.model` file.
        flags: lower-casing and accent stripping; `split_cjk` has no meaning here and must be false.
        source: where the model came from, for messages.

    Raises:
        TokenizerError: not a SentencePiece model, or neither unigram nor BPE.
    """

    def __init__(self, model: bytes, flags: Normalisation, source: str | Path = "model") -> None:
        self.flags = flags
        self._proto = _parse(model, source)
        self.kind = {1: "unigram", 2: "bpe"}[self._proto.trainer_spec.model_type]
        known = {piece.piece for piece in self._proto.pieces}
        names = {field: next((n for n in names if n in known), names[0]) for field, names in _NAMES.items()}
        for name in names.values():
            if name not in known:
                self._proto.pieces.add(piece=name, score=0.0)
        self.tokens = [piece.piece for piece in self._proto.pieces]
        ids = {token: index for index, token in enumerate(self.tokens)}
        unknown = next(piece.piece for piece in self._proto.pieces if piece.type == _PIECE.UNKNOWN)
        self._names = {
            "pad": names["pad"],
            "unk": unknown,
            "cls": names["cls"],
            "sep": names["sep"],
            "mask": names["mask"],
        }
        self._special = SpecialIds.find(ids, source, list(self._names.values()))
        for name in set(self._names.values()) - {unknown}:
            self._proto.pieces[ids[name]].type = _PIECE.CONTROL
        self._model = self._proto.SerializeToString(deterministic=True)
        kinds = np.array([piece.type for piece in self._proto.pieces])
        self.byte_fallback = bool((kinds == _PIECE.BYTE).any())
        self.ordinary_ids = np.flatnonzero(kinds == _PIECE.NORMAL).astype(np.int32)
        self.word_starts = np.array([token.startswith(WORD_START) for token in self.tokens])
        self.word_starts |= ~np.isin(kinds, [_PIECE.NORMAL, _PIECE.BYTE])
        self.fingerprint = fingerprint(self.kind, flags, self._special, self._model)
        self._normalizer = text_normalizer(flags, compose=bool(self._proto.normalizer_spec.precompiled_charsmap))
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=self._model)

    def __reduce__(self) -> tuple[type, tuple[bytes, Normalisation]]:
        return type(self), (self._model, self.flags)

    def encode_flat(self, texts: Sequence[str], rare: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts end to end, see `Tokenizer`."""
        prepared = [normalise(text, self._normalizer, self.flags) for text in texts]
        rows = self._processor.encode(prepared, out_type=int, num_threads=1)
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        ids = np.fromiter((i for row in rows for i in row), dtype=np.int32, count=int(lengths.sum()))
        return ids, lengths

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens shown by name."""
        special = {getattr(self._special, field): name for field, name in self._names.items()}
        parts: list[str] = []
        run: list[int] = []
        for index in [*(int(i) for i in ids), None]:
            if index is not None and index not in special:
                run.append(index)
                continue
            if run:
                parts.append(self._processor.decode(run))
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
        """Write `spiece.model`, `tokenizer.json`, `tokenizer_config.json` (the last two for `transformers`), descriptor."""
        directory = Path(directory)
        write_bytes(directory / MODEL_FILE, self._model)
        write_text(directory / "tokenizer.json", self._exported().to_str(pretty=True) + "\n")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            **{f"{field}_token": name for field, name in self._names.items()},
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
        """The model as a `tokenizers` pipeline with the same ids, special tokens matched."""
        pipeline = HFTokenizer(self._exported_model())
        before = [] if self._normalizer is None else [self._normalizer]
        charsmap = self._proto.normalizer_spec.precompiled_charsmap
        own: list[normalizers.Normalizer] = [normalizers.Precompiled(charsmap)] if charsmap else []
        # sentencepiece removes white space around the text and repeated spaces inside it.
        own += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip(left=True, right=True)]
        pipeline.normalizer = normalizers.Sequence(before + own)
        pipeline.pre_tokenizer = pre_tokenizers.Metaspace(replacement=WORD_START, prepend_scheme="always", split=True)
        shown = decoders.Metaspace(replacement=WORD_START, prepend_scheme="always")
        pipeline.decoder = decoders.Sequence([decoders.ByteFallback(), shown]) if self.byte_fallback else shown
        pipeline.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in self._names.values()])
        cls, sep = self._names["cls"], self._names["sep"]
        pipeline.post_processor = processors.TemplateProcessing(
            single=f"{cls}:0 $A:0 {sep}:0",
            pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
            special_tokens=[(cls, self.cls_id), (sep, self.sep_id)],
        )
        return pipeline

    def _exported_model(self) -> models.Model:
        if self.kind == "unigram":
            scored = [(piece.piece, piece.score) for piece in self._proto.pieces]
            return models.Unigram(scored, unk_id=self.unk_id, byte_fallback=self.byte_fallback)
        ids = {token: index for index, token in enumerate(self.tokens)}
        merges = []
        for token, piece in zip(self.tokens, self._proto.pieces, strict=True):
            if piece.type == _PIECE.NORMAL:
                pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
                known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
                merges += [(-piece.score, ids[left], ids[right], (left, right)) for left, right in known]
        merges.sort()
        return models.BPE(
            ids,
            [merge[-1] for merge in merges],
            unk_token=self._names["unk"],
            fuse_unk=True,
            byte_fallback=self.byte_fallback,
        )


def unigram_of_json(content: dict[str, Any], source: Path) -> SentencePieceTokenizer:
    """A `tokenizer.json` with a Unigram model, as `transformers` writes it for ALBERT's kin, XLM-R or DeBERTa, with its ids.

    Raises:
        TokenizerError: a normaliser or pre-tokenizer that a SentencePiece model cannot express.
    """
    model, special = content["model"], {entry["content"]: entry["id"] for entry in content.get("added_tokens") or []}
    flags, charsmap = _json_rules(content.get("normalizer"), source)
    steps = _flat(content.get("pre_tokenizer"), "pretokenizers")
    if [step["type"] for step in steps] not in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
        raise TokenizerError(f"{source}: expected a Metaspace pre-tokenizer, found {[step['type'] for step in steps]}")
    proto = model_pb2.ModelProto()
    fallback = bool(model.get("byte_fallback"))
    for index, (piece, score) in enumerate(model["vocab"]):
        kind = _PIECE.CONTROL if piece in special else _PIECE.NORMAL
        kind = _PIECE.BYTE if fallback and _BYTE.fullmatch(piece) else kind
        proto.pieces.add(piece=piece, score=score, type=_PIECE.UNKNOWN if index == model["unk_id"] else kind)
    known = {piece.piece for piece in proto.pieces}
    behind = sorted((index, piece) for piece, index in special.items() if piece not in known)
    if [index for index, _ in behind] != list(range(len(known), len(known) + len(behind))):
        raise TokenizerError(
            f"{source}: the ids of the added tokens do not follow the vocabulary of {len(known)} entries"
        )
    for _, piece in behind:
        proto.pieces.add(piece=piece, score=0.0, type=_PIECE.CONTROL)
    proto.trainer_spec.model_type = proto.trainer_spec.UNIGRAM
    proto.trainer_spec.byte_fallback = fallback
    proto.trainer_spec.unk_id = model["unk_id"]
    proto.normalizer_spec.precompiled_charsmap = charsmap
    proto.normalizer_spec.add_dummy_prefix = steps[-1].get("prepend_scheme", "always") != "never"
    return SentencePieceTokenizer(proto.SerializeToString(deterministic=True), flags, source)


def _json_rules(normalizer: dict[str, Any] | None, source: Path) -> tuple[Normalisation, bytes]:
    """(flags, table of a model's own rules) of a normaliser."""
    charsmap, found = b"", []
    for step in _flat(normalizer, "normalizers"):
        kind = step["type"]
        found.append(kind)
        if kind == "Precompiled":
            charsmap = base64.b64decode(step["precompiled_charsmap"])
        elif kind == "Replace" and set(step["pattern"]) != {"Regex"}:
            kind = "Replace of a string"
        if kind not in ("Precompiled", "Replace", "Strip", "NFC", "NFKD", "StripAccents", "Lowercase"):
            raise TokenizerError(
                f"{source}: its normaliser has a step {kind}, which a SentencePiece model does not; import the .model file"
            )
    flags = Normalisation(lowercase="Lowercase" in found, strip_accents="StripAccents" in found, split_cjk=False)
    return flags, charsmap


def _flat(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if not step:
        return []
    return [part for inner in step[key] for part in _flat(inner, key)] if step["type"] == "Sequence" else [step]


def _parse(model: bytes, source: str | Path) -> Any:
    proto = model_pb2.ModelProto()
    try:
        proto.ParseFromString(model)
    except Exception as error:  # protobuf's DecodeError is no public name in all its versions
        raise TokenizerError(f"{source}: not a SentencePiece model ({error})") from error
    if not proto.pieces or proto.trainer_spec.model_type not in (1, 2):
        raise TokenizerError(f"{source}: expected a SentencePiece model of type unigram or BPE")
    return proto
