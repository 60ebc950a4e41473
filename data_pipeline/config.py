"""Configuration in three layers: defaults, then one TOML file, then `--set table.key=value`.

One file configures the whole run. Each package validates its own tables; `OTHER_TABLES` names those of the rest, so
that a misspelt table is refused even by a command that does not read it.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, Field


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the source, the key and what was expected."""


class StrictModel(BaseModel):
    """A table of settings: unknown keys are refused, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


ModelT = TypeVar("ModelT", bound=StrictModel)


class CorpusConfig(StrictModel):
    """`[corpus]`: where the text comes from and how it is cut."""

    source: Literal["embedded", "text", "file", "jsonl", "csv", "parquet", "wikitext", "mediawiki", "wet", "warc"] = (
        "embedded"
    )
    """Format of the files, see docs/data-format.md: text with a blank line between documents, one document a file, JSON
    lines, tables, WikiText, MediaWiki XML dumps, web archives; or the documentation of this installation."""
    paths: tuple[str, ...] = ()
    """Files, folders or globs; a path relative to the working folder. Not used by the embedded corpus."""
    max_megabytes: float = Field(default=0, ge=0)
    """Take documents until this much text is reached; 0 takes all."""
    held_out: float = Field(default=0.05, ge=0, lt=1)
    """Share of documents kept out of training, chosen by a hash of the document key."""
    sentences: str = Field(default="punkt", pattern="^(punkt|line|[a-z]{2,3})$")
    """How a document is split: "punkt" for English, "line" for one sentence a line, or a language such as "de" or "zh"."""
    keep_lines: bool = False
    """A line end ends a sentence too, as in verse; otherwise only a blank line does."""
    text_key: str = "text"
    """Field of a JSON line, or column of a table, that holds the text."""
    encoding: str = "utf-8"
    encoding_errors: Literal["replace", "strict"] = "replace"
    """Undecodable bytes become U+FFFD and are counted, or end the build."""


class CleaningConfig(StrictModel):
    """`[cleaning]`: which documents are left out, each counted with its reason. Everything is off by default."""

    languages: tuple[str, ...] = ()
    """Keep documents in these languages (ISO 639-1, as resiliparse detects them)."""
    quality: bool = False
    """Gopher's quality rules: number and length of words, symbols, bullets, stop words."""
    min_words: int = Field(default=50, ge=1)
    """Shortest document that the quality rules keep."""
    stop_words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")
    """Text has two of these; empty where the language has no such list."""
    repetition: bool = False
    """Gopher's repetition rules: repeated lines, paragraphs and n-grams."""
    exact_duplicates: bool = False
    near_duplicates: bool = False
    """MinHash over 5-grams of words."""
    decontaminate: tuple[str, ...] = ()
    """Evaluation files (paths, folders, globs); documents that share words with them are left out."""
    decontaminate_words: int = Field(default=13, ge=8)
    """How many words in a row are too many."""

    @property
    def active(self) -> bool:
        """Whether anything is asked for."""
        flags = (self.quality, self.repetition, self.exact_duplicates, self.near_duplicates)
        return any(flags) or bool(self.languages or self.decontaminate)


class TokenizerConfig(StrictModel):
    """`[tokenizer]`: the vocabulary to train, or the finished one to use."""

    kind: Literal["wordpiece", "unigram", "bpe", "byte_bpe"] = "wordpiece"
    """BERT's WordPiece, SentencePiece unigram or BPE (ALBERT), or byte-level BPE (RoBERTa)."""
    path: str = ""
    """A folder or file with a finished vocabulary; empty: train one on the training part of the corpus."""
    vocab_size: int = Field(default=30522, ge=16)
    lowercase: bool = True
    """Byte-level BPE keeps case unless this is written down."""
    strip_accents: bool | None = None
    """None: strip exactly where text is lower-cased, as BERT does."""
    split_cjk: bool = True
    sample_megabytes: float = Field(default=200, gt=0)
    """Train on a random sample of about this much text, chosen by the seed."""
    max_skipped: float = Field(default=0.5, ge=0, le=1)
    """Training ends with an error where a larger share of the sample's bytes cannot be used."""


