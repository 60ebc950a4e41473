"""The fine-tuning loop with a tiny real encoder: it learns, repeats itself, and does what plain transformers code does."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from eval.finetune import epoch_batches, finetune, total_steps
from eval.metrics import compute
from eval.model import TaskModel
from eval.packing import Encoded, build_batch, encode_examples
from eval.predict import predict
from eval.problems import ChoiceProblem, ClassProblem, RegressionProblem, SpanProblem, TagProblem
from eval.run import main
from eval.source import ModelSource
from eval.tasks import Recipe, TaskError
from pretrain.schedule import ScheduleConfig, learning_rate

NOISE = ["the", "a", "film", "plot", "actors", "and", "it", "cat", "dog", "sat"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *NOISE, "good", "great", "bad", "awful", "##s", "."]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a random two-layer BERT, dropout off, and a vocabulary of its own."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("tiny-bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
    )
    BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return folder


@pytest.fixture(scope="session")
def source(tiny_folder: Path) -> ModelSource:
    return ModelSource(tiny_folder)


def reviews(number: int) -> tuple[list[str], np.ndarray]:
    """Sentences whose label is written in them, and distractors around it."""
    rng = np.random.default_rng(7)
    labels = rng.integers(0, 2, number)
    words = [["bad", "awful"], ["good", "great"]]
    texts = [
        " ".join([*rng.choice(NOISE, rng.integers(1, 9)), rng.choice(words[label]), *rng.choice(NOISE, 2)])
        for label in labels
    ]
    return texts, labels


def class_problem(source: ModelSource, number: int) -> ClassProblem:
    texts, labels = reviews(number)
    return ClassProblem(encoded=encode_examples(source.tokenizer, texts, None, 32), labels=labels, outputs=2)


FAST = Recipe(batch_size=16, learning_rate=5e-3, epochs=3, max_length=32)


def test_it_learns_and_the_seed_decides_everything(source: ModelSource) -> None:
    problem = class_problem(source, 200)
    first = finetune(source.encoder(), problem, FAST, seed=3)
    assert len(first.losses) == total_steps(200, FAST) == 39 and first.examples_per_second > 0
    predicted = predict(first.model, problem).argmax(1)
    assert compute(("accuracy",), problem.labels, predicted)["accuracy"].value == 1.0
    assert finetune(source.encoder(), problem, FAST, seed=3).losses == first.losses
    assert finetune(source.encoder(), problem, FAST, seed=4).losses != first.losses


def test_the_source_is_not_changed_by_training(source: ModelSource) -> None:
    before = {name: tensor.clone() for name, tensor in source.encoder().state_dict().items()}
    trained = finetune(source.encoder(), class_problem(source, 16), FAST, seed=0)
    assert all(torch.equal(before[name], tensor) for name, tensor in source.encoder().state_dict().items())
    assert not torch.equal(before["layers.0.qkv.weight"], trained.model.encoder.state_dict()["layers.0.qkv.weight"])


def test_same_losses_as_plain_transformers_code(source: ModelSource, tiny_folder: Path) -> None:
    """Same weights, order and recipe: the losses of 20 steps agree to 1e-4."""
    from transformers import BertForSequenceClassification, BertTokenizerFast

    texts, labels = reviews(100)
    others = texts[50:] + texts[:50]
    recipe = Recipe(batch_size=8, learning_rate=1e-3, epochs=2, max_length=24)
    encoded = encode_examples(source.tokenizer, texts, others, recipe.max_length)
    ours = finetune(source.encoder(), ClassProblem(encoded=encoded, labels=labels, outputs=2), recipe, seed=5)

    torch.manual_seed(5)
    start = TaskModel(source.encoder(), 2, per_token=False)
    peer = BertForSequenceClassification.from_pretrained(tiny_folder, num_labels=2)
    peer.classifier.load_state_dict(start.classifier.state_dict())
    peer.train()
    plain = [p for name, p in peer.named_parameters() if "bias" in name or "LayerNorm" in name]
    decaying = [p for name, p in peer.named_parameters() if "bias" not in name and "LayerNorm" not in name]
    groups = [{"params": decaying, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, eps=1e-6)
    tokenizer = BertTokenizerFast(vocab=str(tiny_folder / "vocab.txt"))
    schedule, losses = ScheduleConfig(warmup_steps=2), []
    for epoch in range(2):
        for units in epoch_batches(100, 8, 5, epoch):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(len(losses) + 1, peak=1e-3, total_steps=26, schedule=schedule)
            pairs = [[texts[unit] for unit in units], [others[unit] for unit in units]]
            batch = tokenizer(*pairs, truncation=True, max_length=24, padding=True, return_tensors="pt")
            loss = peer(**batch, labels=torch.from_numpy(labels[units])).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    assert encoded.truncated > 0 and max(losses[:20]) > min(losses[:20]) + 0.1
    assert ours.losses[:20] == pytest.approx(losses[:20], abs=1e-4)
    # Words that no example holds only decay; theirs went through the optimizer.
    expected = peer.bert.embeddings.word_embeddings.weight.detach()
    table, before = ours.model.encoder.embeddings.word.weight.detach(), source.encoder().embeddings.word.weight.detach()
    unused = np.setdiff1d(np.arange(len(expected)), encoded.ids)
    assert len(unused) > 0 and not torch.allclose(before[unused], expected[unused], rtol=2e-5, atol=0)
    torch.testing.assert_close(table[unused], expected[unused], rtol=1e-6, atol=0)
    torch.testing.assert_close(table, expected, rtol=0, atol=2e-4)


def test_r32_regression_loss_and_a_last_batch_of_one(source: ModelSource) -> None:
    texts, _ = reviews(17)
    encoded = encode_examples(source.tokenizer, texts, None, 32)
    problem = RegressionProblem(encoded=encoded, labels=np.arange(17) / 4)
    assert float(problem.loss(torch.tensor([[1.0], [2.0], [3.0]]), np.array([4, 8, 12]))) == 0.0
    trained = finetune(source.encoder(), problem, Recipe(batch_size=16, epochs=1, max_length=32), seed=0)
    assert len(trained.losses) == 2 and all(map(math.isfinite, trained.losses))
    assert predict(trained.model, problem).shape == (17, 1)


def test_divergence_stops_and_is_said(source: ModelSource) -> None:
    encoder = source.encoder()
    with torch.no_grad():
        encoder.layers[0].qkv.weight[0, 0] = math.nan
    trained = finetune(encoder, class_problem(source, 40), FAST, seed=0)
    assert trained.diverged_at == 1 and len(trained.losses) == 1


def test_r33_batches_do_not_matter_and_every_example_comes_once(source: ModelSource) -> None:
    problem = class_problem(source, 22)
    model = TaskModel(source.encoder(), 2, per_token=False)
    whole = predict(model, problem)
    assert whole.shape == (22, 2)
    assert np.allclose(whole, predict(model, problem, tokens=40), atol=1e-6)
    # What prediction overwrites is nowhere read again.
    batch = build_batch(problem.encoded, np.arange(22))
    with torch.no_grad():
        overwritten = model.eval()(batch)
    assert torch.equal(overwritten, model(batch)) and np.allclose(whole, overwritten.numpy(), atol=1e-6)
    tokens = predict(TaskModel(source.encoder(), 3, per_token=True), problem, tokens=40)
    assert tokens.shape == (len(problem.encoded.ids), 3)


_RANK = """
import sys, numpy as np, torch, torch.distributed as dist
from eval.predict import predict
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
model, problem, five = torch.load(f"{folder}/case.pt", weights_only=False)
for world in (1, 2, 3, 4):
    if rank >= world:
        continue
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    np.save(f"{folder}/{world}-{rank}.npy", predict(model, problem, tokens=30))
    np.save(f"{folder}/{world}-{rank}-five.npy", predict(model, five, tokens=30))
    dist.destroy_process_group()
