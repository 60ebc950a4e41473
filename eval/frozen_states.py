"""Hidden states of a frozen encoder for the words of tagged sentences: computed once, kept in files.

Legend: `W` words, `D` hidden size. A word's state is that of its first piece, which answers for it.

Without dropout and without training an encoder says the same in every epoch, so the passes of a feature-based run and the
runs of one command share its states.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eval.packing import TOKENS_PER_BATCH, Encoded, build_batch, ranges, token_budget_batches
from eval.problems import TagProblem
from eval.tagging import SentenceProblem
from eval.tasks import NER_FEATURES, TaskError
from pretrain.encoder import Encoder


def layers_of(features: str, layers: int) -> tuple[int, ...]:
    """The states that a row of the paper's table uses, counted as the encoder returns them: 0 is the embeddings' output.

    "weighted-all" is over the layers without the embeddings, as the paper's "all 12 layers".

    Raises:
        TaskError: unknown features, or fewer than four layers for the last four.
    """
    if features not in NER_FEATURES:
        raise TaskError(f"unknown features {features!r}; known: {', '.join(NER_FEATURES)}")
    if features.endswith("last-four"):
        if layers < 4:
            raise TaskError(f"features {features!r} need four layers, the encoder has {layers}")
        return tuple(range(layers - 3, layers + 1))
    single = {"embeddings": 0, "second-to-last": layers - 1, "last": layers}
    return (single[features],) if features in single else tuple(range(1, layers + 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class WordBatch:
    """Some examples as their words' states.

    Attributes:
        states: a tensor (W, D) for each state in use.
        lengths: (E,) int64 on the CPU, words of each example.
    """

    states: tuple[torch.Tensor, ...]
    lengths: torch.Tensor

    @property
    def tokens(self) -> int:
        """W."""
        return len(self.states[0])

    def to(self, device: torch.device | str) -> WordBatch:
        """The same with the states on `device`."""
        return WordBatch(states=tuple(state.to(device) for state in self.states), lengths=self.lengths)


@dataclass(kw_only=True)
class WordProblem(TagProblem):
    """Tagged words whose states are known; `encoded` has one id a word, its first piece.

    Attributes:
        first_pieces: (W,) int64, where the words' first pieces stand among the ids of the whole problem.
        states: an array (W, D) float32 for each state in use.
    """

    first_pieces: np.ndarray
    states: Sequence[np.ndarray]

    def batch(self, rows: np.ndarray) -> WordBatch:
        """The words of these examples, in this order."""
        lengths = self.encoded.lengths[rows]
        words = ranges(self.encoded.offsets[rows], lengths)
        return WordBatch(
            states=tuple(torch.from_numpy(state[words]) for state in self.states), lengths=torch.from_numpy(lengths)
        )


class FrozenStates:
    """The states of one or more encoders and problems, each found by what it was made from.

    They lie in nameless temporary files (folder: `TMPDIR`), W * D * 4 bytes for each state, which end with the process,
    however it ends. So memory is what the system's file cache has to spare: CoNLL-2003 needs 0.5 GB a state with 384
    columns, 0.9 GB with 768.

    Args:
        features: rows of the paper's table that will be asked for; their states come from one pass of the encoder.
    """

    def __init__(self, features: Iterable[str] = ()) -> None:
        self._features = tuple(features)
        self._kept: dict[tuple[str, int], np.ndarray] = {}

    @torch.inference_mode()
    def words(self, encoder: Encoder, problem: SentenceProblem, features: str) -> WordProblem:
        """The problem as words with the states of `features`.

        Raises:
            TaskError: as `layers_of`.
        """
        layers = encoder.config.layers
        wanted = layers_of(features, layers)
        key = _fingerprint(encoder, problem)
        missing = [layer for layer in wanted if (key, layer) not in self._kept]
        if missing:
            others = {layer for name in self._features for layer in layers_of(name, layers)}
            self._fill(key, encoder, problem, sorted(others.union(missing)))
        first, offsets = problem.first_pieces, np.searchsorted(problem.first_pieces, problem.encoded.offsets)
        words = Encoded(ids=problem.encoded.ids[first], offsets=offsets, segment_a=np.diff(offsets), truncated=0)
        states = [self._kept[key, layer] for layer in wanted]
        return WordProblem(
            encoded=words, tags=problem.tags[first], outputs=problem.outputs, first_pieces=first, states=states
        )

    def _fill(self, key: str, encoder: Encoder, problem: SentenceProblem, layers: Sequence[int]) -> None:
        """Compute these states of all words and keep them."""
        encoded, first = problem.encoded, problem.first_pieces
        shape, device = (len(first), encoder.config.hidden), encoder.embeddings.word.weight.device
        arrays = {}
        for layer in layers:
            with tempfile.TemporaryFile() as file:
                arrays[layer] = np.memmap(file, dtype=np.float32, mode="w+", shape=shape)
        offsets = np.searchsorted(first, encoded.offsets)
        was_training = encoder.training
        encoder.eval()
        for rows in token_budget_batches(encoded.lengths, TOKENS_PER_BATCH.get(device.type, 8192)):
            batch = build_batch(encoded, rows).to(device)
            arguments = (batch.input_ids_T, batch.segment_ids_T, batch.position_ids_T)
            if max(layers) == 0:
                states = [encoder.embeddings(*arguments)]
            else:
                _, states = encoder(*arguments, batch.cu_seqlens, batch.max_seqlen, output_hidden_states=True)
            counts = np.diff(offsets)[rows]
            words = ranges(offsets[rows], counts)
            lengths = encoded.lengths[rows]
            places = first[words] + np.repeat(np.cumsum(lengths) - lengths - encoded.offsets[rows], counts)
            for layer, array in arrays.items():
                array[words] = states[layer][torch.from_numpy(places).to(device)].float().cpu().numpy()
        encoder.train(was_training)
        self._kept |= {(key, layer): array for layer, array in arrays.items()}


def _fingerprint(encoder: Encoder, problem: SentenceProblem) -> str:
    """A hash of all that the states depend on: weights and configuration, ids and where words begin."""
    digest = hashlib.sha256(repr(encoder.config).encode())
    for name, tensor in encoder.state_dict().items():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensor.detach().cpu().float().numpy()).data)
    for array in (problem.encoded.ids, problem.encoded.offsets, problem.first_pieces):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
