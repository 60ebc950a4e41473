"""`python -m data_pipeline.build --config FILE`: raw text to verified shards.

corpus -> tokenizer -> stage 1 (tokens, by bucket) -> stage 2 (shards) -> statistics and index, per split. Whatever is
complete is reused, and a killed build goes on where it was. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import json
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
from data_pipeline.assemble_stage import AssembleSettings, AssembleStep, part_path
from data_pipeline.block_codec import ShardError
from data_pipeline.buckets import SPLITS, BucketError, Groups, choose_buckets
from data_pipeline.build_state import (
    BuildError,
    build_lock,
    claim_stage,
    remove_leftovers,
    require_stage,
    settle_tasks,
)
from data_pipeline.clean_stage import DROPPED_NAME, INDEX_NAME, REPORT_NAME, CleanStep, DroppedDocuments, merge_notes
from data_pipeline.config import ConfigError, PipelineConfig, add_config_arguments, load_pipeline_config
from data_pipeline.corpus_files import find_files
from data_pipeline.csv_rows import with_row_starts
from data_pipeline.decontamination import MIN_WORDS, build_index
from data_pipeline.execution import keep_imports, local_workers, run_tasks, start_early
from data_pipeline.pairs import SingleDocumentError
from data_pipeline.plan import choose_tasks, print_plan, text_bytes
from data_pipeline.progress import BuildProgress
from data_pipeline.readers import CorpusError, InputFile, ReadStep, find_inputs, is_held_out, read_documents
from data_pipeline.sentences import split_sentences
from data_pipeline.shard_index import DatasetInfo, ShardIndex, write_index
from data_pipeline.shards import ShardRecord
from data_pipeline.stats import BucketStats, corpus_summary, render, warnings
from data_pipeline.token_store import TokenFile, TokenStoreError
from data_pipeline.tokenize_stage import TokenizeStep, open_tokenizer, task_path
from data_pipeline.tokenizer import Tokenizer, TokenizerError, import_tokenizer, load_tokenizer
from data_pipeline.tokenizer_folder import DESCRIPTOR
from data_pipeline.vocabulary import train_vocabulary
from data_pipeline.word_segmenter import WordSegmenter, segmenter_version

USER_ERRORS = (
    ConfigError,
    BuildError,
    BucketError,
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
        source_dir: whose stage 1 is used, `data_dir` or `data.tokens_from`.
        inputs: files of the corpus.
        dropped: list of the documents that cleaning leaves out, None where nothing is cleaned.
        groups: of stage 1, once it is settled.
    """

    def __init__(self, config: PipelineConfig, progress: BuildProgress) -> None:
        self.config = config
        self.progress = progress
        self.data_dir = Path(config.data.dir)
        self.tokenizer_dir = self.data_dir / "tokenizer"
        self.source_dir = Path(config.data.tokens_from or config.data.dir)
        self.tokens_dir = self.source_dir / "tokens"
        self.assemble_dir = self.data_dir / "assemble"

    def run(self) -> None:
        """Build what is missing.

        Raises:
            One of `USER_ERRORS`, or OSError (a full disk).
        """
        segmenter_version(self.config.data.segmenter)  # known to be there before hours of work
        with build_lock(self.data_dir):
            if not (self.data_dir / "train" / "index.json").exists():
                start_early(self.config.data)
            self.inputs = self._inputs()
            self.dropped = self._clean()
            tokenizer = self._tokenizer()
            if self.config.data.segmenter:
                WordSegmenter(tokenizer)  # refuses a vocabulary that it cannot work with
            files = self._tokenize(tokenizer)
            self.progress.line(f"corpus: {corpus_summary(self._corpus_counts(files))}")
            buckets = self._buckets(files)
            self._assemble(tokenizer, files, buckets)

    def _inputs(self) -> list[InputFile]:
        corpus, corpus_dir = self.config.corpus, self.source_dir / "corpus"
        if corpus.source != "embedded":
            return find_inputs(corpus, corpus_dir)
        size = {"corpus": {"max_megabytes": corpus.max_megabytes}}
        if self.source_dir != self.data_dir:
            require_stage(self.source_dir, "corpus", size)
            return find_inputs(corpus, corpus_dir, materialise=False)  # nothing is written into another build
        claim_stage(self.data_dir, "corpus", size, ("corpus",))
        if corpus_dir.exists():
            return find_inputs(corpus, corpus_dir)
        with self.progress.stage("corpus: reading the documentation in this installation"):
            return find_inputs(corpus, corpus_dir)

    def _reader(self, tasks: int, dropped: Path | None = None) -> ReadStep:
        """The first step of a pipeline, with what its tasks must know to share a file."""
        corpus = self.config.corpus
        if corpus.source == "csv" and tasks > 1 and not any(file.rows for file in self.inputs):
            with self.progress.stage("corpus: finding where rows begin"):
                self.inputs = with_row_starts(self.inputs, corpus.encoding, self.progress.line)
        return ReadStep(corpus, self.inputs, dropped)

    def _clean(self) -> Path | None:
        """Stage 0; the list of documents to leave out, None where `[cleaning]` asks for nothing."""
        cleaning, folder = self.config.cleaning, self.source_dir / "cleaning"
        if not cleaning.active:
            return None
        evaluation = find_files(cleaning.decontaminate, "cleaning.decontaminate") if cleaning.decontaminate else []
        self.cleaning_settings = cleaning.model_dump(mode="json") | {
            "evaluation": [[file.path, file.size, file.modified] for file in evaluation]
        }
        settings = self._corpus_settings()
        if self.source_dir != self.data_dir:
            require_stage(self.source_dir, "cleaning", settings)
            return folder / DROPPED_NAME
        claim_stage(self.data_dir, "cleaning", settings, ("cleaning",))
        if (folder / REPORT_NAME).exists():
            self.progress.line(f"cleaning: {folder} is complete")
            return folder / DROPPED_NAME
        tasks = choose_tasks(self.config.data.tasks, local_workers(self.config.data), self.inputs)
        settle_tasks(folder, {"tasks": tasks}, complete=False)
        remove_leftovers(folder)
        texts = build_index(evaluation, cleaning.decontaminate_words, folder / INDEX_NAME) if evaluation else {}
        if empty := [name for name, count in texts.items() if not count]:
            self.progress.line(
                f"warning: cleaning: nothing to look for in {', '.join(empty)}: no text of {MIN_WORDS} words"
            )
        steps = [self._reader(tasks), CleanStep(cleaning=cleaning, output_dir=folder)]
        with self.progress.stage("cleaning") as advance:
            run_tasks(steps, tasks=tasks, data=self.config.data, state_dir=folder / "state", on_progress=advance)
        counts = merge_notes(folder, tasks, cleaning, texts)
        found = ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "nothing"
        self.progress.line(f"cleaning: dropped {found}; samples in {folder / REPORT_NAME}")
        return folder / DROPPED_NAME

    def _tokenizer(self) -> Tokenizer:
        """The saved tokenizer; trained on the training part of the corpus, or imported, where there is none."""
        config = self.config.tokenizer
        settings = config.model_dump(mode="json")
        if not config.path:
            settings |= {"seed": self.config.seed, "corpus": self._corpus_settings()}
            if self.source_dir != self.data_dir:
                require_stage(self.source_dir, "tokenizer", settings)
        claim_stage(self.data_dir, "tokenizer", settings, ("tokenizer",))
        remove_leftovers(self.tokenizer_dir)
        if (self.tokenizer_dir / DESCRIPTOR).exists():
            tokenizer = open_tokenizer(self.tokenizer_dir)
            self.progress.line(f"tokenizer: {self.tokenizer_dir} is complete ({tokenizer.vocab_size} entries)")
            return tokenizer
        if config.path:
            import_tokenizer(config.path, config).save(self.tokenizer_dir)
            self.progress.line(f"tokenizer: imported {config.path}")
        elif self.source_dir != self.data_dir:
            load_tokenizer(self.source_dir / "tokenizer").save(self.tokenizer_dir)
            self.progress.line(f"tokenizer: that of {self.source_dir}")
        else:
            with self.progress.stage("tokenizer: training"):
                report = train_vocabulary(self._training_texts(), config, self.config.seed, self.tokenizer_dir)
            self.progress.line(f"tokenizer: {report.message()}")
        return open_tokenizer(self.tokenizer_dir)

    def _training_texts(self) -> Iterator[str]:
        corpus = self.config.corpus
        documents = read_documents(corpus, self.inputs)
        if self.dropped is not None:
            documents = DroppedDocuments(self.dropped).kept(documents, Counter())
        for document in documents:
            if not (corpus.held_out and is_held_out(document.id, corpus.held_out)):
                yield document.text

    def _corpus_settings(self) -> dict[str, Any]:
        inputs = [[file.path, file.size, file.modified] for file in self.inputs]
        settings = self.config.corpus.model_dump(mode="json") | {"inputs": inputs}
        return settings | {"cleaning": self.cleaning_settings} if self.config.cleaning.active else settings

    def _tokenize(self, tokenizer: Tokenizer) -> list[Path]:
        """Stage 1; the files of all tasks."""
        config = self.config
        self.tokens_settings = {"corpus": self._corpus_settings(), "tokenizer": tokenizer.fingerprint}
        finished = self.tokens_dir / "complete"
        if self.source_dir == self.data_dir:
            claim_stage(self.data_dir, "tokens", self.tokens_settings, ("tokens",))
        else:
            require_stage(self.source_dir, "tokens", self.tokens_settings)
            if not finished.exists():
                raise BuildError(f"data.tokens_from: stage 1 in {self.tokens_dir} is not complete; build it first")
        division = settle_tasks(self.tokens_dir, self._division(), finished.exists())
        tasks = division["tasks"]
        self.groups = Groups(
            train=division["train_groups"], validation=division["validation_groups"], held_out=config.corpus.held_out
        )
        files = [task_path(self.tokens_dir, task) for task in range(tasks)]
        if finished.exists():
            self.progress.line(f"stage 1: {self.tokens_dir} is complete")
            return files
        remove_leftovers(self.tokens_dir)
        read = self._reader(tasks, self.dropped)
        steps = [
            read,
            TokenizeStep(
                tokenizer_dir=self.tokenizer_dir,
                output_dir=self.tokens_dir,
                groups=self.groups,
                split_sentences=partial(
                    split_sentences, method=config.corpus.sentences, keep_lines=config.corpus.keep_lines
                ),
                is_held_out=is_held_out,
                source_counts=read.counts,
            ),
        ]
        with self.progress.stage("stage 1: tokenize", text_bytes(self.inputs) / 1e6, "MB") as advance:
            run_tasks(steps, tasks=tasks, data=config.data, state_dir=self.tokens_dir / "state", on_progress=advance)
        write_text(finished, "")
        return files

    def _division(self) -> dict[str, int]:
        """What this run asks of stage 1: tasks, and groups of each split."""
        groups = Groups.of(self.config.data.buckets, self.config.corpus.held_out, text_bytes(self.inputs))
        return {
            "tasks": choose_tasks(self.config.data.tasks, local_workers(self.config.data), self.inputs),
            "train_groups": groups.train,
            "validation_groups": groups.validation,
        }

    def _corpus_counts(self, files: list[Path]) -> Counter[str]:
        total: Counter[str] = Counter()
        for path in files:
            total.update(TokenFile(path).footer["counts"])
        return total

    def _buckets(self, files: list[Path]) -> dict[str, int]:
        """Buckets of each split to build, from the documents that stage 1 kept.

        Raises:
            BuildError: no document, a single one, or a bucket with a single one.
        """
        found = np.zeros((2, self.groups.count), np.int64)
        for path in files:
            found += TokenFile(path).per_group()
        data = self.config.data
        least = 2 if data.mode == "nsp" else 1
        self.buckets = choose_buckets(self.groups, *found, buckets=data.buckets, least_documents=least)
        numbers = {}
        for split in SPLITS:
            buckets = self.buckets.number(split)
            per_bucket = found[0, list(self.groups.of_split(split))].reshape(buckets, -1).sum(axis=1)
            total = int(per_bucket.sum())
            if total < least and split == "validation":
                if self.config.corpus.held_out:
                    self.progress.line(f"warning: {total} documents are held out, too few: no validation set")
                continue
            if total == 0:
                raise BuildError(f"the corpus is empty: {corpus_summary(self._corpus_counts(files))}")
            if total < least:
                raise BuildError(
                    "the corpus has a single document for training: a random second part must come from another "
                    "document. Give it more, or divide it with blank lines (corpus.source = 'text')"
                )
            if data.mode == "nsp" and (per_bucket == 1).any():
                raise BuildError(
                    f"{int((per_bucket == 1).sum())} of {buckets} {split} buckets hold a single document ({total} in all), "
                    f"so their pairs have no other document to draw from: set data.buckets below {data.buckets}"
                )
            numbers[split] = buckets
        return numbers

    def _assemble(self, tokenizer: Tokenizer, files: list[Path], splits: dict[str, int]) -> None:
        """Stage 2, then statistics and index of each split; `splits` has the buckets of each."""
        settings = {split: AssembleSettings.of(self.config.data, self.config.seed, split) for split in splits}
        noted = {split: asdict(value) for split, value in settings.items()}
        claimed = {"tokens": self.tokens_settings, "buckets": splits, **noted}
        claim_stage(self.data_dir, "shards", claimed, ("assemble", *splits))
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
                buckets=self.buckets,
                settings=settings,
            )
            with self.progress.stage("stage 2: assemble") as advance:
                run_tasks(
                    [step],
                    tasks=self.buckets.count,
                    data=self.config.data,
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
        buckets = range(self.buckets.number(split))
        parts = [json.loads(part_path(self.assemble_dir, split, bucket).read_bytes()) for bucket in buckets]
        records = [ShardRecord.from_json(shard) for part in parts for shard in part["shards"]]
        if strangers := {path.name for path in folder.glob("*.tar")} - {record.name for record in records}:
            raise BuildError(f"{folder}: holds {min(strangers)}, which this build did not write; remove it")
        merged = BucketStats.merged((part["stats"] for part in parts), settings.max_seq_length)
        stats = render(self._corpus_counts(files), merged, settings.mask_sets)
        stats["warnings"] = warnings(stats, whole_word=settings.whole_word and not settings.segmenter)
        for warning in stats["warnings"]:
            self.progress.line(f"warning: {split}: {warning}")
        write_text(folder / "stats.json", json.dumps(stats, indent=1) + "\n")
        special = {name: getattr(tokenizer, f"{name}_id") for name in ("pad", "unk", "cls", "sep", "mask")}
        corpus = self.config.corpus.model_dump(mode="json", exclude={"paths"})  # where files lie is not what they hold
        info = DatasetInfo(
            settings={
                "split": split,
                "corpus": corpus,
                "buckets": self.buckets.number(split),
                **asdict(settings),
            },
            tokenizer=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            special_ids=special,
            max_seq_length=settings.max_seq_length,
            mask_sets=settings.mask_sets,
        )
        write_index(folder, records, info).close()


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
        config, progress = load_pipeline_config(options.config, options.overrides), BuildProgress()
        if options.dry_run:
            print_plan(config, progress)
            return 0
        Build(config, progress).run()
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, BrokenProcessPool) as error:
        print(f"error: {error}; the next run goes on from here", file=sys.stderr)
        return 1
    progress.line(f"finished in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    keep_imports()
    sys.exit(main())
