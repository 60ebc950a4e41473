"""Which documents repeat others: by the hash of their text, and by MinHash.

MinHash with bands (Broder 1997; Leskovec et al., Mining of Massive Datasets, chapter 3, http://www.mmds.org/) in FineWeb's
setting (Penedo et al. 2024, https://arxiv.org/abs/2406.17557): 5-grams, 14 bands of 8 hashes, which finds a pair that
shares 75 % of its 5-grams with a chance of 77 %, one of 85 % with 99 %. datatrove has these steps too, but which document of
a cluster it keeps depends on the number of tasks; here it depends on the documents alone.

Legend: `D` documents, `B` bands.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from data_pipeline.ngrams import mixed, ngram_hashes

BANDS = 14
HASHES_PER_BAND = 8
WORDS = 5
_CHUNK = 1 << 14
_SEEDS = np.random.Generator(np.random.PCG64(1)).integers(0, 1 << 63, (1, BANDS * HASHES_PER_BAND), np.uint64)


def signature(hashes: np.ndarray) -> np.ndarray:
    """(B,) uint64, one value for each band; documents are near duplicates where they agree in one.

    Args:
        hashes: (W,) of the document's words, at least one.
    """
    grams = np.unique(ngram_hashes(hashes, min(WORDS, len(hashes))))
    least = np.full(BANDS * HASHES_PER_BAND, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(grams), _CHUNK):  # a book has more n-grams than fit in memory with all hash functions
        block = mixed(grams[start : start + _CHUNK, None] ^ _SEEDS)
        least = np.minimum(least, block.min(axis=0))
    bands = least.reshape(BANDS, HASHES_PER_BAND)
    return np.array([ngram_hashes(band, HASHES_PER_BAND)[0] for band in bands], np.uint64)


def same_text(keys: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Documents to drop as exact copies: (their places in `keys`, the places of what they repeat).

    Args:
        keys: (D,) uint64, hash of each document's id; of equal documents that with the least is kept.
        texts: (D,) uint64, hash of each document's text.
    """
    order = np.lexsort((keys, texts))
    first = np.flatnonzero(np.concatenate([[True], texts[order][1:] != texts[order][:-1]]))
    owner = order[np.repeat(first, np.diff(np.append(first, len(order))))]
    repeated = keys[order] != keys[owner]  # one id that occurs twice is not told apart
    return order[repeated], owner[repeated]


def clusters(keys: np.ndarray, band_values: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Documents to drop as near copies: (their places in `keys`, the place of what is kept of the cluster).

    Args:
        keys: (D,) uint64, hash of each document's id; of a cluster that with the least is kept.
        band_values: B arrays (D,) uint64, the bands of the signatures; held one at a time.
    """
    left: list[np.ndarray] = []
    right: list[np.ndarray] = []
    for values in band_values:
        order = np.argsort(values, kind="stable")
        equal = values[order][1:] == values[order][:-1]
        left.append(order[:-1][equal])
        right.append(order[1:][equal])
    from scipy.sparse import coo_array  # loads for a second, and every build imports this file
    from scipy.sparse.csgraph import connected_components

    edges = (np.concatenate(left), np.concatenate(right))
    graph = coo_array((np.ones(len(edges[0]), np.int8), edges), shape=(len(keys), len(keys)))
    _, labels = connected_components(graph, directed=False)
    return same_text(keys, labels.astype(np.uint64))
