"""Training a vocabulary, reproducibly: the same texts, settings and seed give the same bytes."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import sentencepiece
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, normalizers, pre_tokenizers, trainers

from data_pipeline.artefacts import write_text
from data_pipeline.byte_bpe import train_byte_bpe
from data_pipeline.config import TokenizerConfig
from data_pipeline.sentencepiece_model import SentencePieceTokenizer, normalise, text_normalizer
from data_pipeline.text_sample import PIECE_CHARACTERS, TextSample
from data_pipeline.tokenizer import Tokenizer, normalisation_of
from data_pipeline.tokenizer_folder import SPECIAL_TOKENS, Normalisation, TokenizerError, without_surrogates
from data_pipeline.wordpiece import MAX_WORD_CHARACTERS, PREFIX, WordPieceTokenizer, bert_normalizer

REPORT = "training_report.json"
CHARACTER_COVERAGE = 0.9999
"""Share of the sample's characters that get an entry; the rarest rest becomes unknown."""
MIN_FREQUENCY = 2
"""A piece that occurs once is not worth an entry."""
_TRAINER_THREADS = 4
# The threads of the SentencePiece trainer add floating-point sums in an order of their own: fixed, for the same bytes on
# every machine.
_RESERVED = "\u2585"
_LONG = re.compile(rf"\S{{{MAX_WORD_CHARACTERS + 1},}}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingReport:
    """What a training used and skipped. Stored beside the vocabulary as `training_report.json`.

    Attributes:
        kind: `tokenizer.kind`.
        requested_size, vocab_size: entries asked for and made (fewer where the text does not yield more).
        texts: texts offered.
        bytes_offered, bytes_sampled: UTF-8 bytes of the texts, and of the sample that was trained on.
        lines_split: lines over `line_limit` characters, cut into shorter ones, not dropped.
        line_limit: that limit.
        lines_skipped: lines of the sample of which some text could not be used.
        bytes_skipped: UTF-8 bytes not used; for WordPiece those of words over 100 characters.
        fingerprint: of the tokenizer.
    """

    kind: str
    requested_size: int
    vocab_size: int
    texts: int
    bytes_offered: int
    bytes_sampled: int
    lines_split: int
    line_limit: int
    lines_skipped: int
    bytes_skipped: int
    fingerprint: str

    def message(self) -> str:
        """One line for the log."""
        return (
            f"{self.kind} vocabulary of {self.vocab_size} entries from {self.bytes_sampled / 1e6:.1f} of "
            f"{self.bytes_offered / 1e6:.1f} MB; {self.lines_split} lines over {self.line_limit} characters split; "
            f"{self.lines_skipped} lines with {self.bytes_skipped} bytes skipped"
        )


@dataclass(slots=True)
class _Skipped:
    lines: int = 0
    size: int = 0

    def add(self, text: str) -> None:
        self.lines += 1
        self.size += len(text.encode("utf-8", "replace"))


def train_vocabulary(texts: Iterable[str], config: TokenizerConfig, seed: int, output_dir: Path) -> TrainingReport:
    """Train the vocabulary that `config` asks for and write its folder, descriptor last.

    Args:
        texts: documents; read once, held only as far as the sample of `config.sample_megabytes`.

    Raises:
        TokenizerError: no text, or too much of it had to be skipped.
    """
    sample = TextSample(int(config.sample_megabytes * 1e6), seed).extend(texts)
    pieces = sample.pieces()
    if not any(piece.strip() for piece in pieces):
        raise TokenizerError(
            f"the vocabulary has nothing to train on: {sample.texts_seen} texts with {sample.bytes_seen} bytes were "
            "offered, none with a visible character; check corpus.paths and the drop counts of the readers"
        )
    skipped = _Skipped()
    tokenizer: Tokenizer
    if config.kind == "wordpiece":
        tokenizer = train_wordpiece(pieces, config.vocab_size, normalisation_of(config), skipped)
    elif config.kind == "byte_bpe":
        flags = normalisation_of(config, config.kind)
        tokenizer = train_byte_bpe(pieces, config.vocab_size, flags, MIN_FREQUENCY)
    else:
        flags = normalisation_of(config, config.kind)
        tokenizer = train_sentencepiece(pieces, config.kind, config.vocab_size, flags, skipped)
    if skipped.size > config.max_skipped * sample.bytes_kept:
        raise TokenizerError(_too_much(skipped, sample.bytes_kept, config.max_skipped))
    report = TrainingReport(
        kind=config.kind,
        requested_size=config.vocab_size,
        vocab_size=tokenizer.vocab_size,
        texts=sample.texts_seen,
        bytes_offered=sample.bytes_seen,
        bytes_sampled=sample.bytes_kept,
        lines_split=sample.lines_split,
        line_limit=PIECE_CHARACTERS,
        lines_skipped=skipped.lines,
        bytes_skipped=skipped.size,
        fingerprint=tokenizer.fingerprint,
    )
    output_dir = Path(output_dir)
    write_text(output_dir / REPORT, json.dumps(asdict(report), indent=2) + "\n")
    tokenizer.save(output_dir)
    return report


def _too_much(skipped: _Skipped, sampled: int, max_skipped: float) -> str:
    return (
        f"training the vocabulary would skip {skipped.size} of {sampled} bytes ({skipped.lines} lines), more than the "
        f"share that tokenizer.max_skipped = {max_skipped:g} allows: words over the limit of {MAX_WORD_CHARACTERS} characters cannot be used; "
        "check that the corpus is text with spaces"
    )


def train_wordpiece(
    pieces: Sequence[str], vocab_size: int, flags: Normalisation, skipped: _Skipped
) -> WordPieceTokenizer:
    """Train a WordPiece vocabulary with the trainer of `tokenizers`.

    That trainer numbers the `##` form of each character in the order of a hash map that differs from run to run, and
    breaks ties between equally frequent pairs by these numbers. Numbering all characters beforehand, as if they were
    special tokens, makes the order, and so the vocabulary, a function of the text.
    """
    normalizer = bert_normalizer(flags)
    texts = [_usable(normalizer.normalize_str(_clean(piece)), skipped) for piece in pieces]
    alphabet = _alphabet(texts, normalizer, vocab_size - len(SPECIAL_TOKENS))
    pipeline = HFTokenizer(models.WordPiece(unk_token="[UNK]"))
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    characters = [entry for entry in alphabet if not entry.startswith(PREFIX) or entry == PREFIX[0]]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=[*SPECIAL_TOKENS, *alphabet],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        continuing_subword_prefix=PREFIX,
        show_progress=False,
    )
    pipeline.train_from_iterator(texts, trainer)
    ids = pipeline.get_vocab()
    return WordPieceTokenizer(sorted(ids, key=ids.__getitem__), flags)


