"""Whether fine-tuning here and plain `transformers` code of the same recipe give the same scores.

python benchmarks/finetune_agreement.py --model DIR --data DIR [--tasks RTE MRPC] [--seeds 3] [--quick]

For each task: the largest difference of the first 20 losses (same first weights and order, dropout off), then mean and standard
deviation of the headline score of both sides over seeds, with dropout. Met where both hold: 1e-4, and means within two
standard errors. `speed_ratio` is ours to theirs in CPU time of training alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure  # first: it puts the repository on sys.path
import numpy as np
import torch

from data_pipeline.order import permutation
from eval.finetune import epoch_batches, finetune, total_steps
from eval.metrics import compute
from eval.model import TaskModel
from eval.predict import predict
from eval.readers import Examples
from eval.source import ModelSource
from eval.task_data import build_problem, predicted_labels, read_task
from eval.tasks import Recipe, Task, select_tasks
from pretrain.config import ScheduleConfig
from pretrain.schedule import learning_rate

STEPS = 20


class Peer:
    """What users of `transformers` write, on the same folder: padded to the longest of each batch."""

    def __init__(self, folder: Path, task: Task, train: Examples, recipe: Recipe) -> None:
        from transformers import AutoTokenizer

        self.folder, self.task, self.train, self.recipe = folder, task, train, recipe
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.outputs = len(train.label_names) or 1

    def rows(self, examples: Examples) -> Any:
        """Ids of all examples."""
        pairs = [examples.texts_a] if examples.texts_b is None else [examples.texts_a, examples.texts_b]
        return self.tokenizer(*pairs, truncation=True, max_length=self.recipe.max_length)

    def fit(self, seed: int, *, dropout: bool, start: TaskModel | None, steps: int | None) -> Any:
        """Train; returns the model, its losses and the CPU seconds of the loop."""
        from transformers import AutoModelForSequenceClassification

        torch.manual_seed(seed)
        off = {} if dropout else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = AutoModelForSequenceClassification.from_pretrained(self.folder, num_labels=self.outputs, **off).train()
        if start is not None:
            model.classifier.load_state_dict(start.classifier.state_dict())
            if start.pooler is not None:  # a checkpoint without one: both sides begin with the same new pooler
                model.bert.pooler.dense.load_state_dict(start.pooler.state_dict())
        plain = [p for name, p in model.named_parameters() if "bias" in name or "LayerNorm" in name]
        decaying = [p for name, p in model.named_parameters() if "bias" not in name and "LayerNorm" not in name]
        groups = [
            {"params": decaying, "weight_decay": self.recipe.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.recipe.learning_rate, eps=1e-6)
        total = total_steps(len(self.train), self.recipe)
        schedule = ScheduleConfig(warmup_steps=int(total * self.recipe.warmup))
        rows, losses, begin = self.rows(self.train), [], time.process_time()
        for epoch in range(self.recipe.epochs):
            for units in epoch_batches(len(self.train), self.recipe.batch_size, seed, epoch):
                if len(losses) == steps:
                    return model, losses, time.process_time() - begin
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(
                        len(losses) + 1, peak=self.recipe.learning_rate, total_steps=total, schedule=schedule
                    )
                logits = model(**self.batch(rows, units)).logits
                gold = torch.from_numpy(self.train.labels[units])
                loss = (
                    torch.nn.functional.mse_loss(logits[:, 0], gold.float())
                    if self.task.head == "regression"
                    else torch.nn.functional.cross_entropy(logits, gold)
                )
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.recipe.clip)
                optimizer.step()
                losses.append(loss.item())
        return model, losses, time.process_time() - begin

    def batch(self, rows: Any, units: np.ndarray) -> Any:
        """Padded tensors."""
        return self.tokenizer.pad({key: [rows[key][unit] for unit in units] for key in rows}, return_tensors="pt")

    @torch.inference_mode()
    def logits(self, model: Any, examples: Examples) -> np.ndarray:
        """(examples, outputs)."""
        model.eval()
        rows = self.rows(examples)
        parts = np.array_split(np.arange(len(examples)), -(-len(examples) // 64))
        return np.concatenate([model(**self.batch(rows, units)).logits.numpy() for units in parts])


def first_losses(source: ModelSource, peer: Peer, problem: Any, recipe: Recipe) -> tuple[int, float]:
    """How many steps were compared, and the largest difference of their losses: same classifier, no dropout."""
    encoder = source.encoder()
    for module in encoder.modules():
        if getattr(module, "config", None) is not None:
            module.config = module.config.model_copy(update={"hidden_dropout": 0.0, "attention_dropout": 0.0})
    torch.manual_seed(0)
    start = TaskModel(source.encoder(), problem.outputs, per_token=False)
    ours = finetune(encoder, problem, recipe, seed=0, max_steps=STEPS).losses
    theirs = peer.fit(0, dropout=False, start=start, steps=STEPS)[1][:STEPS]
    return len(ours), max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def compare(
    source: ModelSource, folder: Path, task: Task, data: Path, seeds: int, limits: tuple[int, int], recipe: Recipe
) -> dict:
    """One row of the table; `limits` on the training and dev examples, 0: none."""
    task_data = read_task(task, data, limits[0])
    train, dev = task_data.train, task_data.scored[task.dev_splits[0]]
    if limits[1] and limits[1] < len(dev):
        dev = dev.take(np.sort(permutation(len(dev), 0)[: limits[1]]))
    assert isinstance(train, Examples) and isinstance(dev, Examples)
    peer = Peer(folder, task, train, recipe)
    problem, dev_problem = (build_problem(source.tokenizer, task, part, recipe) for part in (train, dev))
    ours, theirs, speeds = [], [], []
    for seed in range(seeds):
        start = time.process_time()
        trained = finetune(source.encoder(), problem, recipe, seed=seed)
        trained_seconds = time.process_time() - start
        ours.append(headline(task, dev, predict(trained.model, dev_problem)))
        model, _, seconds = peer.fit(seed, dropout=True, start=None, steps=None)
        speeds.append(seconds / trained_seconds)
        theirs.append(headline(task, dev, peer.logits(model, dev)))
        print(f"{task.name} seed {seed}: ours {ours[-1]:.4f}, peer {theirs[-1]:.4f}", file=sys.stderr, flush=True)
    error = (sum(statistics.variance(side) if seeds > 1 else 0.0 for side in (ours, theirs)) / seeds) ** 0.5
    gap = statistics.fmean(ours) - statistics.fmean(theirs)
    # Few seeds can agree by accident to the last digit: then one example more or less is no difference.
    within = abs(gap) <= max(2 * error, 1 / len(dev))
    steps, difference = first_losses(source, peer, problem, recipe)
    return {
        "task": task.name,
        "metric": task.metrics[0],
        "train": len(train),
        "epochs": recipe.epochs,
        "learning_rate": recipe.learning_rate,
        "dev": len(dev),
        "ours": [round(score, 4) for score in ours],
        "peer": [round(score, 4) for score in theirs],
        "gap": round(gap, 4),
        "standard_error": round(error, 4),
        "within_two_standard_errors": within,
        "speed_ratio": round(statistics.median(speeds), 2),
        "first_losses": steps,
        "first_losses_differ_by": float(f"{difference:.2g}"),
    }


def headline(task: Task, dev: Examples, logits: np.ndarray) -> float:
    """The task's first metric; 0 where it is not defined."""
    assert dev.labels is not None
    return compute(task.metrics[:1], dev.labels, predicted_labels(task, dev, logits))[task.metrics[0]].value or 0.0


