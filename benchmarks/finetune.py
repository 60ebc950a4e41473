"""Fine-tuning speed against the peer's way: `transformers` with dynamic padding, same model, batches, order and rate.

python benchmarks/finetune.py [--quick] [--case train|squad|padded|evaluate|evaluate-squad] [--model DIR] [--clock wall|cpu]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import measure  # first: it puts the repository on sys.path
import numpy as np
import torch

from eval.finetune import epoch_batches, finetune
from eval.model import TaskModel
from eval.packing import encode_examples
from eval.predict import predict
from eval.problems import ClassProblem
from eval.readers import Examples, read_split
from eval.source import ModelSource
from eval.squad_answers import SquadProblem, squad_problem
from eval.squad_data import SquadData
from eval.task_data import read_examples
from eval.tasks import TASKS, Recipe

GOALS = {"train": 1.5, "squad": 1.5, "padded": 3.0, "evaluate": 2.0, "evaluate-squad": 2.0}
"""Ratio to the peer that is wanted, by case: fine-tuning on MRPC and on SQuAD windows against dynamic padding, on MRPC against
padding to 128, and predicting MRPC or SQuAD windows alone. Batches of 32, as in the recipes."""


def examples_of_benchmark(number: int) -> Examples:
    """Real MRPC pairs where the data are at hand, else word salad with lengths like theirs."""
    data = Path(os.environ.get("CLOZEWORKS_DATA", measure.ROOT.parent / "shared" / "data"))
    if (data / "glue" / "MRPC" / "train.tsv").is_file():
        return read_split(data, TASKS["MRPC"], "train").take(np.arange(number))
    rng = np.random.default_rng(0)
    texts = [
        [" ".join(f"w{n}" for n in rng.integers(0, 900, rng.integers(10, 35))) for _ in range(number)] for _ in "ab"
    ]
    return Examples(
        ids=[str(n) for n in range(number)],
        texts_a=texts[0],
        texts_b=texts[1],
        labels=rng.integers(0, 2, number),
        label_names=("not_equivalent", "equivalent"),
    )


def make_model(folder: Path, examples: Examples, *, hidden: int, layers: int) -> None:
    """A random BERT whose vocabulary holds the words of the examples: speed does not depend on what it knows."""
    from transformers import BertConfig, BertModel

    words = sorted({word for text in examples.texts_a + (examples.texts_b or []) for word in text.lower().split()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        intermediate_size=4 * hidden,
    )
    BertModel(config).save_pretrained(folder)


def squad_problem_of_benchmark(source: ModelSource, windows: int, quick: bool) -> SquadProblem:
    """Real SQuAD windows of the task's recipe; needs the data."""
    data = Path(os.environ.get("CLOZEWORKS_DATA", measure.ROOT.parent / "shared" / "data"))
    questions = read_examples(data, TASKS["SQuAD-44"], "train").take(np.arange(0, 11000, 11000 // windows)[:windows])
    assert isinstance(questions, SquadData)
    return squad_problem(source.tokenizer, questions, 128 if quick else 384, 32 if quick else 128)


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class Peer:
    """The loop that transformers' users write, on the very rows that we train on: padded to the longest of each batch, or
    all to one length."""

    def __init__(
        self,
        folder: Path,
        problem: ClassProblem | SquadProblem,
        recipe: Recipe,
        pad_to: int,
        clock: Callable[[], float],
    ) -> None:
        from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

        kind = (
            AutoModelForSequenceClassification if isinstance(problem, ClassProblem) else AutoModelForQuestionAnswering
        )
        self.model = kind.from_pretrained(folder)
        self.problem, self.recipe, self.pad_to, self.clock = problem, recipe, pad_to, clock

    def batch(self, units: np.ndarray) -> dict[str, torch.Tensor]:
        """Padded ids, segments, mask and labels."""
        encoded = self.problem.encoded
        lengths = encoded.lengths[units]
        width = max(int(lengths.max()), self.pad_to)
        ids = np.zeros((len(units), width), dtype=np.int64)
        segments, mask = np.zeros_like(ids), np.zeros_like(ids)
        for row, unit in enumerate(units):
            ids[row, : lengths[row]] = encoded.ids[encoded.offsets[unit] : encoded.offsets[unit + 1]]
            segments[row, encoded.segment_a[unit] : lengths[row]] = 1
            mask[row, : lengths[row]] = 1
        out = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}
        if isinstance(self.problem, ClassProblem):
            out["labels"] = self.problem.labels[units]
        else:
            out |= {"start_positions": self.problem.starts[units], "end_positions": self.problem.ends[units]}
        return {key: torch.from_numpy(value) for key, value in out.items()}

    def train_seconds(self) -> float:
        """One epoch."""
        self.model.train()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.recipe.learning_rate)
        start = self.clock()
        for units in epoch_batches(len(self.problem), self.recipe.batch_size, 0, 0):
            loss = self.model(**self.batch(units)).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
            optimizer.step()
            loss.item()
        return self.clock() - start

    @torch.inference_mode()
    def evaluate_seconds(self) -> float:
        """All rows once, in the order of the file, 32 at a time."""
        self.model.eval()
        start = self.clock()
        for first in range(0, len(self.problem), 32):
            self.model(**self.batch(np.arange(first, min(first + 32, len(self.problem)))))
        return self.clock() - start


