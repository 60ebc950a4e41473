"""`python -m data_pipeline.build --config FILE`: raw text to verified shards.

corpus -> tokenizer -> stage 1 (tokens, by bucket) -> stage 2 (shards) -> statistics and index, per split. Whatever is
complete is reused, and a killed build goes on where it was. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.artefacts import write_text
from data_pipeline.assemble_stage import SPLITS, AssembleSettings, AssembleStep, part_path
from data_pipeline.block_codec import ShardError
from data_pipeline.build_state import (
    BuildError,
    build_lock,
    claim_stage,
    remove_leftovers,
    settle_tasks,
)
from data_pipeline.config import ConfigError, PipelineConfig, add_config_arguments, load_pipeline_config
from data_pipeline.execution import run_tasks
from data_pipeline.masking import default_limit
from data_pipeline.pairs import SingleDocumentError
from data_pipeline.progress import BuildProgress
from data_pipeline.readers import CorpusError, ReadStep, find_inputs, is_held_out, read_documents
from data_pipeline.sentences import split_sentences
from data_pipeline.shard_index import DatasetInfo, ShardIndex, write_index
from data_pipeline.shards import ShardRecord
from data_pipeline.stats import BucketStats, render, warnings
from data_pipeline.token_store import TokenFile, TokenStoreError
from data_pipeline.tokenize_stage import Groups, TokenizeStep, open_tokenizer, task_path
from data_pipeline.tokenizer import Tokenizer, TokenizerError, import_tokenizer
from data_pipeline.tokenizer_folder import DESCRIPTOR
from data_pipeline.vocabulary import train_vocabulary

TASK_MEGABYTES = 64
"""Text of one stage-1 task where `data.tasks` leaves it open."""
USER_ERRORS = (
    ConfigError,
    BuildError,
    CorpusError,
    TokenizerError,
    TokenStoreError,
    ShardError,
    SingleDocumentError,
)


class Build:
    """One build of one configuration.

    Attributes:
        config: the pipeline's tables.
        data_dir: `data.dir`.
        groups: splits and buckets.
        inputs: files of the corpus.
        workers, tasks: of this run; they never change the output.
    """

    def __init__(self, config: PipelineConfig, progress: BuildProgress) -> None:
        self.config = config
        self.progress = progress
        self.data_dir = Path(config.data.dir)
        self.tokenizer_dir = self.data_dir / "tokenizer"
        self.tokens_dir = self.data_dir / "tokens"
        self.assemble_dir = self.data_dir / "assemble"
        self.groups = Groups.of(config.data.buckets, config.corpus.held_out)
        self.workers = config.data.workers or len(os.sched_getaffinity(0))

    def run(self) -> None:
        """Build what is missing.

        Raises:
            One of `USER_ERRORS`, or OSError (a full disk).
        """
        with build_lock(self.data_dir):
            if self.config.corpus.source == "embedded":
                size = {"max_megabytes": self.config.corpus.max_megabytes}
                claim_stage(self.data_dir, "corpus", {"corpus": size}, ("corpus",))
            corpus_dir = self.data_dir / "corpus"
            if self.config.corpus.source == "embedded" and not corpus_dir.exists():
                with self.progress.stage("corpus: reading the documentation in this installation"):
                    self.inputs = find_inputs(self.config.corpus, corpus_dir)
            else:
                self.inputs = find_inputs(self.config.corpus, corpus_dir)
            tokenizer = self._tokenizer()
            files = self._tokenize(tokenizer)
            splits = self._check_documents(files)
            self._assemble(tokenizer, files, splits)

    def _tokenizer(self) -> Tokenizer:
        """The saved tokenizer; trained on the training part of the corpus, or imported, where there is none."""
        config = self.config.tokenizer
        settings = config.model_dump(mode="json")
        if not config.path:
            settings |= {"seed": self.config.seed, "corpus": self._corpus_settings()}
        claim_stage(self.data_dir, "tokenizer", settings, ("tokenizer",))
        remove_leftovers(self.tokenizer_dir)
        if (self.tokenizer_dir / DESCRIPTOR).exists():
            tokenizer = open_tokenizer(self.tokenizer_dir)
            self.progress.line(f"tokenizer: {self.tokenizer_dir} is complete ({tokenizer.vocab_size} entries)")
            return tokenizer
        if config.path:
            import_tokenizer(config.path, config).save(self.tokenizer_dir)
            self.progress.line(f"tokenizer: imported {config.path}")
        else:
            with self.progress.stage("tokenizer: training"):
                report = train_vocabulary(self._training_texts(), config, self.config.seed, self.tokenizer_dir)
            self.progress.line(f"tokenizer: {report.message()}")
        return open_tokenizer(self.tokenizer_dir)

    def _training_texts(self) -> Iterator[str]:
        corpus = self.config.corpus
        for document in read_documents(corpus, self.inputs):
            if not (corpus.held_out and is_held_out(document.id, corpus.held_out)):
                yield document.text

    def _corpus_settings(self) -> dict[str, Any]:
        inputs = [[file.path, file.size, file.modified] for file in self.inputs]
        return self.config.corpus.model_dump(mode="json") | {"inputs": inputs}

    def _tokenize(self, tokenizer: Tokenizer) -> list[Path]:
        """Stage 1; the files of all tasks."""
        config = self.config
        settings = {
            "corpus": self._corpus_settings(),
            "tokenizer": tokenizer.fingerprint,
            "data": {"buckets": config.data.buckets},
        }
        claim_stage(self.data_dir, "tokens", settings, ("tokens",))
        finished = self.tokens_dir / "complete"
        tasks = settle_tasks(self.tokens_dir, self._tasks(), finished.exists())
        files = [task_path(self.tokens_dir, task) for task in range(tasks)]
        if finished.exists():
            self.progress.line(f"stage 1: {self.tokens_dir} is complete")
            return files
        remove_leftovers(self.tokens_dir)
        read = ReadStep(config.corpus, self.inputs)
        steps = [
            read,
            TokenizeStep(
                tokenizer_dir=self.tokenizer_dir,
                output_dir=self.tokens_dir,
                groups=self.groups,
                split_sentences=partial(split_sentences, method=config.corpus.sentences),
                is_held_out=is_held_out,
                source_counts=read.counts,
            ),
        ]
        with self.progress.stage("stage 1: tokenize") as advance:
            run_tasks(
                steps, tasks=tasks, workers=self.workers, state_dir=self.tokens_dir / "state", on_progress=advance
            )
        write_text(finished, "")
        return files

    def _tasks(self) -> int:
        if self.config.data.tasks:
            return self.config.data.tasks
        size = sum(file.size for file in self.inputs)
        return max(1, min(self.workers, 1 + int(size / 1e6)), round(size / (TASK_MEGABYTES * 1e6)))

    def _corpus_counts(self, files: list[Path]) -> Counter[str]:
        total: Counter[str] = Counter()
        for path in files:
            total.update(TokenFile(path).footer["counts"])
        return total

    def _check_documents(self, files: list[Path]) -> list[str]:
        """The splits to build, from the documents that stage 1 kept.

        Raises:
            BuildError: no document, a single one, or a bucket with a single one.
        """
        per_group = sum((TokenFile(path).documents_per_group() for path in files), np.zeros(self.groups.count, int))
        data = self.config.data
        splits = []
        for split in SPLITS:
            found = per_group[list(self.groups.of_split(split))]
            total = int(found.sum())
            least = 2 if data.mode == "nsp" else 1
            if total < least and split == "validation":
                if self.config.corpus.held_out:
                    self.progress.line(f"warning: {total} documents are held out, too few: no validation set")
                continue
            if total == 0:
                raise BuildError(f"the corpus is empty: {_reasons(self._corpus_counts(files))}")
            if total < least:
                raise BuildError(
                    "the corpus has a single document for training: a random second part must come from another "
                    "document. Give it more, or divide it with blank lines (corpus.source = 'text')"
                )
            if data.mode == "nsp" and (found == 1).any():
                raise BuildError(
                    f"{int((found == 1).sum())} of {len(found)} {split} buckets hold a single document ({total} in all), "
                    f"so their pairs have no other document to draw from: set data.buckets below {data.buckets}"
                )
            splits.append(split)
        return splits

    def _assemble_settings(self, split: str) -> AssembleSettings:
        data = self.config.data
        return AssembleSettings(
            seed=self.config.seed,
            mode=data.mode,
            max_seq_length=data.max_seq_length,
            short_seq_prob=data.short_seq_prob,
            mask_prob=data.mask_prob,
            max_predictions=data.max_predictions or default_limit(data.max_seq_length, data.mask_prob),
            mask_sets=data.mask_sets if split == "train" else 1,  # held-out loss is always that of the same masks
            whole_word=data.whole_word,
            span_masking=data.span_masking,
            dupes=data.dupes if split == "train" else 1,
            block_examples=data.block_examples,
            shard_megabytes=data.shard_megabytes,
        )

    def _assemble(self, tokenizer: Tokenizer, files: list[Path], splits: list[str]) -> None:
        """Stage 2, then statistics and index of each split."""
        settings = {split: self._assemble_settings(split) for split in splits}
        noted = {split: asdict(value) for split, value in settings.items()}
        tokens = json.loads((self.data_dir / "build.json").read_bytes())["tokens"]
        claim_stage(self.data_dir, "shards", {"tokens": tokens, **noted}, ("assemble", *splits))
        unfinished = [split for split in splits if not (self.data_dir / split / "index.json").exists()]
        if unfinished:
            for folder in (self.assemble_dir, *(self.data_dir / split for split in splits)):
                folder.mkdir(exist_ok=True)
                remove_leftovers(folder)
            step = AssembleStep(
                token_files=files,
                tokenizer_dir=self.tokenizer_dir,
                output_dir=self.data_dir,
                parts_dir=self.assemble_dir,
                groups=self.groups,
                settings=settings,
            )
            with self.progress.stage("stage 2: assemble") as advance:
                run_tasks(
                    [step],
                    tasks=self.groups.count,
                    workers=self.workers,
                    state_dir=self.assemble_dir / "state",
                    on_progress=advance,
                )
        for split in splits:
            folder = self.data_dir / split
            if split in unfinished:
                self._finish(split, settings[split], tokenizer, files)
            index = ShardIndex.open(folder)
            self.progress.line(_summary(folder, index, "built" if split in unfinished else "complete"))
            index.close()

    def _finish(self, split: str, settings: AssembleSettings, tokenizer: Tokenizer, files: list[Path]) -> None:
        """Write `stats.json` and, last, the index."""
        folder = self.data_dir / split
        buckets = range(len(self.groups.of_split(split)))
        parts = [json.loads(part_path(self.assemble_dir, split, bucket).read_bytes()) for bucket in buckets]
        records = [ShardRecord.from_json(shard) for part in parts for shard in part["shards"]]
        if strangers := {path.name for path in folder.glob("*.tar")} - {record.name for record in records}:
            raise BuildError(f"{folder}: holds {min(strangers)}, which this build did not write; remove it")
        merged = BucketStats.merged((part["stats"] for part in parts), settings.max_seq_length)
        stats = render(self._corpus_counts(files), merged, settings.mask_sets)
        for warning in warnings(stats, whole_word=settings.whole_word):
            self.progress.line(f"warning: {split}: {warning}")
        write_text(folder / "stats.json", json.dumps(stats, indent=1) + "\n")
        special = {name: getattr(tokenizer, f"{name}_id") for name in ("pad", "unk", "cls", "sep", "mask")}
        corpus = self.config.corpus.model_dump(mode="json", exclude={"paths"})  # where files lie is not what they hold
        info = DatasetInfo(
            settings={
                "split": split,
                "corpus": corpus,
                "buckets": self.config.data.buckets,
                **asdict(settings),
            },
            tokenizer=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            special_ids=special,
            max_seq_length=settings.max_seq_length,
            mask_sets=settings.mask_sets,
        )
        write_index(folder, records, info).close()

    def plan(self) -> None:
        """Print what `run` would do; writes nothing."""
        self.inputs = find_inputs(self.config.corpus, self.data_dir / "corpus", materialise=False)
        size = sum(file.size for file in self.inputs)
        data = self.config.data
        tokens = size / 4.5  # bytes per token of English under a BERT vocabulary
        per_token = 2 + 0.15 * 4 * data.mask_sets
        line = self.progress.line
        line(f"inputs: {len(self.inputs)} files, {size / 1e6:.1f} MB")
        line(f"stage 1: {self._tasks()} tasks, {self.workers} workers -> {self.tokens_dir}")
        line(f"stage 2: {self.groups.count} buckets -> {', '.join(str(self.data_dir / split) for split in SPLITS)}")
        line(
            f"about {tokens / 1e6:.1f} M tokens, {tokens * 2 / 1e6:.1f} MB of stage 1 and "
            f"{tokens * per_token * 1.3 * data.dupes / 1e6:.1f} MB of shards"
        )


def _reasons(counts: Counter[str]) -> str:
    dropped = {name.partition(":")[2]: value for name, value in sorted(counts.items()) if name.startswith("dropped:")}
    reasons = ", ".join(f"{value} {name}" for name, value in dropped.items() if value)
    return f"{counts['documents']} documents read" + (f", dropped: {reasons}" if reasons else "")


def _summary(folder: Path, index: ShardIndex, state: str) -> str:
    return (
        f"{folder.name}: {state}, {index.examples} examples, {index.tokens / 1e6:.2f} M tokens, "
        f"{len(index.shards)} shards in {folder}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code is 2 where the input or the configuration is at fault, 1 for the machine."""
    parser = argparse.ArgumentParser(prog="python -m data_pipeline.build", description=__doc__.split("\n")[0])
    add_config_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        build = Build(load_pipeline_config(options.config, options.overrides), BuildProgress())
        if options.dry_run:
            build.plan()
            return 0
        build.run()
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, BrokenProcessPool) as error:
        print(f"error: {error}; the next run goes on from here", file=sys.stderr)
        return 1
    build.progress.line(f"finished in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
