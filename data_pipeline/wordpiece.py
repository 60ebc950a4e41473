"""WordPiece: encoded with `tokie`, stored and exported in the form of `tokenizers`.

Ids equal those of `tokenizers` with `BertNormalizer` and `BertPreTokenizer` (and so of `transformers`' BertTokenizer)
on ordinary text. One thing differs on purpose: a marker such as `[MASK]` written in a corpus is ordinary text here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokie
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer

from data_pipeline.artefacts import write_text
from data_pipeline.tokenizer_folder import (
    SPECIAL_TOKENS,
    Normalisation,
    SpecialEntries,
    SpecialIds,
    TokenizerError,
    fingerprint,
    without_surrogates,
    write_descriptor,
)
from data_pipeline.unicode_gaps import GAPS

PREFIX = "##"
MAX_WORD_CHARACTERS = 100
"""Longer words become one unknown token, counted in Unicode characters after normalisation (as in BERT)."""

# The ideograph ranges of BERT's `_is_chinese_char`
# (https://github.com/google-research/bert/blob/master/tokenization.py).
CJK = re.compile(
    "[\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b820-\U0002ceaf\uf900-\ufaff\U0002f800-\U0002fa1f]"
)
_LONG_TEXT = 8192
_LONG_RUN = re.compile(r"(?:\S|[\x1c-\x1f\x85]){500}")
_FIRST_RARE = 0x7F
_WINDOW = 1 << 20  # characters looked at together
_UNUSED = re.compile(r"\[unused\d+\]")
# Separators 0x1c-0x1f and 0x85 are white space to `re` but deleted by BERT, so they join what stands around them. A
# character lower-cases to three at most, hence a third of the limit.
_MAYBE_OVERLONG = re.compile(r"(?:\S|[\x1c-\x1f\x85]){34}")


def bert_normalizer(flags: Normalisation) -> normalizers.BertNormalizer:
    """BERT's normalisation with every flag explicit."""
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=flags.split_cjk,
        strip_accents=flags.strip_accents,
        lowercase=flags.lowercase,
    )


def wordpiece_pipeline(tokens: Sequence[str], flags: Normalisation) -> HFTokenizer:
    """A `tokenizers` pipeline without special tokens: markers in text are ordinary text."""
    ids = {token: index for index, token in enumerate(tokens)}
    pipeline = HFTokenizer(
        models.WordPiece(
            ids,
            unk_token="[UNK]",
            max_input_chars_per_word=MAX_WORD_CHARACTERS,
            continuing_subword_prefix=PREFIX,
        )
    )
    pipeline.normalizer = bert_normalizer(flags)
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pipeline.decoder = decoders.WordPiece(prefix=PREFIX)
    return pipeline