def main() -> None:
    """Run both sides by turns and print the closing line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: proves that the script runs")
    parser.add_argument("--case", choices=GOALS, default="train", help="what is compared (default train: MRPC)")
    parser.add_argument("--model", type=Path, help="Hugging Face folder; without: a random one of MiniLM's size")
    parser.add_argument("--examples", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="times that each side runs, by turns; its best counts")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: seconds of this process, on busy machines"
    )
    options = parser.parse_args()
    number = options.examples or (64 if options.quick else 640)
    examples = examples_of_benchmark(number)
    recipe, clock = Recipe(epochs=1, batch_size=32), CLOCKS[options.clock]
    with tempfile.TemporaryDirectory() as name:
        folder = options.model or Path(name)
        if options.model is None:
            small = options.quick
            make_model(folder, examples, hidden=128 if small else 384, layers=2 if small else 6)
        source = ModelSource(folder)
        problem: ClassProblem | SquadProblem
        if options.case.endswith("squad"):
            problem = squad_problem_of_benchmark(source, number, options.quick)
        else:
            encoded = encode_examples(source.tokenizer, examples.texts_a, examples.texts_b, recipe.max_length)
            problem = ClassProblem(encoded=encoded, labels=examples.labels, outputs=2)
        side = Peer(folder, problem, recipe, 128 if options.case == "padded" else 0, clock)
        model = TaskModel(source.encoder(), problem.outputs, per_token=problem.per_token)
        ours, peer = [], []
        for _ in range(options.rounds):
            evaluate = options.case.startswith("evaluate")
            peer.append(len(problem) / (side.evaluate_seconds() if evaluate else side.train_seconds()))
            encoder, start = source.encoder(), clock()
            if evaluate:
                predict(model, problem)
            else:
                finetune(encoder, problem, recipe, seed=0)
            ours.append(len(problem) / (clock() - start))
    lengths = problem.encoded.lengths
    batches = epoch_batches(len(problem), recipe.batch_size, 0, 0)
    padded = sum(len(units) * max(int(lengths[units].max()), side.pad_to) for units in batches) / lengths.sum()
    print(
        f"{len(problem)} examples of {lengths.mean():.0f} tokens, batch {recipe.batch_size}; the peer computes "
        f"{padded:.2f} times as many with padding; {options.clock} clock, {torch.get_num_threads()} threads"
    )
    # The best of each side: what else runs on the machine only ever slows one down.
    measure.report(
        f"finetune_{options.case.replace('-', '_')}", max(ours), "examples/s", max(peer), GOALS[options.case]
    )


if __name__ == "__main__":
    main()
