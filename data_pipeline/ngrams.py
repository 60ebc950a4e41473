"""Words of a text as hashes, and hashes of their n-grams: what near-duplicate removal and decontamination compare.

Legend: `W` words of a text, `G` n-grams.
"""

from __future__ import annotations

import re
import zlib

import numpy as np

_CJK = r"\u2e80-\u312f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# Text without white space has no words to see: its characters stand for them.
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def words_of(text: str) -> list[str]:
    """Words in lower case without punctuation; each CJK character is one."""
    return _WORD.findall(text.lower())


def word_hashes(words: list[str]) -> np.ndarray:
    """(W,) uint64."""
    return mixed(np.fromiter((zlib.crc32(w.encode("utf-8", "replace")) for w in words), np.uint64, len(words)))


def ngram_hashes(hashes: np.ndarray, n: int) -> np.ndarray:
    """(G,) uint64 of all runs of `n` words, G = max(0, W - n + 1)."""
    count = max(0, len(hashes) - n + 1)
    total = np.zeros(count, np.uint64)
    for offset in range(n):
        total = total * _STEP + hashes[offset : offset + count]
    return mixed(total)


def mixed(values: np.ndarray) -> np.ndarray:
    """The bits of each value spread over all 64 (the last steps of SplitMix64, https://prng.di.unimi.it/splitmix64.c)."""
    values = (values + _STEP) ^ ((values + _STEP) >> np.uint64(30))
    values = values * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))
