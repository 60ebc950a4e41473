"""Feature-based tagging: a two-layer BiLSTM on the hidden states of a frozen encoder (arXiv 1810.04805, section 5.3).

Legend: `W` words of the batch, `E` examples, `L` words of the longest one, `D` hidden size, `S` states used, `K` outputs.
The encoder answers for a word with the state of its first piece, as the paper's tagger does; the BiLSTM runs over words.
"""

from __future__ import annotations

import torch
from torch import nn

from eval.frozen_states import FrozenStates, WordBatch, WordProblem, layers_of
from eval.problems import Problem
from eval.tagging import SentenceProblem
from eval.tasks import TaskError
from pretrain.dropout import dropout
from pretrain.encoder import Encoder

BILSTM_SIZE = 768
"""Width of the BiLSTM's output, both directions together, as the paper's "768-dimensional BiLSTM" is read here."""
BILSTM_LAYERS = 2
DROPOUT = 0.1


class FeatureModel(nn.Module):
    """Mixture of a frozen encoder's states, BiLSTM and one linear layer for every word.

    Args:
        encoder: its weights get no gradient, and `forward` does not run it: see `words`.
        outputs: K.
        features: one of `NER_FEATURES`. Weighted sums have learnt softmax weights, equal at the start.
        frozen: where states are kept; by default with this model.

    Raises:
        TaskError: unknown features, or fewer than four layers for the last four.
    """

    per_token = True

    def __init__(self, encoder: Encoder, outputs: int, features: str, frozen: FrozenStates | None = None) -> None:
        super().__init__()
        states = len(layers_of(features, encoder.config.layers))
        self.encoder = encoder.requires_grad_(False)
        self.features = features
        self.frozen = FrozenStates() if frozen is None else frozen
        self.weights = nn.Parameter(torch.zeros(states)) if features.startswith("weighted") else None
        width = encoder.config.hidden * (states if features.startswith("concat") else 1)
        self.bilstm = BiLstm(width, BILSTM_SIZE, BILSTM_LAYERS)
        self.classifier = nn.Linear(BILSTM_SIZE, outputs)

    @property
    def outputs(self) -> int:
        """K."""
        return self.classifier.out_features

    def words(self, problem: Problem) -> WordProblem:
        """The problem with the states that `forward` takes.

        Raises:
            TaskError: a problem without words.
        """
        if not isinstance(problem, SentenceProblem):
            raise TaskError("features are for tagged sentences")
        return self.frozen.words(self.encoder, problem, self.features)

    def forward(self, batch: WordBatch) -> torch.Tensor:
        """(W, K) logits."""
        x_WD = dropout(self.mix(batch.states), DROPOUT, self.training)
        x_WD = dropout(self.bilstm(x_WD, batch.lengths), DROPOUT, self.training)
        return self.classifier(x_WD).float()

    def mix(self, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The features of each word, (W, D) or (W, S*D)."""
        if self.weights is not None:
            return torch.einsum("s,swd->wd", self.weights.softmax(0), torch.stack(states))
        return states[0] if len(states) == 1 else torch.cat(states, dim=1)


class BiLstm(nn.Module):
    """A BiLSTM on flat examples, with dropout between layers.

    Each direction of a layer is an LSTM of its own on padded examples, the backward one on reversed ones: what comes after
    an example's end cannot reach it. For that torch has a fast CPU kernel (oneDNN's), for packed sequences an op a step,
    which takes twice the time in training.

    Args:
        width: of x.
        size: of the output, both directions together.
        layers: number of them.
    """

    def __init__(self, width: int, size: int, layers: int) -> None:
        super().__init__()
        widths = [width, *[size] * (layers - 1)]
        self.forwards = nn.ModuleList(nn.LSTM(inputs, size // 2) for inputs in widths)
        self.backwards = nn.ModuleList(nn.LSTM(inputs, size // 2) for inputs in widths)

    def forward(self, x_WD: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """(W, D) and the words of each example, (E,) on the CPU, to (W, size)."""
        examples, longest = len(lengths), int(lengths.max())
        example_W = torch.repeat_interleave(torch.arange(examples), lengths)
        place_W = torch.arange(len(x_WD)) - (lengths.cumsum(0) - lengths)[example_W]
        from_end_W = lengths[example_W] - 1 - place_W
        orders = [(place * examples + example_W).to(x_WD.device) for place in (place_W, from_end_W)]
        for number, pair in enumerate(zip(self.forwards, self.backwards, strict=True)):
            if number:
                x_WD = dropout(x_WD, DROPOUT, self.training)
            outputs = []
            for lstm, order_W in zip(pair, orders, strict=True):
                rows = x_WD.new_zeros(longest * examples, x_WD.shape[1]).index_copy(0, order_W, x_WD)
                out = lstm(rows.view(longest, examples, -1))[0]
                outputs.append(out.flatten(0, 1).index_select(0, order_W))
            x_WD = torch.cat(outputs, dim=1)
        return x_WD
