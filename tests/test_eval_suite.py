"""Grids, starts, prediction files, submission archives and classifiers that are fine-tuned already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eval.job_array import main as array_main
from eval.plan import PAPER, Plan, parse_grid, parse_part
from eval.run import main, visible_gpus, worker_environment
from eval.score import main as score_main
from eval.submission import main as submission_main
from eval.tasks import TASKS, TaskError

NOISE = ["the", "a", "film", "it", "was"]
WORDS = [*NOISE, "good", "great", "bad", "awful", "so"]
NLI = ("entailment", "neutral", "contradiction")
MARKER = {"entailment": "good", "neutral": "so", "contradiction": "bad"}


def sentence(rng: np.random.Generator, word: str) -> str:
    return " ".join([*rng.choice(NOISE, rng.integers(2, 6)), word, *rng.choice(NOISE, 2)])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SST-2 and MNLI in their official layout; the label is a word of the sentence."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (folder / "SST-2").mkdir()
    (folder / "MNLI").mkdir()
    for split, rows in (("train", 256), ("dev", 24), ("test", 10)):
        labels = rng.integers(0, 2, rows)
        texts = [sentence(rng, ["bad", "good"][label]) for label in labels]
        if split == "test":
            lines = ["index\tsentence", *(f"{n}\t{text}" for n, text in enumerate(texts))]
            (folder / "expected.txt").write_text("".join(map(str, labels)))
        else:
            lines = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in zip(texts, labels, strict=True))]
        (folder / "SST-2" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    for split, rows in (
        ("train", 240),
        ("dev_matched", 30),
        ("dev_mismatched", 3),
        ("test_matched", 6),
        ("test_mismatched", 6),
    ):
        names = [NLI[n % 3] for n in range(rows)]
        gold = not split.startswith("test")
        lines = ["index\tsentence1\tsentence2" + ("\tgold_label" if gold else "")]
        for n, name in enumerate(names):
            lines.append(f"{n}\t{sentence(rng, 'film')}\t{sentence(rng, MARKER[name])}" + (f"\t{name}" if gold else ""))
        (folder / "MNLI" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def model(write_bert: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"), WORDS)


def command(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    fast = ["--max-length", "32", "--learning-rate", "0.005", "--epochs", "4", "--batch-size", "16"]
    return ["--model", str(model), "--data", str(data), "--output", str(output), "--device", "cpu", *fast, *more]


def test_a_grid_is_resumable_and_its_best_is_marked(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = command(model, data, tmp_path, "--tasks", "SST-2", "--grid", "learning_rate=0.005,1e-9", "batch_size=16")
    assert main([*grid, "--part", "0/2"]) == 0
    assert len(list(tmp_path.glob("SST-2/seed-*.json"))) == 1
    assert "best_of_grid" not in json.loads((tmp_path / "results.json").read_text())["results"][0]
    capsys.readouterr()
    assert main(grid) == 0
    assert capsys.readouterr().out.count("finished before") == 1
    good, bad = sorted(
        json.loads((tmp_path / "results.json").read_text())["results"],
        key=lambda group: -group["recipe"]["learning_rate"],
    )
    assert good["best_of_grid"] == 2 and "best_of_grid" not in bad
    assert good["splits"]["dev"]["metrics"]["accuracy"]["mean"] > bad["splits"]["dev"]["metrics"]["accuracy"]["mean"]


def test_grid_words() -> None:
    task = TASKS["MRPC"]
    paper = Plan(data=Path(), output=Path(), grid=parse_grid([]), seeds=2)
    assert parse_grid([]) == PAPER and parse_grid(None) == {}
    assert [recipe.learning_rate for recipe in paper.recipes(task)] == [5e-5, 4e-5, 3e-5, 2e-5]
    parts = [Plan(data=Path(), output=Path(), grid=PAPER, seeds=2, part=k, parts=3).runs([task]) for k in range(3)]
    taken = [(recipe, seed) for part in parts for _, recipe, seed in part]
    assert len(taken) == len(set(taken)) == 8 and set(taken) == {run[1:] for run in paper.runs([task])}
    grid = Plan(data=Path(), output=Path(), grid=parse_grid(["epochs=2,3", "learning_rate=1e-4,1e-5"]))
    assert [(r.epochs, r.learning_rate) for r in grid.recipes(task)] == [(2, 1e-4), (2, 1e-5), (3, 1e-4), (3, 1e-5)]
    for words, message in ((["rate=1"], "expected KEY=VALUE"), (["epochs=two"], "epochs takes int values")):
        with pytest.raises(TaskError, match=message):
            parse_grid(words)
    assert parse_part("2/5") == (2, 5)
    for text in ("5/5", "1", "a/b"):
        with pytest.raises(TaskError, match="expected K/N"):
            parse_part(text)


def test_prediction_files_and_the_archive(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, archive = tmp_path / "out", tmp_path / "glue.zip"
    assert submission_main(["--results", str(output), "--output", str(archive)]) == 2
    assert "run eval.run with --predictions first" in capsys.readouterr().err
    assert main(command(model, data, output, "--tasks", "SST-2", "mnli", "--predictions")) == 0
    assert submission_main(["--results", str(output), "--output", str(archive)]) == 0
    first = archive.read_bytes()
    with zipfile.ZipFile(archive) as file:
        assert file.namelist() == ["MNLI-m.tsv", "MNLI-mm.tsv", "SST-2.tsv"]
        sst = file.read("SST-2.tsv").decode().splitlines()
        assert sst[0] == "index\tprediction" and len(sst) == 11
        assert "".join(line.split("\t")[1] for line in sst[1:]) == (data / "expected.txt").read_text()
        names = [line.split("\t")[1] for line in file.read("MNLI-m.tsv").decode().splitlines()[1:]]
        assert len(names) == 6 and set(names) <= set(NLI)
    assert "the server also wants CoLA.tsv, MRPC.tsv" in capsys.readouterr().err
    assert submission_main(["--results", str(output), "--output", str(archive)]) == 0 and archive.read_bytes() == first
    # The dev file scores as the run did.
    (predicted,) = output.glob("MNLI/seed-*/dev_matched.tsv")
    capsys.readouterr()
    assert score_main(["glue", "MNLI", str(data), str(predicted)]) == 0
    result = json.loads(predicted.parent.with_suffix(".json").read_text())
    accuracy = result["splits"]["dev_matched"]["metrics"]["accuracy"]["value"]
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(accuracy) and accuracy > 0.6


def test_start_from_another_task_is_another_experiment(model: Path, data: Path, tmp_path: Path) -> None:
    few = ["--tasks", "SST-2", "--max-train-examples", "16"]
    assert main(command(model, data, tmp_path, *few)) == 0
    assert main(command(model, data, tmp_path, *few, "--start-task", "MNLI")) == 0
    plain, started = sorted(
        json.loads((tmp_path / "results.json").read_text())["results"], key=lambda group: "start" in group
    )
    assert started["start"]["task"] == "MNLI" and "start" not in plain
    # 16 examples teach nothing; a model that has learnt what "good" means from MNLI does better.
    means = [group["splits"]["dev"]["metrics"]["accuracy"]["mean"] for group in (plain, started)]
    assert means[1] > means[0]


@pytest.fixture(scope="module")
def classifier(model: Path, data: Path) -> Any:
    """`transformers`' own classifier, trained until it is perfect on MNLI; its outputs in the order of `NLI`."""
    from transformers import BertForSequenceClassification, BertTokenizerFast

    torch.manual_seed(0)
    tokenizer = BertTokenizerFast(vocab=str(model / "vocab.txt"))
    net = BertForSequenceClassification.from_pretrained(model, num_labels=3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    rows = [line.split("\t") for line in (data / "MNLI" / "train.tsv").read_text().splitlines()[1:]]
    batch = tokenizer([row[1] for row in rows], [row[2] for row in rows], padding=True, return_tensors="pt")
    labels = torch.tensor([NLI.index(row[3]) for row in rows])
    for _ in range(40):
        optimizer.zero_grad()
        net(**batch, labels=labels).loss.backward()
        optimizer.step()
    return net.eval()


def save_classifier(net: Any, model: Path, folder: Path, names: list[str], order: list[int]) -> Path:
    """The classifier with its outputs in another order, named `names`."""
    from transformers import BertForSequenceClassification

    copy = BertForSequenceClassification.from_pretrained(
        model, num_labels=len(order), id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)}
    )
    state = net.state_dict()
    state |= {f"classifier.{part}": state[f"classifier.{part}"][order] for part in ("weight", "bias")}
    copy.load_state_dict(state)
    copy.save_pretrained(folder)
    (folder / "vocab.txt").write_bytes((model / "vocab.txt").read_bytes())
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ["contradiction", "entailment", "neutral"],
        ["ENTAILMENT", "Neutral", "contradiction"],
        ["LABEL_0", "LABEL_1", "LABEL_2"],
    ],
)
def test_r35_labels_are_matched_by_name(
    classifier: Any, model: Path, data: Path, tmp_path: Path, names: list[str]
) -> None:
    order = [0, 1, 2] if names[0].startswith("LABEL") else [NLI.index(name.lower()) for name in names]
    folder = save_classifier(classifier, model, tmp_path / "model", names, order)
    assert main(command(folder, data, tmp_path / "out", "--tasks", "MNLI", "--evaluate-only")) == 0
    (result,) = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert {split: scores["n"] for split, scores in result["splits"].items()} == {
        "dev_matched": 30,
        "dev_mismatched": 3,
    }
    for scores in result["splits"].values():
        assert scores["metrics"]["accuracy"]["mean"] == 1.0
    assert result["warnings"] == []


