"""Stage 2: one bucket -> pairs -> shuffled examples -> masks -> blocks -> shards. One task per bucket.

Documents are put in the order of their keys first, and every random number comes from (seed, split, bucket, ...), so the
bytes of a shard do not depend on tasks, workers or restarts.

Legend: `E` examples, `N` tokens, `M` mask sets.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.pipeline.base import PipelineStep

from data_pipeline.artefacts import write_text
from data_pipeline.buckets import SPLITS, Buckets
from data_pipeline.build_state import worker_lock
from data_pipeline.config import DataConfig
from data_pipeline.masking import (
    MASKED_SHARE,
    RANDOM_SHARE,
    MaskingRule,
    MaskSet,
    default_limit,
    draw_masks,
    mask_rng,
    masking_rule,
)
from data_pipeline.packing import pack_sentences, with_separators
from data_pipeline.pairs import Pairs, build_ordered_pairs, build_pairs
from data_pipeline.records import Block
from data_pipeline.shards import ShardRecord, ShardWriter
from data_pipeline.stats import BucketStats
from data_pipeline.token_store import Documents, TokenFile, id_dtype, ranges, read_groups
from data_pipeline.tokenize_stage import open_tokenizer
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.word_segmenter import segmenter_version

# What a random stream is for: the first number after the seed, so that no two uses share a stream.
_PAIRS, _ORDER, _MASKS, _DOCUMENTS = 1, 2, 3, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class AssembleSettings:
    """What stage 2 does with a bucket; each field is a key of `[data]` or the seed."""

    seed: int
    mode: str
    max_seq_length: int
    short_seq_prob: float
    mask_prob: float
    max_predictions: int
    mask_sets: int
    whole_word: bool
    span_masking: bool
    dupes: int
    block_examples: int
    shard_megabytes: float
    segmenter: str = ""
    masked_share: float = MASKED_SHARE
    random_share: float = RANDOM_SHARE

    @classmethod
    def of(cls, data: DataConfig, seed: int, split: str) -> AssembleSettings:
        """The settings of a split; held-out text gets one mask set, so that its loss is always that of the same masks."""
        return cls(
            seed=seed,
            mode=data.mode,
            max_seq_length=data.max_seq_length,
            short_seq_prob=data.short_seq_prob,
            mask_prob=data.mask_prob,
            max_predictions=data.max_predictions or default_limit(data.max_seq_length, data.mask_prob),
            mask_sets=data.mask_sets if split == "train" else 1,
            whole_word=data.whole_word,
            span_masking=data.span_masking,
            masked_share=data.masked_share,
            random_share=data.random_share,
            dupes=data.dupes if split == "train" else 1,
            block_examples=data.block_examples,
            shard_megabytes=data.shard_megabytes,
            segmenter=segmenter_version(data.segmenter),
        )


def read_bucket(files: list[TokenFile], groups: range, dtype: np.dtype) -> Documents:
    """All documents of groups in a row, ordered by key; the same however the corpus was cut into tasks.

    Documents that share a key (nothing forbids it in a JSONL file) are ordered by their ids.
    """
    documents = read_groups(files, groups, dtype)
    keys = documents.keys
    order = sorted(range(len(keys)), key=keys.__getitem__)
    if any(keys[a] == keys[b] for a, b in itertools.pairwise(order)):
        ends = np.cumsum(documents.token_counts()).tolist()
        starts = [0, *ends[:-1]]
        order.sort(key=lambda i: (keys[i], documents.ids[starts[i] : ends[i]].tobytes()))
    return documents.take(np.array(order, np.int64))


def make_examples(
    documents: Documents, settings: AssembleSettings, place: tuple[int, int], sep_id: int
) -> tuple[Documents, Pairs]:
    """The examples of all dupes of a bucket in random order, and the documents that they are ranges of.

    Args:
        documents: of the bucket, ordered by key.
        settings: of the build.
        place: number of the split, number of the bucket.
        sep_id: divides documents inside an example (mode full_sentences).

    Raises:
        SingleDocumentError: mode nsp with one document.
    """
    parts = []
    if settings.mode == "full_sentences":
        documents = with_separators(
            documents.take(_rng(settings, _DOCUMENTS, *place).permutation(len(documents.keys))), sep_id
        )
    for dupe in range(settings.dupes):
        rng = _rng(settings, _PAIRS, *place, dupe)
        if settings.mode in ("full_sentences", "doc_sentences"):
            crossing = settings.mode == "full_sentences"
            parts.append(
                pack_sentences(documents, max_seq_length=settings.max_seq_length, cross_documents=crossing, rng=rng)
            )
        else:
            build = build_pairs if settings.mode == "nsp" else build_ordered_pairs
            parts.append(
                build(
                    documents.sentence_counts,
                    documents.sentence_lengths,
                    max_seq_length=settings.max_seq_length,
                    short_seq_prob=settings.short_seq_prob,
                    rng=rng,
                )
            )
    pairs = Pairs.joined(parts)
    return documents, pairs.take(_rng(settings, _ORDER, *place).permutation(len(pairs.labels)))


def _rng(settings: AssembleSettings, *place: int) -> np.random.Generator:
    return mask_rng(settings.seed, *place)


@dataclass(frozen=True, kw_only=True, slots=True)
class IdPool:
    """The ids of a bucket with [CLS] and [SEP] behind them, so that an example is a list of ranges.

    Attributes:
        ids: (N + 2,) dtype of the stored ids.
        begins: (N + 2,) bool, tokens that begin a word; None: the vocabulary says it.
    """

    ids: np.ndarray
    begins: np.ndarray | None = None

    @classmethod
    def of(cls, documents: Documents, tokenizer: Tokenizer, segmenter: str = "") -> IdPool:
        """The pool of a bucket."""
        ids = np.append(documents.ids, np.array([tokenizer.cls_id, tokenizer.sep_id], documents.ids.dtype))
        if not segmenter:
            return cls(ids=ids)
        from data_pipeline.word_segmenter import WordSegmenter

        return cls(ids=ids, begins=np.append(WordSegmenter(tokenizer).word_begins(documents), [True, True]))

    def places(self, pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
        """Where in `ids` all pairs lie as `[CLS] A [SEP] B [SEP]` end to end (N,), and the length of each (E,).

        Where there is no second part the example is `[CLS] A [SEP]`.
        """
        one = np.ones_like(pairs.a_lengths)
        cls_at, sep_at = one * (len(self.ids) - 2), one * (len(self.ids) - 1)
        starts = np.stack([cls_at, pairs.a_starts, sep_at, pairs.b_starts, sep_at], axis=1)
        lengths = np.stack([one, pairs.a_lengths, one, pairs.b_lengths, np.minimum(pairs.b_lengths, 1)], axis=1)
        return ranges(starts.ravel(), lengths.ravel()), lengths.sum(axis=1)


def make_block(pool: IdPool, pairs: Pairs, rule: MaskingRule, generators: list[np.random.Generator]) -> Block:
    """One block: the examples of these pairs, masked once per generator."""
    places, lengths = pool.places(pairs)
    input_ids, begins = pool.ids.take(places), None if pool.begins is None else pool.begins[places]
    sets: list[MaskSet] = [draw_masks(input_ids, lengths, rule, rng, begins) for rng in generators]
    none = [np.zeros(0, np.uint16)]
    return Block(
        input_ids=input_ids,
        lengths=lengths.astype(np.uint16),
        segment_a_lengths=(pairs.a_lengths + 2).astype(np.uint16),
        nsp_labels=pairs.labels,
        mask_counts=np.array([each.counts for each in sets], np.uint16).reshape(len(sets), len(lengths)),
        mask_positions=np.concatenate(none + [each.positions for each in sets]),
        mask_inputs=np.concatenate([np.zeros(0, input_ids.dtype)] + [each.inputs for each in sets]),
    )


def write_bucket(
    documents: Documents,
    *,
    directory: Path,
    split: str,
    bucket: int,
    tokenizer: Tokenizer,
    settings: AssembleSettings,
) -> tuple[list[ShardRecord], BucketStats]:
    """Write all shards of a bucket.

    Raises:
        SingleDocumentError: the bucket holds one document.
    """
    place = SPLITS.index(split), bucket
    rule = masking_rule(tokenizer, asdict(settings))
    stats = BucketStats.empty(settings.max_seq_length)
    records: list[ShardRecord] = []
    if not documents.keys:
        return records, stats
    stats.count_documents(documents)
    documents, pairs = make_examples(documents, settings, place, tokenizer.sep_id)
    stats.count_pairs(pairs)
    pool = IdPool.of(documents, tokenizer, settings.segmenter)
    writer: ShardWriter | None = None
    try:
        for number, start in enumerate(range(0, len(pairs.labels), settings.block_examples)):
            chosen = pairs.take(slice(start, start + settings.block_examples))
            generators = [mask_rng(settings.seed, _MASKS, *place, number, s) for s in range(settings.mask_sets)]
            block = make_block(pool, chosen, rule, generators)
            stats.count_block(block, tokenizer)
            if writer is None:
                writer = ShardWriter(directory, f"shard-{bucket:05d}-{len(records):04d}.tar")
            writer.add(f"{bucket:05d}-{number:07d}", block)
            if writer.bytes >= settings.shard_megabytes * 1e6:
                records.append(writer.close())
                writer = None
        if writer is not None:
            records.append(writer.close())
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise
    return records, stats


class AssembleStep(PipelineStep):
    """Write the shards of one bucket; what was written is noted in a part file beside the completion marker.

    Args:
        token_files: stage-1 files of all tasks.
        tokenizer_dir: the tokenizer that stage 1 used.
        output_dir: receives `train/` and `validation/`.
        parts_dir: receives one JSON file per bucket.
        buckets: of both splits; each is a task.
        settings: per split.
    """

    name = "Assemble"
    type = "Clozeworks"

    def __init__(
        self,
        *,
        token_files: list[Path],
        tokenizer_dir: Path,
        output_dir: Path,
        parts_dir: Path,
        buckets: Buckets,
        settings: dict[str, AssembleSettings],
    ) -> None:
        super().__init__()
        self.token_files = token_files
        self.tokenizer_dir = tokenizer_dir
        self.output_dir = output_dir
        self.parts_dir = parts_dir
        self.buckets = buckets
        self.settings = settings

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        """Assemble bucket `rank`; yields nothing."""
        split, bucket = self.buckets.place(rank)
        if split in self.settings:
            with worker_lock(self.output_dir):
                self._write(split, bucket)
        yield from ()

    def _write(self, split: str, bucket: int) -> None:
        tokenizer = open_tokenizer(self.tokenizer_dir)
        files = [TokenFile(path) for path in self.token_files]
        records, stats = write_bucket(
            read_bucket(files, self.buckets.groups_of(split, bucket), id_dtype(tokenizer.vocab_size)),
            directory=self.output_dir / split,
            split=split,
            bucket=bucket,
            tokenizer=tokenizer,
            settings=self.settings[split],
        )
        part = {"shards": [record.to_json() for record in records], "stats": stats.to_json()}
        write_text(part_path(self.parts_dir, split, bucket), json.dumps(part))


def part_path(directory: Path, split: str, bucket: int) -> Path:
    """The note on one bucket."""
    return directory / f"{split}-{bucket:05d}.json"
