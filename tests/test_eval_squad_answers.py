"""From span logits to answers, and SQuAD as a task of the suite."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import import_tokenizer
from eval.run import main
from eval.score import main as score_main
from eval.squad_answers import SquadProblem, baseline_answers, decode, predictions, score_answers, squad_problem
from eval.squad_data import SquadData, SquadExample, read_squad

WORDS = ["who", "what", "where", "paris", "oslo", "lima", "anna", "is", "in", "the", "a", "cat", "sat", "on", "?", "."]


def gold_logits(problem: SquadProblem) -> np.ndarray:
    """Logits that say the labelled places, and a little for everything else."""
    logits = np.random.default_rng(0).normal(size=(len(problem.encoded.ids), 2)).astype(np.float32)
    assert problem.starts is not None and problem.ends is not None
    logits[problem.encoded.offsets[:-1] + problem.starts, 0] += 20
    logits[problem.encoded.offsets[:-1] + problem.ends, 1] += 20
    return logits


def test_gold_places_give_full_marks(shared_data: Path) -> None:
    tokenizer = import_tokenizer(shared_data / "vocab" / "bert-base-uncased-vocab.txt", TokenizerConfig())
    data = read_squad(shared_data / "xquad" / "xquad.en.json.gz").take(np.arange(300))
    problem = squad_problem(tokenizer, data, 160, 64)
    assert len(problem.windows.example) > 1.3 * len(data)
    answers = decode(problem.windows, data.examples, gold_logits(problem))
    scores, official = score_answers(data, answers)
    assert list(answers) == [example.id for example in data.examples] and official["missing"] == 0
    # What is lacking: answers of more than 30 tokens, or that begin inside a word.
    assert scores["exact"].value > 0.97 and scores["f1"].value > 0.985
    for example in data.examples:
        assert all(text in example.context for text, _ in answers[example.id].n_best)
        assert all(a[1] >= b[1] for a, b in pairwise(answers[example.id].n_best))
    assert baseline_answers(data)["f1"].value == 0.0


def example(key: str, context: str, answer: str = "") -> SquadExample:
    answers, starts = ((answer,), (context.index(answer),)) if answer else ((), ())
    return SquadExample(id=key, question="who?", context=context, answers=answers, starts=starts)


@pytest.fixture(scope="module")
def model(write_bert: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"), WORDS)


def test_spans_are_in_the_context_in_order_and_short(model: Path) -> None:
    tokenizer = import_tokenizer(model, TokenizerConfig())
    data = SquadData(version="1.1", examples=[example("q", " ".join(["cat"] * 80), "cat")], articles=1)
    problem = squad_problem(tokenizer, data, 128, 0)
    logits = np.zeros((len(problem.encoded.ids), 2), dtype=np.float32)
    logits[1, :] = 99.0  # a token of the question
    logits[4 + 50, 0], logits[4 + 40, 1] = 9.0, 9.0  # an end before the start
    logits[4 + 79, 1] = 8.0  # exactly 30 tokens from the start
    assert decode(problem.windows, data.examples, logits)["q"].text == " ".join(["cat"] * 30)
    logits[4 + 49, 0] = 9.5
    assert len(decode(problem.windows, data.examples, logits)["q"].text.split()) == 30


def test_r31_null_scores_reach_the_scorer(model: Path) -> None:
    """The lowest score of "no answer" over the windows counts; the threshold is searched over texts, not over blanks."""
    tokenizer = import_tokenizer(model, TokenizerConfig())
    long = " ".join(["cat"] * 100) + " oslo"
    data = SquadData(version="2.0", examples=[example("a", long, "oslo"), example("u", "the cat sat")], articles=1)
    problem = squad_problem(tokenizer, data, 100, 32)
    assert problem.windows.example.tolist() == [0, 0, 1]
    assert problem.starts is not None and problem.starts.tolist()[0] == 0 and problem.starts[1] > 0
    logits = np.zeros((len(problem.encoded.ids), 2), dtype=np.float32)
    cls = problem.encoded.offsets[:-1]
    logits[cls] = [[9, 9], [2, 2], [4, 4]]
    logits[cls[1] + problem.starts[1], 0] = logits[cls[1] + problem.ends[1], 1] = 1.0
    answers = decode(problem.windows, data.examples, logits)
    assert (answers["a"].null_odds, answers["u"].null_odds) == (2.0, 8.0) and answers["a"].text == "oslo"
    assert predictions(answers, "2.0") == {"a": "", "u": ""} and predictions(answers, "2.0", 2.0)["a"] == "oslo"
    scores, official = score_answers(data, answers)
    assert scores["f1"].value == 0.5 and scores["best_f1"].value == 1.0 and official["best_f1_thresh"] == 2.0
    assert baseline_answers(data)["f1"].value == 0.5


def write_squad(path: Path, number: int, version: str) -> None:
    """Questions whose answer is the one name in the context."""
    rng = np.random.default_rng(number)
    paragraphs = []
    for key in range(number):
        words = list(rng.choice(["the", "a", "cat", "sat", "on"], rng.integers(4, 30)))
        name, place = rng.choice(["paris", "oslo", "lima", "anna"]), int(rng.integers(len(words)))
        unanswerable = version == "2.0" and key % 2 == 0
        if not unanswerable:
            words.insert(place, name)
        context = " ".join(words)
        answers = [] if unanswerable else [{"text": name, "answer_start": len(" ".join(words[:place])) + (place > 0)}]
        paragraphs.append({"context": context, "qas": [{"id": f"{key}", "question": "who?", "answers": answers}]})
    path.write_text(json.dumps({"version": version, "data": [{"paragraphs": paragraphs}]}))


@pytest.mark.slow
def test_squad_runs_as_a_task(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "squad").mkdir()
    write_squad(tmp_path / "squad" / "train-v2.0.json", 300, "2.0")
    write_squad(tmp_path / "squad" / "dev-v2.0.json", 60, "2.0")
    arguments = ["--model", str(model), "--data", str(tmp_path), "--output", str(tmp_path / "out"), "--device", "cpu"]
    fast = ["--max-length", "96", "--stride", "8", "--learning-rate", "0.003", "--epochs", "4", "--batch-size", "8"]
    assert main([*arguments, "--tasks", "squad2.0", *fast, "--predictions"]) == 0
    (path,) = (tmp_path / "out" / "SQuAD2.0").glob("seed-*.json")
    dev = json.loads(path.read_text())["splits"]["dev"]
    assert dev["n"] == 60 and dev["metrics"]["f1"]["value"] > 0.9 and dev["baseline"]["f1"]["value"] == 0.5
    assert dev["metrics"]["best_f1"]["value"] >= dev["metrics"]["f1"]["value"]
    assert dev["details"]["HasAns_total"] == 30 and "best_f1_thresh" in dev["details"]
    # The prediction file scores as the run did.
    capsys.readouterr()
    predicted = path.with_suffix("") / "dev.predictions.json"
    assert score_main(["squad", str(tmp_path / "squad" / "dev-v2.0.json"), str(predicted)]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores == {key: value for key, value in dev["details"].items() if not key.startswith("best_")}
    assert scores["f1"] == pytest.approx(100 * dev["metrics"]["f1"]["value"])