def test_r35_wrong_heads_and_results_below_chance(
    classifier: Any, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = save_classifier(classifier, model, tmp_path / "two", ["entailment", "neutral"], [0, 1])
    only = ["--tasks", "MNLI", "--evaluate-only"]
    assert main(command(two, data, tmp_path / "out", *only)) == 2
    assert "task MNLI has 3 labels" in capsys.readouterr().err
    assert main(command(model, data, tmp_path / "out", *only)) == 2
    assert "no classifier.weight; --evaluate-only takes a fine-tuned BERT" in capsys.readouterr().err
    # Unnamed labels in another order than the documented one: nothing is right, and that is said.
    turned = save_classifier(classifier, model, tmp_path / "turned", ["LABEL_0", "LABEL_1", "LABEL_2"], [1, 2, 0])
    assert main(command(turned, data, tmp_path / "out", *only)) == 0
    assert "warning: dev_matched: 0 of 30 right is far below chance; are labels swapped?" in capsys.readouterr().out


def test_dry_run_estimates_the_time(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(model, data, tmp_path / "out", "--tasks", "SST-2", "--seeds", "2", "--grid", "epochs=1,2")
    assert main([*arguments, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "64 steps x 2 settings x 2 seeds, up to 32 tokens; about " in said and " in all on this machine" in said
    assert not (tmp_path / "out").exists()


def test_bfloat16_is_another_experiment_with_finite_scores(model: Path, data: Path, tmp_path: Path) -> None:
    for more in ([], ["--precision", "bf16"]):
        assert main(command(model, data, tmp_path, "--tasks", "SST-2", *more)) == 0
    groups = json.loads((tmp_path / "results.json").read_text())["results"]
    plain, coarse = sorted(groups, key=lambda group: group.get("precision", ""))
    assert coarse["precision"] == "bf16" and "precision" not in plain
    accuracy = coarse["splits"]["dev"]["metrics"]["accuracy"]["mean"]
    assert accuracy > 0.9
    # It learns from the weights of each step, and its losses are those of coarser products.
    losses = [json.loads(path.read_text())["final_loss"] for path in tmp_path.glob("SST-2/seed-*.json")]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], abs=0.1)


def test_each_worker_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5f")
    assert visible_gpus() == ["4", "GPU-5f"]
    given = [worker_environment(part, 3, visible_gpus())["CUDA_VISIBLE_DEVICES"] for part in range(3)]
    assert given == ["4", "GPU-5f", "4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == [] and "CUDA_VISIBLE_DEVICES" not in worker_environment(0, 2, [])


@pytest.mark.slow
@pytest.mark.multiproc
def test_workers_share_the_runs(model: Path, data: Path, tmp_path: Path) -> None:
    arguments = command(model, data, tmp_path, "--tasks", "SST-2", "--seeds", "2", "--epochs", "1", "--workers", "2")
    assert main(arguments) == 0
    (group,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert group["seeds"] == [0, 1]


@pytest.mark.slurm
@pytest.mark.slow
def test_a_job_array_on_a_real_cluster(
    slurm_script: Callable[..., subprocess.CompletedProcess[str]], model: Path, data: Path, tmp_path: Path
) -> None:
    """Tasks x grid x seeds through sbatch; the summary afterwards repeats nothing."""
    run = command(model, data, tmp_path / "out", "--tasks", "SST-2", "--epochs", "1", "--grid", "batch_size=16,32")
    array = [sys.executable, "-m", "eval.job_array", "--elements", "2", "--time", "5", "--", *run]
    queued = slurm_script("exec", *array)
    assert queued.returncode == 0, queued.stderr
    until = time.monotonic() + 300  # the bound is there to end a broken test
    while len(list(tmp_path.glob("out/SST-2/seed-*.json"))) < 2:
        assert time.monotonic() < until, [path.read_text() for path in tmp_path.glob("out/eval-*.log")]
        time.sleep(0.5)
    job = queued.stdout.strip()
    logs = {f"eval-{job}-{element}.log" for element in range(2)}
    assert {path.name for path in (tmp_path / "out").glob("eval-*.log")} == logs
    before = {path: path.read_bytes() for path in tmp_path.glob("out/SST-2/seed-*.json")}
    assert main(run) == 0
    assert {path: path.read_bytes() for path in tmp_path.glob("out/SST-2/seed-*.json")} == before
    groups = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert sorted(group["recipe"]["batch_size"] for group in groups) == [16, 32]


@pytest.mark.slow
def test_a_job_array_has_an_element_for_each_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a folder"
    run = ["--model", "nowhere", "--data", str(data), "--output", str(output), "--tasks", "SST-2", "--seeds", "3"]
    assert array_main(["--time", "10", "--gpus", "1", "--dry-run", "--", *run, "--grid"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-11\n" in script and "#SBATCH --gpus-per-task=1\n" in script and not output.exists()
    assert f'#SBATCH --output="{output}/eval-%A-%a.log"\n' in script
    assert array_main(["--elements", "2", "--dry-run", "--", *run]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-1\n" in script
    # What an element does is what the command does: here it says that there is no such model.
    done = subprocess.run(
        ["bash", "-c", script],
        check=False,
        env=os.environ | {"SLURM_ARRAY_TASK_ID": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2 and "nowhere: no config.json" in done.stderr
    assert array_main(["--dry-run", "--", *run[:-4], "--tasks", "nothing"]) == 2