"""


@pytest.mark.multiproc
@pytest.mark.slow
def test_r33_any_number_of_ranks_scores_every_example_once(source: ModelSource, tmp_path: Path) -> None:
    """22 examples; and five of which three are right, which is 0.6 on 1, 2, 3 or 4 ranks."""
    problem, five = class_problem(source, 22), class_problem(source, 5)
    model = TaskModel(source.encoder(), 2, per_token=False)
    torch.save((model, problem, five), tmp_path / "case.pt")
    ranks = [subprocess.Popen([sys.executable, "-c", _RANK, str(rank), str(tmp_path)]) for rank in range(4)]
    assert [process.wait(timeout=300) for process in ranks] == [0, 0, 0, 0]
    alone = predict(model, problem, tokens=30)
    right = predict(model, five, tokens=30).argmax(1)
    gold = np.where([True, True, False, True, False], right, 1 - right)
    for world in (1, 2, 3, 4):
        for rank in range(world):
            assert np.array_equal(np.load(tmp_path / f"{world}-{rank}.npy"), alone)
            predicted = np.load(tmp_path / f"{world}-{rank}-five.npy").argmax(1)
            assert compute(("accuracy",), gold, predicted)["accuracy"].value == 0.6


def flat(lengths: list[int]) -> Encoded:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Encoded(
        ids=np.zeros(sum(lengths), dtype=np.int32), offsets=offsets, segment_a=np.array(lengths), truncated=0
    )


def test_span_loss_is_a_softmax_over_each_window() -> None:
    problem = SpanProblem(encoded=flat([4, 2, 3]), starts=np.array([1, 0, 2]), ends=np.array([3, 0, 2]))
    logits = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    by_hand = [
        torch.logsumexp(part[:, side], 0) - part[place, side]
        for part, places in zip(logits.split([3, 4]), [(2, 2), (1, 3)], strict=True)
        for side, place in enumerate(places)
    ]
    assert float(problem.loss(logits, np.array([2, 0]))) == pytest.approx(float(sum(by_hand)) / 4, abs=1e-6)


def test_choice_and_tag_losses() -> None:
    choice = ChoiceProblem(encoded=flat([2] * 6), labels=np.array([1, 2]), choices=3)
    assert len(choice) == 2 and choice.rows(np.array([1, 0])).tolist() == [3, 4, 5, 0, 1, 2]
    logits = torch.tensor([[0.0], [0.0], [9.0], [0.0], [9.0], [0.0]])
    assert float(choice.loss(logits, np.array([1, 0]))) < 1e-3
    tags = TagProblem(encoded=flat([3, 2]), tags=np.array([-1, 0, 1, -1, 1]), outputs=2)
    logits = torch.tensor([[5.0, 0], [0, 9], [0, 0], [9, 0], [0, 9]])
    assert float(tags.loss(logits, np.array([0, 1]))) == pytest.approx((9.0 + math.log(2)) / 3, abs=1e-3)


def test_source_errors(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(TaskError, match=r"no config.json; --model takes a Hugging Face folder"):
        ModelSource(tmp_path)
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    with pytest.raises(TaskError, match=r"expected .* vocab.txt"):
        ModelSource(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    with pytest.raises(TaskError, match=r"model.safetensors"):
        ModelSource(tmp_path)


@pytest.fixture(scope="module")
def small_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SST-2 in its official layout, with sentences of our own."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "SST-2").mkdir()
    for split, rows in (("train", 256), ("dev", 40)):
        texts, labels = reviews(rows)
        lines = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in zip(texts, labels, strict=True))]
        (folder / "SST-2" / f"{split}.tsv").write_text("\n".join(lines))
    return folder


def command(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    return ["--model", str(model), "--data", str(data), "--output", str(output), "--device", "cpu", *more]


def test_suite_scores_summarises_and_repeats_nothing(
    tiny_folder: Path, small_task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(tiny_folder, small_task, tmp_path, "--tasks", "sst-2", "--max-length", "32")
    fast = [*arguments, "--learning-rate", "0.005", "--epochs", "4", "--batch-size", "16"]
    assert main([*fast, "--seeds", "2"]) == 0
    files = sorted(tmp_path.glob("SST-2/seed-*.json"))
    assert len(files) == 2
    result = json.loads(files[0].read_text())
    assert result["splits"]["dev"]["n"] == 40 and result["splits"]["dev"]["metrics"]["accuracy"]["value"] > 0.9
    assert 0.5 <= result["splits"]["dev"]["baseline"]["accuracy"]["value"] < 0.7
    assert result["seed"] == 0 and result["recipe"]["epochs"] == 4 and result["task_version"] == 1
    assert {"git_revision", "versions", "model", "tokenizer", "data_sha256", "seconds", "steps"} <= set(result)
    # A killed suite goes on: the first result is kept as it is, the lost one comes again with the same score.
    lost = json.loads(files[1].read_text())
    files[1].write_text("{half")
    stamp = files[0].stat().st_mtime_ns
    assert main([*fast, "--seeds", "3"]) == 0
    said = capsys.readouterr().out
    assert said.count("finished before") == 1 and files[0].stat().st_mtime_ns == stamp
    assert json.loads(files[1].read_text())["splits"] == lost["splits"]
    # Fewer training examples are another experiment, beside the first.
    assert main([*fast, "--max-train-examples", "32"]) == 0
    summary = json.loads((tmp_path / "results.json").read_text())["results"]
    assert sorted(group["seeds"] for group in summary) == [[0], [0, 1, 2]]
    three = max(summary, key=lambda group: len(group["seeds"]))["splits"]["dev"]["metrics"]["accuracy"]
    assert three["n"] == 3 and three["sd"] is not None and three["left_out"] == 0
    assert next(group for group in summary if group["seeds"] == [0])["train_examples"] == 32


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tasks", "sst2x"], "unknown task 'sst2x'; did you mean 'SST-2'"),
        (["--tasks", "RTE"], "RTE/train.tsv: no such file"),
        (["--tasks", "SST-2"], "the model has 64 positions, the recipe asks for 128; pass --max-length 64"),
        (["--tasks", "SST-2", "--seeds", "0"], "--seeds is too small: 0"),
        (["--tasks", "SST-2", "--epochs", "0"], "recipe: epochs must be above 0"),
        (["--tasks", "SST-2", "--model", "nowhere"], "nowhere: no config.json"),
    ],
)
def test_command_errors(
    tiny_folder: Path,
    small_task: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    assert main([*command(tiny_folder, small_task, tmp_path / "out"), *more]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("eval.run: ") and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_dry_run_trains_nothing(small_task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(Path("anything"), small_task, tmp_path / "out", "--tasks", "SST-2", "--dry-run")
    assert main(arguments) == 0
    assert (
        "SST-2: train on 256, score dev 40; batch 32, rate 3e-05, 3 epochs, 24 steps x 1 seeds"
        in capsys.readouterr().out
    )
    assert not (tmp_path / "out").exists()