def quick_case(folder: Path) -> tuple[Path, Path]:
    """A small random model and a task with sentences of our own, where nothing else is at hand."""
    from finetune import make_model

    rng = np.random.default_rng(0)
    for split, number in (("train", 96), ("dev", 64)):
        rows = [
            (" ".join(rng.choice(["a", "film", "plot", "good" if n % 2 else "bad"], 9)), n % 2) for n in range(number)
        ]
        (folder / "SST-2").mkdir(exist_ok=True)
        text = "sentence\tlabel\n" + "".join(f"{sentence}\t{label}\n" for sentence, label in rows)
        (folder / "SST-2" / f"{split}.tsv").write_text(text)
    words = Examples(ids=[], texts_a=["a film plot good bad"], texts_b=None, labels=None)
    make_model(folder, words, hidden=64, layers=2)
    return folder, folder


def main() -> None:
    """Print a line for each task and the closing line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a random model and a made-up task: proves that it runs")
    parser.add_argument("--model", type=Path, help="Hugging Face folder of a BERT")
    parser.add_argument("--data", type=Path, default=os.environ.get("CLOZEWORKS_DATA"))
    parser.add_argument("--tasks", nargs="+", default=["RTE", "MRPC", "CoLA", "STS-B"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-train-examples", type=int, default=0)
    parser.add_argument("--max-dev-examples", type=int, default=0, help="score a fixed subset of the dev set; 0: all")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    options = parser.parse_args()
    recipe = Recipe(epochs=options.epochs, learning_rate=options.learning_rate)
    with tempfile.TemporaryDirectory() as name:
        tasks, seeds, model, data = options.tasks, options.seeds, options.model, options.data
        if options.quick or model is None:
            (model, data), tasks, seeds = quick_case(Path(name)), ["SST-2"], 2
        source = ModelSource(model)
        rows = []
        for task in select_tasks(tasks):
            limits = (options.max_train_examples, options.max_dev_examples)
            rows.append(compare(source, model, task, Path(data), seeds, limits, recipe))
            print(json.dumps(rows[-1]), flush=True)
    agreeing = [row["within_two_standard_errors"] and row["first_losses_differ_by"] < 1e-4 for row in rows]
    measure.report("finetune_agreement", sum(agreeing), "tasks that agree", len(rows), 1.0)


if __name__ == "__main__":
    main()
