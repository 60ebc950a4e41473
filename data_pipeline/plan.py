"""How a build is divided, and `--dry-run`: what it would read, write and cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data_pipeline.buckets import BUCKET_TOKENS, SPLITS
from data_pipeline.config import PipelineConfig
from data_pipeline.corpus_files import InputFile
from data_pipeline.execution import local_workers
from data_pipeline.progress import BuildProgress
from data_pipeline.readers import find_inputs, is_divisible

TASK_MEGABYTES = 64
"""Text of one stage-1 task where `data.tasks` leaves it open."""
_COMPRESSION = 4.0  # gzip and zstd on English prose: 3 to 4
_BYTES_PER_TOKEN = 4.5  # English under BERT's vocabulary
_SPLIT_TOKENS_PER_SECOND = 1.2e6  # of one core: raw text with sentence splitting
_LINE_TOKENS_PER_SECOND = 1.8e6  # stage 1 of text that has one sentence a line
_ASSEMBLE_TOKENS_PER_SECOND = 8e6  # stage 2, with one mask set


def text_bytes(inputs: Sequence[InputFile]) -> float:
    """Bytes of text in these files; estimated for compressed ones."""
    return sum(file.size * (_COMPRESSION if file.compression else 1) for file in inputs)


def choose_tasks(wanted: int, workers: int, inputs: Sequence[InputFile]) -> int:
    """Input partitions of stage 1: as wanted, else one per `TASK_MEGABYTES`; where those are few, as many for each worker."""
    if wanted:
        return wanted
    size = sum(file.size for file in inputs)
    tasks = max(1, min(workers, 1 + int(size / 1e6)), round(size / (TASK_MEGABYTES * 1e6)))
    return -(-tasks // workers) * workers if workers < tasks < 4 * workers else tasks


def print_plan(config: PipelineConfig, progress: BuildProgress) -> None:
    """Print inputs, tasks, buckets, and estimates of tokens, disk and time; writes nothing.

    Raises:
        CorpusError: no input.
    """
    data = config.data
    data_dir, source_dir = Path(data.dir), Path(data.tokens_from or data.dir)
    inputs = find_inputs(config.corpus, source_dir / "corpus", materialise=False)
    size, workers = text_bytes(inputs), local_workers(data)
    tokens = size / _BYTES_PER_TOKEN
    train = tokens * (1 - config.corpus.held_out) * data.dupes
    buckets = data.buckets
    if not buckets:
        buckets = 1
        while tokens * (1 - config.corpus.held_out) > buckets * BUCKET_TOKENS:
            buckets *= 2
    tasks = choose_tasks(data.tasks, workers, inputs)
    rate = _LINE_TOKENS_PER_SECOND if config.corpus.sentences == "line" else _SPLIT_TOKENS_PER_SECOND
    first = 0.0 if data.tokens_from else tokens / rate / min(workers, tasks)
    second = train * (0.6 + 0.4 * data.mask_sets) / _ASSEMBLE_TOKENS_PER_SECOND / min(workers, buckets)
    ids = 2 if config.tokenizer.vocab_size <= 1 << 16 else 4
    per_token = ids + data.mask_prob * data.mask_sets * (ids + 2) + 0.1
    line = progress.line
    line(
        f"inputs: {len(inputs)} files, {_amount(sum(file.size for file in inputs))}, about {tokens / 1e6:.1f} M tokens"
    )
    whole = [file for file in inputs if not is_divisible(config.corpus, file)]
    if tasks > 1 and whole:
        largest = max(whole, key=lambda file: file.size)
        line(
            f"{len(whole)} of them cannot be divided and are read by one task each, the largest is {largest.path} "
            f"({_amount(largest.size)})"
        )
    if data.tokens_from:
        line(f"stage 1: that of {source_dir}")
    else:
        line(
            f"stage 1: {tasks} tasks, {workers} workers -> {source_dir / 'tokens'}, about {_amount(tokens * (ids + 0.3))}"
        )
    folders = ", ".join(str(data_dir / split) for split in SPLITS)
    line(f"stage 2: {buckets} training buckets -> {folders}, about {_amount(train * per_token)}")
    line(
        f"time: about {_duration(first)} for stage 1 and {_duration(second)} for stage 2, without training a vocabulary"
    )


def _amount(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds)) if seconds else 0} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
