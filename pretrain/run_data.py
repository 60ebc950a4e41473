"""The data of a run: its two sets of shards, checked against the configuration before anything expensive starts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from cluster.world import World
from data_pipeline.block_codec import ShardError
from data_pipeline.block_reader import MaskFunction
from data_pipeline.config import ConfigError
from data_pipeline.loader import Loader, build_loader, dynamic_masks, iter_validation
from data_pipeline.masking import masking_rule
from data_pipeline.records import Batch
from data_pipeline.shard_index import ShardIndex, verify_shards
from data_pipeline.tokenizer import TokenizerError, load_tokenizer
from pretrain.config import TrainConfig
from pretrain.deepspeed_config import zero_stage
from pretrain.phases import phases_of

_UNIGRAM_TOKENS = 2_000_000  # the frequencies of 8,000 to 50,000 entries are settled long before


class RunData:
    """Training and held-out shards of a configuration.

    Attributes:
        index: of the training set.
        held_out: of the validation set, or None where nothing was held out.
        fingerprint: of the training examples of all phases.
    """

    def __init__(self, config: TrainConfig) -> None:
        """Open both indexes.

        Raises:
            ConfigError: no data set there, the two sets have different tokenizers, or examples are too long.
        """
        self._config = config
        self._train_dir, self._held_out_dir = (
            f"{config.data.dir.rstrip('/')}/{part}" for part in ("train", "validation")
        )
        try:
            self.index = ShardIndex.open(self._train_dir)
            self.held_out = ShardIndex.open(self._held_out_dir) if self._exists(self._held_out_dir) else None
        except ShardError as error:
            raise ConfigError(f"{error}\nbuild the data first: python -m data_pipeline.build --config FILE") from error
        info = self.index.info
        if self.held_out is not None and self.held_out.info.tokenizer != info.tokenizer:
            raise ConfigError(
                f"{self._held_out_dir}: made with another tokenizer than {self._train_dir}; build both again"
            )
        for folder, index in ((self._train_dir, self.index), (self._held_out_dir, self.held_out)):
            if index is not None and index.info.max_seq_length > config.model.max_positions:
                raise ConfigError(
                    f"{folder}: examples of up to {index.info.max_seq_length} tokens do not fit "
                    f"model.max_positions={config.model.max_positions}"
                )
        if config.validation.every and self.held_out is None:
            raise ConfigError(
                f"{self._held_out_dir}: no held-out shards, but validation.every={config.validation.every}; "
                "build with corpus.held_out > 0, or set validation.every=0"
            )
        parts = [RunData(phase.config) for phase in phases_of(config)] if config.phases else [self]
        for part in parts:
            if part.index.info.tokenizer != info.tokenizer:
                raise ConfigError(f"{part._train_dir}: made with another tokenizer than {self._train_dir}")
        self._parts = parts
        prints = [part.index.fingerprint for part in parts]
        self.fingerprint = prints[0] if len(set(prints)) == 1 else hashlib.sha256("".join(prints).encode()).hexdigest()

    @classmethod
    def is_built(cls, config: TrainConfig) -> bool:
        """Whether there is a training set; remote ones are taken to be there."""
        return cls._exists(f"{config.data.dir.rstrip('/')}/train")

    @staticmethod
    def _exists(directory: str) -> bool:
        return "://" in directory or (Path(directory) / "index.json").is_file()

    def model_config(self) -> TrainConfig:
        """The configuration with the vocabulary of this data filled in.

        Raises:
            ConfigError: `model.vocab_size` is set and differs.
        """
        info = self.index.info
        model = self._config.model.with_vocabulary(info.vocab_size, info.special_ids["pad"])
        return self._config.model_copy(update={"model": model})

    def verify_sample(self, world: World) -> None:
        """Compare one shard's sha256 with the index, another one on every rank, in the data of every phase.

        Raises:
            ConfigError: its bytes are not those that were written, or masks cannot be drawn at load time.
        """
        for part in self._parts:
            part._mask_function()
        indexes = {part._train_dir: part.index for part in self._parts}
        try:
            for index in indexes.values():
                verify_shards(index, sample=1, seed=world.rank)
        except (ShardError, OSError) as error:
            raise ConfigError(str(error)) from error

    def require_ranks(self, world: World) -> None:
        """Refuse held-out sets that this many ranks could not validate together.

        Raises:
            ConfigError: ZeRO-3, whose every forward pass takes all ranks, and fewer held-out examples than ranks.
        """
        for part in self._parts:
            held_out, config = part.held_out, part._config
            if not config.validation.every or held_out is None or zero_stage(config) < 3:
                continue
            if held_out.examples < world.size:
                raise ConfigError(
                    f"{part._held_out_dir}: {held_out.examples} held-out examples for {world.size} ranks, ZeRO-3 needs one "
                    "each; hold out more, or set validation.every=0"
                )

    def _mask_function(self) -> MaskFunction | None:
        """What draws masks at load time, for data built with `data.mask_sets = 0`."""
        info = self.index.info
        if info.mask_sets:
            return None
        folder = Path(self._config.data.dir) / "tokenizer"
        try:
            tokenizer = load_tokenizer(folder)
        except TokenizerError as error:
            raise ConfigError(f"{error}\nmasks are drawn at load time and need the data's tokenizer") from error
        if tokenizer.fingerprint != info.tokenizer:
            raise ConfigError(
                f"{folder}: not the tokenizer that {self._train_dir} was built with; build the data again"
            )
        return dynamic_masks(masking_rule(tokenizer, info.settings), self._config.seed)

    def loader(self, world: World, state: dict[str, int] | None = None, *, pin_memory: bool = False) -> Loader:
        """This rank's training stream, from the start or from a stored state; `pin_memory` for a GPU.

        Raises:
            ConfigError: the state belongs to another data set or seed.
        """
        train = self._config.train
        try:
            return build_loader(
                self._train_dir,
                global_batch=train.global_batch,
                micro_batch=train.micro_batch,
                rank=world.rank,
                world_size=world.size,
                seed=self._config.seed,
                state=state,
                mask_fn=self._mask_function(),
                pin_memory=pin_memory,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def held_out_batches(self, world: World) -> Iterator[Batch]:
        """This rank's share of the held-out examples."""
        return iter_validation(
            self._held_out_dir,
            micro_batch=self._config.validation.micro_batch,
            rank=world.rank,
            world_size=world.size,
        )

    def unigram_loss(self) -> float:
        """What guessing held-out tokens by their frequency in the training text costs, in nats a token; see validation."""
        from pretrain.validation import label_counts, token_counts, unigram_loss

        info, alone = self.index.info, World()
        epoch = -(-self.index.examples // self._config.train.global_batch)
        with self.loader(alone) as loader:
            batches = (batch for _, step in zip(range(epoch), loader, strict=False) for batch in step)
            training = token_counts(
                batches, info.vocab_size, special_ids=info.special_ids.values(), limit=_UNIGRAM_TOKENS
            )
        return unigram_loss(training, label_counts(self.held_out_batches(alone), info.vocab_size))
