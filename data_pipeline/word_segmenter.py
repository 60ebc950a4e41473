"""Where words begin in text without white space: the boundaries of a segmenter, for tokens that are ids already.

Chinese BERT with whole-word masking (Cui et al. 2019, https://arxiv.org/abs/1906.08101): the tokens stay characters, those
of one word are masked together. The text is put together again from the ids, sentence by sentence, so stage 1 and its files know
nothing of it.

Legend: `N` tokens, `V` vocabulary.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np

from data_pipeline.config import ConfigError
from data_pipeline.token_store import Documents
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer_folder import TokenizerError

# What jieba's dictionary and model are about; other scripts keep the boundaries of the vocabulary.
_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_STARTS = {"unigram": "\u2581", "bpe": "\u2581"}
_CONTINUES = {"wordpiece": "##"}


def segmenter_version(name: str) -> str:
    """Name and version of a segmenter, as the settings of a data set note it; "" for none.

    Raises:
        ConfigError: it is not installed; the message has the command.
    """
    if not name:
        return ""
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"data.segmenter = {name!r}: not installed in this environment: pip install {name}")
    return f"{name} {importlib.metadata.version(name)}"


@cache
def _jieba() -> Any:
    """jieba with its own dictionary (a second to load), without its cache file in the temporary folder of all users."""
    import jieba

    segmenter = jieba.Tokenizer()
    segmenter.FREQ, segmenter.total = segmenter.gen_pfdict(segmenter.get_dict_file())
    segmenter.initialized = True
    return segmenter


class WordSegmenter:
    """Word boundaries of jieba for the tokens of a vocabulary.

    Args:
        tokenizer: WordPiece or SentencePiece.

    Raises:
        TokenizerError: byte-level BPE, whose tokens can be parts of a character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.kind not in {*_STARTS, *_CONTINUES}:
            raise TokenizerError(
                f"data.segmenter needs tokens of whole characters: tokenizer.kind must be wordpiece, unigram or bpe, not "
                f"{tokenizer.kind}"
            )
        start, more = _STARTS.get(tokenizer.kind), _CONTINUES.get(tokenizer.kind)
        structural = np.ones(tokenizer.vocab_size, bool)
        structural[tokenizer.ordinary_ids] = False
        self._word_starts = tokenizer.word_starts
        self._text: list[str] = []
        for token, special in zip(tokenizer.tokens, structural.tolist(), strict=True):
            if special:
                token = " "
            elif start:
                token = token.replace(start, " ")
            elif more and token.startswith(more):
                token = token.removeprefix(more)
            elif not _HAN.match(token):
                token = " " + token
            self._text.append(token)
        self._han = np.array([_HAN.search(token) is not None for token in self._text])

    def word_begins(self, documents: Documents) -> np.ndarray:
        """(N,) bool: tokens that begin a word, where a Chinese character is involved by the segmenter, else as the vocabulary says."""
        begins = self._word_starts[documents.ids]
        han = self._han[documents.ids]
        decided = han.copy()
        decided[1:] |= han[:-1]
        ends = np.cumsum(documents.sentence_lengths)
        with_han = np.add.reduceat(han, ends - documents.sentence_lengths, dtype=np.int64) if len(ends) else ends
        for sentence in np.flatnonzero(with_han).tolist():
            end = int(ends[sentence])
            first = end - int(documents.sentence_lengths[sentence])
            pieces = [self._text[index] for index in documents.ids[first:end].tolist()]
            words = set(accumulate(map(len, _jieba().cut("".join(pieces))), initial=0))
            # A piece with a space in front begins behind it.
            starts = accumulate(map(len, pieces), initial=0)
            at = [start + len(piece) - len(piece.lstrip(" ")) for start, piece in zip(starts, pieces, strict=False)]
            found = np.fromiter((place in words for place in at), bool, len(at))
            here = slice(first, end)
            begins[here] = np.where(decided[here], found, begins[here])
        return begins
