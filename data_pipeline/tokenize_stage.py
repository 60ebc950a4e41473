"""Stage 1: documents -> sentences -> ids -> groups. One task per input partition, one file per task.

A step of a `datatrove` pipeline: any of its executors (local processes, Slurm arrays) runs it, marks a finished task and
skips it on a rerun. The group of a document is a range of the hash of its key, so a group is a random sample of the corpus
and does not depend on how the input was cut into tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from data_pipeline.artefacts import atomic_writer
from data_pipeline.buckets import Groups
from data_pipeline.build_state import worker_lock
from data_pipeline.stats import DROPPED
from data_pipeline.token_store import Documents, TokenWriter, id_dtype
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from data_pipeline.tokenizer_folder import read_descriptor
from data_pipeline.wordpiece import rare_characters

BATCH_CHARACTERS = 1_000_000
"""Text that is encoded at once: enough to keep the encoder busy, little beside what a segment holds."""


def batches(documents: Iterable[Document], characters: int = BATCH_CHARACTERS) -> Iterator[list[Document]]:
    """Documents in lists of about this much text."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def tokenize_batch(
    batch: list[Document], tokenizer: Tokenizer, split_sentences: Callable[[str], list[str]], counts: Counter[str]
) -> Documents:
    """Split and encode documents; those without a token are dropped and counted by reason, as are empty sentences.

    Counts: documents, documents_kept, dropped:empty, dropped:blank, dropped:no_tokens, sentences, sentences_no_tokens, tokens,
    unknown_tokens, overlong_words, removed_marks, characters.
    """
    keys: list[str] = []
    sentences: list[str] = []
    per_document: list[int] = []
    counts["documents"] += len(batch)
    rare = rare_characters(document.text for document in batch)
    counts["removed_marks"] += tokenizer.count_removed_marks(rare)
    for document in batch:
        text = document.text
        counts["characters"] += len(text)
        if not text:
            counts["dropped:empty"] += 1
        elif text.isspace():
            counts["dropped:blank"] += 1
        else:
            parts = split_sentences(text)
            keys.append(document.id)
            sentences += parts
            per_document.append(len(parts))
    ids, lengths = _encode(sentences, rare, tokenizer, counts)
    sentence_counts = np.array(per_document, np.int64)
    has_tokens = lengths > 0
    owner = np.repeat(np.arange(len(keys)), sentence_counts)
    sentence_counts = np.bincount(owner[has_tokens], minlength=len(keys))
    kept = sentence_counts > 0
    counts["dropped:no_tokens"] += len(keys) - int(kept.sum())
    counts["documents_kept"] += int(kept.sum())
    counts["sentences"] += int(has_tokens.sum())
    counts["sentences_no_tokens"] += len(sentences) - int(has_tokens.sum())
    return Documents(
        keys=[key for key, keep in zip(keys, kept.tolist(), strict=True) if keep],
        sentence_counts=sentence_counts[kept],
        sentence_lengths=lengths[has_tokens],
        ids=ids,
    )


def _encode(
    sentences: list[str], rare: str, tokenizer: Tokenizer, counts: Counter[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of all sentences end to end (N,) as they are stored, and the length of each; what is odd about them is counted.

    One huge document is encoded in parts: the encoder and the counting copy the text several times.
    """
    counts.update(dict.fromkeys(("tokens", "unknown_tokens"), 0))
    dtype = id_dtype(tokenizer.vocab_size)
    all_ids, all_lengths = [np.zeros(0, dtype)], [np.zeros(0, np.int64)]
    ends = np.cumsum(np.fromiter(map(len, sentences), np.int64, len(sentences)))
    first = 0
    while first < len(sentences):
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + 2 * BATCH_CHARACTERS, side="right")))
        part = sentences[first:last]
        ids, lengths = tokenizer.encode_flat(part, rare)
        counts["tokens"] += len(ids)
        unknown = np.flatnonzero(ids == tokenizer.unk_id)
        counts["unknown_tokens"] += len(unknown)
        if len(unknown):  # an over-long word is an unknown token, so only such sentences can hold one
            suspects = np.unique(np.searchsorted(np.cumsum(lengths), unknown, side="right"))
            counts["overlong_words"] += tokenizer.count_overlong_words([part[i] for i in suspects.tolist()])
        all_ids.append(ids.astype(dtype))
        all_lengths.append(lengths)
        first = last
    return np.concatenate(all_ids), np.concatenate(all_lengths)


def open_tokenizer(directory: Path) -> Tokenizer:
    """`load_tokenizer`, once per process for the tasks that it runs."""
    return _opened(directory, read_descriptor(directory)["fingerprint"])


@lru_cache(maxsize=1)
def _opened(directory: Path, fingerprint: str) -> Tokenizer:
    return load_tokenizer(directory)


class TokenizeStep(PipelineStep):
    """Write one stage-1 file from the documents of one task.

    Args:
        tokenizer_dir: a saved tokenizer.
        output_dir: receives `task-NNNNN.tokens`.
        groups: of both splits.
        split_sentences: text of a document -> its sentences.
        is_held_out: (document key, share) -> whether it belongs to the held-out part.
        source_counts: where the reader counts what it dropped; complete once its documents are consumed.
    """

    name = "Tokenize"
    type = "Clozeworks"

    def __init__(
        self,
        *,
        tokenizer_dir: Path,
        output_dir: Path,
        groups: Groups,
        split_sentences: Callable[[str], list[str]],
        is_held_out: Callable[[str, float], bool],
        source_counts: Counter[str],
    ) -> None:
        super().__init__()
        self.tokenizer_dir = tokenizer_dir
        self.output_dir = output_dir
        self.groups = groups
        self.split_sentences = split_sentences
        self.is_held_out = is_held_out
        self.source_counts = source_counts

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        """Consume the documents of task `rank`; yields nothing."""
        tokenizer = open_tokenizer(self.tokenizer_dir)
        counts: Counter[str] = Counter()
        with worker_lock(self.output_dir.parent), atomic_writer(task_path(self.output_dir, rank)) as file:
            writer = TokenWriter(file, groups=self.groups.count, dtype=id_dtype(tokenizer.vocab_size))
            for batch in batches(data):
                with self.track_time("batch"):
                    documents = tokenize_batch(batch, tokenizer, self.split_sentences, counts)
                    found = [self.groups.find(key, self.is_held_out) for key in documents.keys]
                    writer.add(documents, np.array(found, np.int64))
            counts.update(self.source_counts)
            counts["documents"] += sum(n for name, n in self.source_counts.items() if name.startswith(DROPPED))
            writer.close({"counts": dict(counts), "tokenizer": tokenizer.fingerprint})
        for name, value in counts.items():
            self.stat_update(name, value=value)
        yield from ()


def task_path(directory: Path, task: int) -> Path:
    """The stage-1 file of a task."""
    return directory / f"task-{task:05d}.tokens"
