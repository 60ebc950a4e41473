"""The nightly evaluation: what counts as a regression, and two nights of a real run with a real store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import import_tokenizer
from eval.ablation_rows import FOLDER
from eval.nightly import main
from eval.nightly_page import table_of
from eval.nights import Night, Score, add_night, judge, read_nights, regression_of
from eval.paper import BERT_BASE, paper_score
from eval.tasks import TASKS
from pretrain.checkpoint import TrainerState, file_records, incomplete_folder, publish, write_state, write_weights
from pretrain.config import load_config
from pretrain.encoder import BertForPreTraining
from pretrain.model_config import EncoderConfig

WORDS = ["the", "a", "film", "it", "was", "good", "bad"]


def score(mean: float | None, sd: float | None = None, n: int = 3, **changes: Any) -> Score:
    values = {"task": "RTE", "label": "RTE", "split": "dev", "metric": "accuracy", "identity": "x", "headline": True}
    return Score(**values | {"mean": mean, "sd": sd, "n": n, "left_out": 0, "examples": 277} | changes)


def night(step: int, *scores: Score, **changes: Any) -> Night:
    values = {"time": "2026-01-01 03:00", "run": "demo", "weights": str(step), "settings": ""}
    return Night(**values | {"step": step, "scores": scores} | changes)


@pytest.mark.parametrize(
    ("now", "before", "worse"),
    [
        (score(0.60, 0.02), score(0.62, 0.02), False),  # within the noise
        (score(0.50, 0.01), score(0.62, 0.01), True),
        (score(0.70, 0.01), score(0.62, 0.01), False),  # better
        (score(0.30, None, 1), score(0.62, None, 1), False),  # one seed each: nobody knows
        (score(0.30, None, 1), score(0.62, 0.01, 5), True),  # one side's noise serves both
        (score(0.527, 0.0), score(0.529, 0.0), False),  # half an example less, always the same class
        (score(None, None, 0, left_out=3), score(0.62, 0.01), True),
        (score(0.62, 0.01), score(None, None, 0), False),
        (score(float("nan")), score(0.62, 0.01), True),
    ],
)
def test_a_regression_lies_beyond_the_noise_of_the_seeds(now: Score, before: Score, worse: bool) -> None:
    assert bool(regression_of(now, before)) == worse
    (verdict,) = judge(night(2, now), [night(1, before)])
    assert bool(verdict.regression) == worse
    # Other settings, other runs and metrics that are no headline are not compared.
    for other in (night(2, score(0.1, 0.001, identity="y")), night(2, score(0.1, 0.001), run="other")):
        assert judge(other, [night(1, before)])[0].before is None
    assert judge(night(2, score(0.1, 0.001, headline=False)), [night(1, before)])[0].regression == ""


def test_r29_scores_that_are_not_finite_are_shown_left_out_and_never_best(tmp_path: Path) -> None:
    nights = [
        night(1, score(0.6, 0.01), score(0.5, label="WNLI", task="WNLI")),
        night(2, score(None, None, 0, left_out=3), score(0.4, label="WNLI", task="WNLI")),
        night(3, score(0.55, 0.01, 2, left_out=1), score(None, None, 0, label="WNLI", task="WNLI")),
    ]
    for each in nights:
        add_night(tmp_path, each)
    with open(tmp_path / "nights.jsonl", "a") as handle:
        handle.write('{"time": "torn')
    assert read_nights(tmp_path) == nights
    table = table_of(nights[2], nights, fresh=True)
    first, second = table["rows"]
    assert first[3:9] == ["55.00", "1.00", "2 of 3", "undefined", "–", "60.00 (step 1)"]
    assert second[3] == "undefined" and second[8] == "50.00 (step 1)" and "▼" in second[7]
    assert "Mean of 1 headline scores: 55.00; left out, without a score: WNLI." in table["notes"]


def test_the_paper_s_numbers_are_of_our_tasks() -> None:
    for task, split, metric in BERT_BASE:
        assert split in TASKS[task].dev_splits and metric in TASKS[task].metrics, (task, split, metric)
    assert paper_score("RTE", "dev", "accuracy") == "66.4 (test)"
    assert paper_score("MNLI", "dev_matched", "accuracy") == "84.4" and paper_score("SICK-E", "dev", "accuracy") == "–"


@pytest.fixture
def run(write_bert: Callable[..., Path], tmp_path: Path) -> Callable[[int, bool], Path]:
    """A function that saves a checkpoint of a step, whole or broken, and adds its lines to the run's metrics."""
    root = tmp_path / "demo"
    tokenizer = import_tokenizer(write_bert(tmp_path / "vocabulary", WORDS), TokenizerConfig())
    tokenizer.save(root / "data" / "tokenizer")
    config = load_config(FOLDER / "small.toml", [f"data.dir={root}/data", f"run.dir={root}/pretrain"])
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "intermediate": 64, "max_positions": 128, "initializer_range": 0.1}
    model = EncoderConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0, vocab_size=tokenizer.vocab_size)
    tree = config.as_tree() | {"model": model.model_dump(mode="json")}
    rng = np.random.default_rng(0)
    (tmp_path / "RTE").mkdir()
    for split, rows in (("train", 128), ("dev", 60)):
        lines = ["index\tsentence1\tsentence2\tlabel"]
        for n, label in enumerate(rng.integers(0, 2, rows)):
            text = " ".join([*rng.choice(WORDS[:5], 3), ["bad", "good"][label]])
            lines.append(f"{n}\tthe film\t{text}\t{['not_entailment', 'entailment'][label]}")
        (tmp_path / "RTE" / f"{split}.tsv").write_text("\n".join(lines) + "\n")

    def save(step: int, broken: bool) -> Path:
        torch.manual_seed(0)
        weights = {name: tensor.detach() for name, tensor in BertForPreTraining(model).named_parameters()}
        if broken:  # a pooler of zeros on a norm of zeros: no gradient ever reaches either
            for name in ("encoder.layers.1.feed_forward_norm.weight", "encoder.pooler.weight"):
                weights[name].zero_()
        folder = incomplete_folder(root / "pretrain" / "checkpoints", step)
        folder.mkdir(parents=True)
        write_weights(folder, weights)
        state = TrainerState(
            step=step,
            skipped_steps=0,
            skipped_in_a_row=0,
            run_id="a",
            loader={},
            world_size=1,
            zero_stage=1,
            precision="fp32",
            tokenizer=tokenizer.fingerprint,
            data="",
            git="",
            config=tree,
        )
        write_state(folder, state)
        publish(root / "pretrain" / "checkpoints", step, file_records(folder))
        with open(root / "pretrain" / "metrics.jsonl", "a") as handle:
            handle.write(json.dumps({"kind": "train", "step": step, "mlm_loss": 3.0}) + "\n")
            handle.write(json.dumps({"kind": "validation", "step": step, "mlm_loss": 2.5, "perplexity": 12.2}) + "\n")
        (root / "pretrain" / "run.json").write_text(json.dumps({"name": "demo", "config": tree}))
        return root

    return save


