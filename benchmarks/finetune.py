"""Fine-tuning speed against the peer's way: `transformers` with dynamic padding, same model, batches, order and rate.

python benchmarks/finetune.py [--quick]
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import measure  # first: it puts the repository on sys.path
import numpy as np
import torch

from eval.finetune import epoch_batches, finetune
from eval.packing import encode_examples
from eval.problems import ClassProblem
from eval.readers import Examples, read_split
from eval.source import ModelSource
from eval.tasks import TASKS, Recipe

GOAL = 1.5


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


def peer_seconds(folder: Path, examples: Examples, recipe: Recipe) -> float:
    """Seconds of the loop that transformers' users write: tokenized before, padded to the longest of each batch."""
    from transformers import BertForSequenceClassification, BertTokenizerFast

    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"))
    model = BertForSequenceClassification.from_pretrained(folder, num_labels=2).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    rows = tokenizer(examples.texts_a, examples.texts_b, truncation=True, max_length=recipe.max_length)
    assert examples.labels is not None
    start = time.perf_counter()
    for units in epoch_batches(len(examples), recipe.batch_size, 0, 0):
        batch = tokenizer.pad({key: [rows[key][unit] for unit in units] for key in rows}, return_tensors="pt")
        loss = model(**batch, labels=torch.from_numpy(examples.labels[units])).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        loss.item()
    return time.perf_counter() - start


def main() -> None:
    """Run both sides by turns and print the closing line."""
    quick = measure.quick_argument(__doc__ or "").quick
    examples = examples_of_benchmark(64 if quick else 640)
    recipe = Recipe(epochs=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, examples, hidden=128 if quick else 384, layers=2 if quick else 6)
        source = ModelSource(folder)
        encoded = encode_examples(source.tokenizer, examples.texts_a, examples.texts_b, recipe.max_length)
        problem = ClassProblem(encoded=encoded, labels=examples.labels, outputs=2)
        ours, peer = [], []
        for _ in range(2 if quick else 3):
            peer.append(len(examples) / peer_seconds(folder, examples, recipe))
            ours.append(finetune(source.encoder(), problem, recipe, seed=0).examples_per_second)
    # The best of each side: what else runs on the machine only ever slows one down.
    measure.report("finetune", max(ours), "examples/s", max(peer), GOAL)


if __name__ == "__main__":
    main()