def train_sentencepiece(
    pieces: Sequence[str], kind: Literal["unigram", "bpe"], vocab_size: int, flags: Normalisation, skipped: _Skipped
) -> SentencePieceTokenizer:
    """Train a SentencePiece model whose special ids are those of ALBERT ([PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4).

    Raises:
        TokenizerError: the trainer refuses, for instance a size too small for the characters of the text.
    """
    pad, unk, cls, sep, mask = SPECIAL_TOKENS
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(pieces, flags, skipped),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            seed_sentencepiece_size=min(1_000_000, 25 * vocab_size),
            character_coverage=CHARACTER_COVERAGE,
            num_threads=_TRAINER_THREADS,
            max_sentence_length=4 * PIECE_CHARACTERS + 4,
            normalization_rule_name="nmt_nfkc",
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece=pad,
            unk_piece=unk,
            bos_piece=cls,
            eos_piece=sep,
            control_symbols=[mask],
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise TokenizerError(f"tokenizer.vocab_size = {vocab_size}: SentencePiece cannot train it: {error}") from error
    return SentencePieceTokenizer(model.getvalue(), flags)


def _lines(pieces: Iterable[str], flags: Normalisation, skipped: _Skipped) -> Iterator[str]:
    """Normalised lines for SentencePiece; it takes no NUL, and no line with a character that it uses internally."""
    normalizer = text_normalizer(flags, compose=True)
    for piece in pieces:
        for line in normalise(piece, normalizer, flags).replace("\0", "").split("\n"):
            if _RESERVED in line:
                skipped.add(line)
            elif line.strip():
                yield line


def _clean(piece: str) -> str:
    return piece if piece.isascii() else without_surrogates(piece)


def _usable(text: str, skipped: _Skipped) -> str:
    """The text without over-long words, which are counted."""
    if not _LONG.search(text):
        return text
    kept = []
    for line in text.split("\n"):
        words = [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(line)]
        usable = [word for word in words if len(word) <= MAX_WORD_CHARACTERS]
        if len(usable) < len(words):
            skipped.add("".join(word for word in words if len(word) > MAX_WORD_CHARACTERS))
        kept.append(" ".join(usable))
    return "\n".join(kept)


def _alphabet(texts: Iterable[str], normalizer: normalizers.Normalizer, slots: int) -> list[str]:
    """Entries of one character, plain and (where the character can stand inside a word) with the prefix.

    ASCII first, as symbols that are rare here are common elsewhere; then the most frequent up to `CHARACTER_COVERAGE`,
    all only as far as `slots` entries reach. Ties go to the lower code point. Sorted, plain ones first.
    """
    counts = np.zeros(0x110000, dtype=np.int64)
    for batch in _batches(texts):
        counts += np.bincount(np.frombuffer(batch.encode("utf-32-le"), dtype=np.uint32), minlength=len(counts))
    occurring = [chr(point) for point in np.flatnonzero(counts)]
    occurring = sorted((c for c in occurring if not c.isspace()), key=lambda c: (c > "\x7f", -counts[ord(c)], c))
    total = sum(int(counts[ord(c)]) for c in occurring)
    plain: list[str] = []
    inner: list[str] = []
    covered = 0
    for character in occurring:
        inside = len(_words(f"a{character}a", normalizer)) == 1
        enough = covered >= CHARACTER_COVERAGE * total and not character.isascii()
        if enough or len(plain) + len(inner) + 1 + inside > slots:
            break
        covered += int(counts[ord(character)])
        plain.append(character)
        if inside:
            inner.append(PREFIX + character)
    return sorted(plain) + sorted(inner)


def _words(text: str, normalizer: normalizers.Normalizer) -> list[str]:
    return [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normalizer.normalize_str(text))]


def _batches(texts: Iterable[str], characters: int = 1 << 22) -> Iterator[str]:
    """Texts joined to strings of a few million characters, so that counting costs little per text."""
    held, size = [], 0
    for text in texts:
        held.append(text)
        size += len(text)
        if size >= characters:
            yield "".join(held)
            held, size = [], 0
    yield "".join(held)