def _fast_encoder(tokens: Sequence[str], lowercase: bool) -> Any:
    """tokie reads a tokenizer.json only. It strips accents exactly where it lower-cases and always splits CJK."""
    flags = Normalisation(lowercase=lowercase, strip_accents=lowercase, split_cjk=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        wordpiece_pipeline(tokens, flags).save(str(path))
        with _few_cores():
            encoder: Any = tokie.Tokenizer.from_json(str(path))
            encoder.encode_batch_flat(["a", "b"], add_special_tokens=False)
        return encoder


@contextlib.contextmanager
def _few_cores() -> Iterator[None]:
    """tokie 0.1.4 asks once how many cores the process may use, and takes as many threads for each batch: there is no setting.

    So where one thread is wanted (`RAYON_NUM_THREADS`, which `tokenizers` reads) it is shown a single core.
    """
    if os.environ.get("RAYON_NUM_THREADS") != "1" or not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


class WordPieceTokenizer(SpecialEntries):
    """The `Tokenizer` protocol for a WordPiece vocabulary.

    Args:
        tokens: the vocabulary in the order of ids.
        flags: normalisation, fixed for the life of the vocabulary.
        source: where the vocabulary came from, for messages.

    Raises:
        TokenizerError: a special token is missing or an entry occurs twice.
    """

    kind = "wordpiece"

    def __init__(self, tokens: Sequence[str], flags: Normalisation, source: str | Path = "vocabulary") -> None:
        self.tokens = list(tokens)
        self.flags = flags
        ids = {token: index for index, token in enumerate(self.tokens)}
        if len(ids) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if ids[token] != index)
            raise TokenizerError(f"{source}: the entry {twice!r} occurs twice; ids must be unique")
        self._special = SpecialIds.find(ids, source)
        special = set(SPECIAL_TOKENS)
        self.word_starts = np.array([not token.startswith(PREFIX) for token in self.tokens], dtype=bool)
        self.ordinary_ids = np.array(
            [i for i, token in enumerate(self.tokens) if token not in special and not _UNUSED.fullmatch(token)],
            dtype=np.int32,
        )
        self.fingerprint = fingerprint(self.kind, flags, self._special, "\n".join(self.tokens).encode())
        # Where the flags are not the pair that tokie knows, text is normalised first and tokie only splits.
        self._native = flags.strip_accents == flags.lowercase

    # What encodes is made at its first use: most processes only ask for ids and counts.
    @cached_property
    def _encoder(self) -> Any:
        return _fast_encoder(self.tokens, self.flags.lowercase and self._native)

    @cached_property
    def _reference(self) -> HFTokenizer:
        return wordpiece_pipeline(self.tokens, self.flags)

    @cached_property
    def _orphans(self) -> re.Pattern[str] | None:
        return _orphans(self.tokens)

    def __reduce__(self) -> tuple[type, tuple[list[str], Normalisation]]:
        return type(self), (self.tokens, self.flags)

    def encode_flat(self, texts: Sequence[str], rare: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts end to end, see `Tokenizer`."""
        texts = list(texts)
        slow = self._for_reference(texts, rare_characters(texts) if rare is None else rare)
        prepared = texts if self._native else [self._normalise(text) for text in texts]
        if slow:
            return self._encode_mixed(texts, prepared, slow)
        try:
            ids, lengths = self._encoder.encode_batch_flat(prepared, add_special_tokens=False)
        except UnicodeEncodeError:  # lone surrogates, which JSON can carry; U+FFFD is deleted by normalisation
            return self.encode_flat([without_surrogates(text) for text in texts])
        return ids.astype(np.int32), lengths.astype(np.int64)

    def _for_reference(self, texts: list[str], rare: str) -> list[int]:
        """The texts for which tokie's ids could differ from those of `tokenizers`, as found by the differential tests.

        tokie 0.1.4 cuts texts of about 64 kB and more into chunks to encode them in parallel, inside a word where it
        finds no other place; its Unicode tables are older; it always splits CJK; and it drops the end of a word that
        begins a longer entry where not even its first character is an entry.

        Looking at every text by itself would take as long as encoding it: first all are looked at together.
        """
        rare = "".join(set(rare))
        odd = set(GAPS.findall(rare))
        if not self.flags.split_cjk:
            odd.update(CJK.findall(rare))
        long = max(map(len, texts), default=0) > _LONG_TEXT
        if not odd and not long and self._orphans is None:
            return []
        return [i for i, text in enumerate(texts) if self._needs_reference(text, odd)]

    def _needs_reference(self, text: str, odd: set[str]) -> bool:
        if self._orphans is not None and self._orphans.search(self._normalise(without_surrogates(text))):
            return True
        if len(text) > _LONG_TEXT and _LONG_RUN.search(text):
            return True
        return bool(odd) and not odd.isdisjoint(text)

    def _normalise(self, text: str) -> str:
        if text.isascii():
            return text.lower() if self.flags.lowercase else text
        return self._reference.normalizer.normalize_str(text)

    def _encode_mixed(self, texts: list[str], prepared: list[str], slow: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Encode the texts at `slow` with `tokenizers`, the others with tokie, and put them back in order."""
        chosen = set(slow)
        fast = [i for i in range(len(texts)) if i not in chosen]
        ids, lengths = self._encoder.encode_batch_flat([prepared[i] for i in fast], add_special_tokens=False)
        rows: list[np.ndarray] = [np.empty(0, dtype=np.int32)] * len(texts)
        pieces = np.split(ids.astype(np.int32), np.cumsum(lengths.astype(np.int64))[:-1]) if fast else []
        for index, piece in zip(fast, pieces, strict=True):
            rows[index] = piece
        encodings = self._reference.encode_batch_fast([texts[i] for i in slow], add_special_tokens=False)
        for index, encoding in zip(slow, encodings, strict=True):
            rows[index] = np.array(encoding.ids, dtype=np.int32)
        return np.concatenate(rows), np.array([len(row) for row in rows], dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, word pieces joined, special tokens shown by name."""
        return self._reference.decode([int(i) for i in ids], skip_special_tokens=False)

    def count_removed_marks(self, rare: str) -> int:
        """Combining marks (category Mn) that normalisation deletes, see `Tokenizer`; 0 with accent stripping off."""
        return count_marks(rare) if self.flags.strip_accents else 0

    def count_overlong_words(self, texts: Sequence[str]) -> int:
        """Words of more than `MAX_WORD_CHARACTERS` characters, each of which becomes one unknown token."""
        count = 0
        for text in texts:
            if _MAYBE_OVERLONG.search(text):
                words = self._reference.pre_tokenizer.pre_tokenize_str(self._reference.normalizer.normalize_str(text))
                count += sum(len(word) > MAX_WORD_CHARACTERS for word, _ in words)
        return count

    def save(self, directory: str | Path) -> None:
        """Write `vocab.txt`, `tokenizer.json`, `tokenizer_config.json` (all as `transformers` reads them), descriptor."""
        directory = Path(directory)
        write_text(directory / "vocab.txt", "".join(f"{token}\n" for token in self.tokens))
        write_text(directory / "tokenizer.json", self._exported().to_str(pretty=True) + "\n")
        config = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": self.flags.lowercase,
            "strip_accents": self.flags.strip_accents,
            "tokenize_chinese_chars": self.flags.split_cjk,
            **{
                f"{field}_token": name
                for field, name in zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL_TOKENS, strict=True)
            },
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
        """The standard tokenizer.json: special tokens matched, `[CLS] A [SEP] B [SEP]` around the text."""
        pipeline = wordpiece_pipeline(self.tokens, self.flags)
        pipeline.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
        pipeline.post_processor = processors.TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0",
            pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            special_tokens=[("[CLS]", self.cls_id), ("[SEP]", self.sep_id)],
        )
        return pipeline


def _orphans(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Matches the characters that begin an entry, plain or inside a word, without being one; None: there are none.

    Trained vocabularies have none; hand-made and cut ones do.
    """
    known = set(tokens)
    found = set()
    for token in tokens:
        prefix = PREFIX if token.startswith(PREFIX) and len(token) > len(PREFIX) else ""
        first = token[len(prefix) : len(prefix) + 1]
        if prefix + first not in known:
            found.add(first)
    return re.compile("[" + "".join(map(re.escape, sorted(found))) + "]") if found else None


def rare_characters(texts: Iterable[str]) -> str:
    """The characters of these texts from U+007F on, in order, lone surrogates left out: the only ones that need a closer look."""
    together = "".join(texts)
    found = []
    for start in range(0, len(together), _WINDOW):
        units = np.frombuffer(together[start : start + _WINDOW].encode("utf-16-le", "replace"), "<u2")
        found.append(units[units >= _FIRST_RARE].tobytes().decode("utf-16-le"))
    return "".join(found)


def count_marks(rare: str) -> int:
    """Combining marks (category Mn) in the decomposed text. No mark is ASCII, or depends on what stands beside it."""
    return sum(count * _marks(character) for character, count in Counter(rare).items())


@lru_cache(maxsize=1 << 16)
def _marks(character: str) -> int:
    return sum(unicodedata.category(part) == "Mn" for part in unicodedata.normalize("NFD", character))


def read_vocab(path: Path) -> list[str]:
    """Entries of a `vocab.txt`, one a line. Only LF (or CRLF) ends a line, as entries may hold other separators.

    Raises:
        TokenizerError: the file is missing, not UTF-8 or empty.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise TokenizerError(f"{path}: cannot read the vocabulary ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: expected UTF-8, one entry a line ({error})") from error
    tokens = [line.removesuffix("\r") for line in text.split("\n")]
    while tokens and not tokens[-1]:
        tokens.pop()
    if not tokens:
        raise TokenizerError(f"{path}: the vocabulary is empty")
    return tokens
