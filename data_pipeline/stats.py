"""`stats.json`: what a build read, dropped, cut, paired and masked. `python -m data_pipeline.stats DIR` shows it as a page.

Legend: `E` examples, `N` tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.pairs import NEXT, RANDOM, Pairs
from data_pipeline.records import Block
from data_pipeline.token_store import Documents
from data_pipeline.tokenizer import Tokenizer

SCHEMA = 1
HISTOGRAM_BINS = 16
DROPPED = "dropped:"
"""Prefix of a count of dropped documents; what follows is the reason."""
_NOTED = {
    "unknown_tokens": "unknown tokens",
    "overlong_words": "over-long words",
    "removed_marks": "combining marks removed",
    "undecodable_bytes": "undecodable bytes replaced",
}


@dataclass(kw_only=True, slots=True)
class BucketStats:
    """Counts of one bucket; they add up over buckets.

    Attributes:
        counts: named counts, see the methods.
        lengths: (max_seq_length + 1,) int64, examples of each length.
    """

    counts: Counter[str] = field(default_factory=Counter)
    lengths: np.ndarray

    @classmethod
    def empty(cls, max_seq_length: int) -> BucketStats:
        """No examples yet."""
        return cls(lengths=np.zeros(max_seq_length + 1, np.int64))

    def count_documents(self, documents: Documents) -> None:
        """Count a bucket's documents."""
        self.counts["documents"] += len(documents.keys)
        self.counts["documents_same_key"] += len(documents.keys) - len(set(documents.keys))
        self.counts["corpus_tokens"] += len(documents.ids)

    def count_pairs(self, pairs: Pairs) -> None:
        """Count what making examples did with the documents."""
        self.counts["truncated_tokens"] += pairs.truncated
        self.counts["forced_random"] += pairs.forced_random

    def count_block(self, block: Block, tokenizer: Tokenizer) -> None:
        """Count a block's examples and predictions."""
        self.counts["examples"] += block.examples
        self.counts["tokens"] += block.tokens
        self.counts["nsp_next"] += int((block.nsp_labels == NEXT).sum())
        self.counts["nsp_random"] += int((block.nsp_labels == RANDOM).sum())
        self.counts["continuation_tokens"] += block.tokens - int(
            np.count_nonzero(tokenizer.word_starts.take(block.input_ids))
        )
        self.lengths += np.bincount(block.lengths, minlength=len(self.lengths))
        lengths = block.lengths.astype(np.int64)
        starts = np.tile(np.cumsum(lengths) - lengths, len(block.mask_counts))
        at = np.repeat(starts, block.mask_counts.ravel()) + block.mask_positions
        masked = int((block.mask_inputs == tokenizer.mask_id).sum())
        kept = int((block.mask_inputs == block.input_ids[at]).sum())
        self.counts["predictions"] += len(at)
        self.counts["masked"] += masked
        self.counts["kept"] += kept
        self.counts["randomised"] += len(at) - masked - kept

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists."""
        return {"counts": dict(self.counts), "lengths": self.lengths.tolist()}

    @classmethod
    def merged(cls, parts: Iterable[Mapping[str, Any]], max_seq_length: int) -> BucketStats:
        """The sum of what `to_json` gave for each bucket."""
        total = cls.empty(max_seq_length)
        for part in parts:
            total.counts.update(part["counts"])
            total.lengths += np.array(part["lengths"], np.int64)
        return total


def render(corpus: Mapping[str, int], examples: BucketStats, mask_sets: int) -> dict[str, Any]:
    """The content of `stats.json`.

    Args:
        corpus: summed counts of stage 1, both splits; reasons for dropping a document begin with `DROPPED`.
        examples: the split's buckets summed.
        mask_sets: number of mask sets; predictions are those of all sets.
    """
    counts = examples.counts
    pairs = counts["nsp_next"] + counts["nsp_random"]
    dropped = {name.removeprefix(DROPPED): value for name, value in sorted(corpus.items()) if name.startswith(DROPPED)}
    text = {name: value for name, value in sorted(corpus.items()) if not name.startswith(DROPPED)}
    width = -(-len(examples.lengths) // HISTOGRAM_BINS)
    padded = np.zeros(width * HISTOGRAM_BINS, np.int64)
    padded[: len(examples.lengths)] = examples.lengths
    return {
        "schema": SCHEMA,
        "corpus": {
            "documents": text.pop("documents", 0),
            "documents_kept": text.pop("documents_kept", 0),
            "documents_dropped": dropped,
            **text,
        },
        "documents": counts["documents"],
        "documents_same_key": counts["documents_same_key"],
        "corpus_tokens": counts["corpus_tokens"],
        "examples": counts["examples"],
        "tokens": counts["tokens"],
        "truncated_tokens": counts["truncated_tokens"],
        "nsp": {
            "next": counts["nsp_next"],
            "random": counts["nsp_random"],
            "random_share": _share(counts["nsp_random"], pairs),
            "random_for_want_of_a_next_sentence": counts["forced_random"],
        },
        "masking": {
            "sets": mask_sets,
            "predictions": counts["predictions"],
            "share_of_tokens": _share(counts["predictions"], counts["tokens"] * mask_sets),
            "masked_share": _share(counts["masked"], counts["predictions"]),
            "random_share": _share(counts["randomised"], counts["predictions"]),
            "kept_share": _share(counts["kept"], counts["predictions"]),
        },
        "continuation_share": _share(counts["continuation_tokens"], counts["tokens"]),
        "lengths": {"bin_width": width, "examples": padded.reshape(HISTOGRAM_BINS, width).sum(axis=1).tolist()},
    }


def corpus_summary(counts: Mapping[str, int]) -> str:
    """What stage 1 read and lost, in one line; counts of 0 are left out."""
    dropped = {name.removeprefix(DROPPED): value for name, value in sorted(counts.items()) if name.startswith(DROPPED)}
    reasons = ", ".join(f"{value} {name}" for name, value in dropped.items() if value)
    parts = [f"{counts.get('documents', 0)} documents read" + (f", dropped: {reasons}" if reasons else "")]
    parts.append(f"{counts.get('tokens', 0) / 1e6:.2f} M tokens in {counts.get('sentences', 0)} sentences")
    for name, words in _NOTED.items():
        if counts.get(name):
            parts.append(f"{counts[name]} {words}")
    return "; ".join(parts)


def warnings(stats: Mapping[str, Any], *, whole_word: bool) -> list[str]:
    """What a person should know about a build, one sentence each."""
    found = []
    if whole_word and stats["continuation_share"] < 0.001:
        found.append(
            "data.whole_word has no effect here: "
            f"{stats['continuation_share']:.2%} of the tokens continue a word (text without word pieces, such as Chinese, "
            "needs data.segmenter)"
        )
    pairs = stats["nsp"]["next"] + stats["nsp"]["random"]
    if pairs and abs(stats["nsp"]["random_share"] - 0.5) > 0.02 + 2 / pairs:
        found.append(
            f"{stats['nsp']['random_share']:.0%} of the pairs are random, not half: "
            f"{stats['nsp']['random_for_want_of_a_next_sentence']} chunks were one sentence long"
        )
    if stats["documents_same_key"]:
        found.append(f"{stats['documents_same_key']} documents share their key with another")
    lost = _share(stats["truncated_tokens"], stats["corpus_tokens"])
    if lost > 0.2:
        found.append(f"truncation cut off {lost:.0%} of the tokens; are sentences longer than data.max_seq_length?")
    return found


def _share(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code is 2 where there is no data set to report on."""
    from data_pipeline.block_codec import ShardError
    from data_pipeline.corpus_report import write_corpus_report
    from data_pipeline.tokenizer import TokenizerError

    parser = argparse.ArgumentParser(
        prog="python -m data_pipeline.stats",
        description="Write the HTML report of a data set, with its figures inside.",
    )
    parser.add_argument("path", type=Path, help="data.dir of a build, or a folder with index.json")
    parser.add_argument("--output", type=Path, help="the file; default: corpus.html in data.dir")
    options = parser.parse_args(arguments)
    try:
        print(write_corpus_report(options.path, options.output))
    except (ShardError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