class SlurmConfig(StrictModel):
    """`[data.slurm]`: the job arrays of `data.executor = "slurm"`; what is empty or 0 is left to the cluster."""

    partition: str = ""
    qos: str = ""
    time: str = "24:00:00"
    """Limit of one task, in Slurm's notation."""
    cpus_per_task: int = Field(default=1, ge=1)
    mem_per_cpu_gb: int = Field(default=2, ge=0)
    job_name: str = "clozeworks-data"
    max_array_size: int = Field(default=1001, ge=1)
    """The cluster's MaxArraySize; more tasks are submitted as several arrays, one after the other."""
    extra: dict[str, str] = {}
    """Further options of the job, such as `account = "..."`."""


class DataConfig(StrictModel):
    """`[data]`: examples, masks and shards."""

    dir: str
    """Output folder. Holds tokenizer/, train/ and validation/, each with its index."""
    mode: Literal["nsp", "sop", "full_sentences", "doc_sentences"] = "nsp"
    """BERT's next sentence pairs, ALBERT's sentence order pairs, or RoBERTa's packed sentences without pairs."""
    max_seq_length: int = Field(default=128, ge=8, le=65535)
    short_seq_prob: float = Field(default=0.1, ge=0, le=1)
    mask_prob: float = Field(default=0.15, gt=0, lt=1)
    max_predictions: int = Field(default=0, ge=0)
    """Upper limit of predictions per example; 0: what `mask_prob` of `max_seq_length` rounds to."""
    mask_sets: int = Field(default=4, ge=0)
    """Precomputed mask sets; epoch e uses set e mod mask_sets. 0: masks are drawn at load time."""
    whole_word: bool = False
    """Predict all pieces of a word or none."""
    span_masking: bool = False
    """Predict runs of 1 to 10 whole words (SpanBERT)."""
    segmenter: Literal["", "jieba"] = ""
    """What finds the words of Chinese text for the two keys above; empty: each character is a word of its own."""
    masked_share: float = Field(default=0.8, ge=0, le=1)
    """Of the predicted tokens, those that become the mask id."""
    random_share: float = Field(default=0.1, ge=0, le=1)
    """Of the predicted tokens, those that become a random one; the rest stays as it is."""
    dupes: int = Field(default=1, ge=1)
    """How often each document is turned into examples, with other pairs each time."""
    tokens_from: str = ""
    """`data.dir` of a finished build with the same corpus and tokenizer: its stage 1 is used instead of an own one."""
    buckets: int = Field(default=0, ge=0, le=65536)
    """Parts of the training set that are paired and shuffled one at a time in memory; 0: by the tokens of the corpus."""
    block_examples: int = Field(default=256, ge=1, le=65535)
    shard_megabytes: float = Field(default=64, gt=0)
    tasks: int = Field(default=0, ge=0)
    """Input partitions of the tokenize stage; 0 chooses. Never changes the output."""
    workers: int = Field(default=0, ge=0)
    """Local processes; 0 uses the cores of this machine. On a cluster: tasks at once, 0 for no limit. Never changes the output."""
    executor: Literal["local", "slurm", "ray"] = "local"
    """Where tasks run: processes here, Slurm job arrays, or Ray. Never changes the output."""
    slurm: SlurmConfig = SlurmConfig()

    @pydantic.model_validator(mode="after")
    def _segmenter_has_work(self) -> DataConfig:
        if self.segmenter and not (self.whole_word or self.span_masking):
            raise ValueError(
                f"key 'data.segmenter': {self.segmenter!r} finds words for data.whole_word or data.span_masking; set one of them"
            )
        if self.segmenter and not self.mask_sets:
            raise ValueError(
                f"key 'data.segmenter': {self.segmenter!r} works when masks are stored: set data.mask_sets to 1 or more"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _shares_fit(self) -> DataConfig:
        if self.masked_share + self.random_share > 1 + 1e-9:
            raise ValueError(
                f"key 'data.random_share': {self.random_share} and data.masked_share {self.masked_share} are over 1 together"
            )
        return self


class PipelineConfig(StrictModel):
    """The tables that `python -m data_pipeline.build` reads."""

    seed: int = Field(default=0, ge=0)
    corpus: CorpusConfig = CorpusConfig()
    cleaning: CleaningConfig = CleaningConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig


OTHER_TABLES = (
    "run",
    "model",
    "train",
    "optimizer",
    "schedule",
    "checkpoint",
    "validation",
    "tracking",
    "faults",
    "phases",
    "distillation",
    "deepspeed",
)
"""Tables that pretraining reads; a test holds them equal to the fields of its configuration."""


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--config FILE` and the repeatable `--set KEY=VALUE`, the same for every command."""
    parser.add_argument("--config", required=True, type=Path, help="TOML file, see configs/")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override one key; the value is read as TOML, else as a string; repeatable",
    )


def read_tree(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The TOML file as nested dictionaries with the overrides applied, not yet validated.

    Raises:
        ConfigError: the file is missing or not TOML, or an override has no `=` or runs through a plain value.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read the configuration ({error.strerror}); see configs/ for examples"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from error
    for override in overrides:
        apply_override(tree, override)
    return tree


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `table.key=value` in the nested dictionaries.

    Raises:
        ConfigError: no `=`, an empty key, or a key below a plain value.
    """
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: expected TABLE.KEY=VALUE, for example --set optimizer.lr=1e-4")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = tree
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: {key!r} is a value, not a table")
    table[keys[-1]] = value


def validate(model: type[ModelT], tree: Mapping[str, Any], source: str | Path) -> ModelT:
    """Build `model` from nested dictionaries.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), a missing key or a value of the wrong kind; all
            problems in one message.
    """
    try:
        return model.model_validate(tree)
    except pydantic.ValidationError as error:
        lines = [_explain(model, problem) for problem in error.errors(include_url=False)]
        raise ConfigError("\n".join(f"{source}: {line}" for line in lines)) from error


def nearest_key(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt key: the nearest known one, or the list of all."""
    known = sorted(known)
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {match[0]!r}?" if match else f"known keys: {', '.join(known)}"


def _explain(model: type[BaseModel], problem: Any) -> str:
    path = [str(part) for part in problem["loc"]]
    dotted = ".".join(path)
    if problem["type"] == "extra_forbidden":
        owner = _owner(model, path[:-1])
        return f"unknown key {dotted!r}; {nearest_key(path[-1], owner.model_fields if owner else [])}"
    if problem["type"] == "missing":
        return f"key {dotted!r} is missing"
    if not dotted:
        return problem["msg"]
    return f"key {dotted!r}: {problem['msg']}, got {problem['input']!r}"


def _owner(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """The model that holds the last key of a path."""
    owner: type[BaseModel] | None = model
    for key in path:
        annotation = owner.model_fields[key].annotation if owner and key in owner.model_fields else None
        candidates = [annotation, *get_args(annotation)]
        owner = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), owner)
    return owner


def load_pipeline_config(path: Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """The pipeline's tables of a configuration file.

    Raises:
        ConfigError: as `read_tree` and `validate`; a table that no part of the project knows is refused too.
    """
    tree = read_tree(path, overrides)
    own = {key: value for key, value in tree.items() if key not in OTHER_TABLES}
    for key in own:
        if key not in PipelineConfig.model_fields:
            known = [*PipelineConfig.model_fields, *OTHER_TABLES]
            raise ConfigError(f"{path}: unknown key {key!r}; {nearest_key(key, known)}")
    return validate(PipelineConfig, own, path)