@pytest.mark.slow
def test_two_nights_of_a_run(
    run: Callable[[int, bool], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second checkpoint is broken: a regression, and the exit code says so."""
    root = run(10, False)
    output, uri = tmp_path / "nightly", f"sqlite:///{tmp_path}/mlflow.db"
    fast = "--max-length 32 --learning-rate 0.005 --epochs 4 --batch-size 8"
    command = ["--runs", str(root), "--tasks", "RTE", "--data", str(tmp_path), "--output", str(output)]
    command += ["--seeds", "2", "--evaluation", fast, "--tracking-uri", uri]
    assert main(command) == 0
    page = (output / "index.html").read_text()
    assert "demo: task scores" in page and "66.4 (test)" in page and "Registered as version 1." in page
    assert "src=" not in page and "perplexity 12.20" in page
    assert main(command) == 0 and "step 10 was evaluated before" in capsys.readouterr().out
    run(20, True)
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "eval.nightly: demo step 20: RTE dev accuracy:" in said and "below the night before" in said
    text = (output / "report.md").read_text()
    assert "▼" in text and "(step 10)" in text and "- demo step 20: RTE" in text
    assert (output / "index.html").read_text().count("<svg") == 1 + 1  # scores over steps; the loss
    assert [night.step for night in read_nights(output)] == [10, 20]

    from pretrain.tracking import open_client

    client = open_client(uri)
    versions = {int(v.version): v for v in client.search_model_versions("name = 'demo'")}
    assert sorted(versions) == [1, 2] and versions[1].tags["step"] == "10"
    (first,) = read_nights(output)[0].scores
    assert (
        versions[1].tags["RTE.dev.accuracy"].startswith(str(first.mean))
        and " n 2" in versions[1].tags["RTE.dev.accuracy"]
    )
    metrics = client.get_run(versions[1].run_id).data.metrics
    assert metrics["eval/RTE/dev/accuracy"] == pytest.approx(first.mean)
    kept = Path(versions[1].source.removeprefix("file://"))
    exported = output / "exports" / "demo" / "step-000000010" / "model.safetensors"
    assert (kept / "model.safetensors").read_bytes() == exported.read_bytes()


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--runs", str(tmp_path), "--data", str(tmp_path), "--output", str(tmp_path / "out")]
    assert main([*command, "--tasks", "RTX"]) == 2 and "did you mean" in capsys.readouterr().err
    assert main([*command, "--tasks", "RTE"]) == 2 and "no run here" in capsys.readouterr().err


def test_runs_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / "pretrain").mkdir(parents=True)
        (tmp_path / folder / "pretrain" / "run.json").write_text('{"name": "demo"}')
    command = ["--runs", str(tmp_path), "--data", str(tmp_path), "--output", str(tmp_path / "out"), "--tasks", "RTE"]
    assert main(command) == 2 and "several runs are called 'demo'" in capsys.readouterr().err
