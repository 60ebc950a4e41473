"""Official scores of real prediction files, and the command that prints them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.readers import read_split
from eval.score import main
from eval.squad_data import read_squad
from eval.squad_metrics import Question, normalise, score_v1, score_v2, token_f1
from eval.tasks import TASKS

OFFICIAL = {
    "v1.1.bert-ensemble-google.json": ("dev-v1.1.json.gz", ""),
    "v2.0.bert-single-google.json": ("dev-v2.0.rebuilt.json.gz", ""),
    "v2.0.bert-base-uncased-community.json": (
        "dev-v2.0.rebuilt.json.gz",
        "v2.0.bert-base-uncased-community.null_odds.json.gz",
    ),
}


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_prediction_files_give_the_official_scores(
    shared_data: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    squad = shared_data / "squad"
    data, nulls = OFFICIAL[name]
    arguments = ["squad", str(squad / data), str(squad / "predictions" / f"{name}.gz")]
    assert main([*arguments, "--na-prob", str(squad / "predictions" / nulls)] if nulls else arguments) == 0
    scores = json.loads(capsys.readouterr().out)
    expected = json.loads((squad / "predictions" / "expected_scores.json").read_text())[name]
    expected.pop("na_prob_file", None)
    assert {key: scores[key] for key in expected} == expected
    assert scores["missing"] == 0


def test_r31_thresholds_and_missing_predictions() -> None:
    questions = [Question("u1", ()), Question("u2", ()), Question("a1", ("Lima",)), Question("a2", ("1999",))]
    predictions = {"u1": "blue", "u2": "1870", "a1": "Lima", "a2": "1999"}
    nulls = {"u1": 2.0, "u2": 6.0, "a1": -5.0, "a2": -1.0}
    scores = score_v2(questions, predictions, nulls)
    assert (scores["exact"], scores["best_exact"], scores["best_exact_thresh"]) == (50.0, 100.0, -1.0)
    assert score_v2(questions, predictions, nulls, threshold=-1.0)["exact"] == 100.0
    # An unanswerable question answered on the way costs a point: a1 (-5), u1 (-3), a2 (-1), u2 (6).
    between = score_v2(questions, predictions, nulls | {"u1": -3.0})
    assert (between["best_exact"], between["best_exact_thresh"]) == (75.0, -5.0)
    del predictions["a2"]
    missing = score_v2(questions, predictions, nulls)
    assert (missing["exact"], missing["HasAns_exact"], missing["missing"]) == (25.0, 50.0, 1)
    # A missing prediction for an unanswerable question is wrong too, not a lucky "no answer".
    assert score_v2([Question("u", ())], {})["exact"] == 0.0
    assert score_v1([Question("a", ("x",))], {})["exact_match"] == 0.0


def test_normalisation_and_the_two_versions_of_f1() -> None:
    assert normalise("The  “Cat”, a dog's\u00a0An-swer!") == "“cat” dogs answer"
    assert token_f1("the", "a", version="2.0") == 1.0 and token_f1("the", "a", version="1.1") == 0.0
    assert token_f1("red red car", "red car car", version="1.1") == pytest.approx(2 / 3)


def test_readers_of_the_official_files(shared_data: Path) -> None:
    first = read_squad(shared_data / "squad" / "dev-v1.1.json.gz")
    second = read_squad(shared_data / "squad" / "dev-v2.0.rebuilt.json.gz")
    part = read_squad(shared_data / "squad" / "train-v1.1.part-44-articles.json.gz")
    assert (first.version, first.articles, len(first.examples), first.misplaced) == ("1.1", 48, 10570, [])
    answerable = sum(bool(example.answers) for example in second.examples)
    assert (second.version, second.articles, len(second.examples), answerable) == ("2.0", 35, 11873, 5928)
    assert (part.articles, len(part.examples), part.misplaced) == (44, 11877, [])
    for language in ("en", "de", "zh", "ar", "hi", "ru"):
        xquad = read_squad(shared_data / "xquad" / f"xquad.{language}.json.gz")
        assert (xquad.articles, len(xquad.examples), xquad.misplaced) == (48, 1190, [])


def test_r37_offsets_count_code_points_and_misplaced_answers_are_reported(tmp_path: Path) -> None:
    cases = [
        ("Line one\r\nLine two has gold.", "gold", 23),
        ("😀😀 won by Oslo", "Oslo", 10),
        ("Nothing of it", "gold", 3),
    ]
    paragraphs = [
        {
            "context": text,
            "qas": [{"id": str(n), "question": " " * 25000 + "Who won?", "answers": [{"text": a, "answer_start": s}]}],
        }
        for n, (text, a, s) in enumerate(cases)
    ]
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"version": "1.1", "data": [{"paragraphs": paragraphs}]}))
    data = read_squad(path)
    assert data.misplaced == ["2"] and len(data.examples) == 3
    assert {example.question for example in data.examples} == {"Who won?"}
    assert data.examples[0].context == cases[0][0]


def test_glue_predictions(shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gold = read_split(shared_data, TASKS["MRPC"], "dev")
    submission = tmp_path / "MRPC.tsv"
    names = [gold.label_names[label] for label in gold.labels]
    submission.write_text(
        "index\tprediction\n" + "".join(f"{i}\t{name}\n" for i, name in zip(gold.ids, names, strict=True))
    )
    assert main(["glue", "mrpc", str(shared_data), str(submission)]) == 0
    assert json.loads(capsys.readouterr().out) == {"f1": 1.0, "accuracy": 1.0, "total": 408}
    submission.write_text("".join(f"{i}\t1\r\n" for i in gold.ids))
    assert main(["glue", "mrpc", str(shared_data), str(submission)]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(279 / 408)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0\tequivalent\n", "1 predictions for 408 examples; missing ['1', '10', '100']"),
        ("0\tequivalent\n0\tequivalent\n", "line 2 repeats index 0"),
        ("0 equivalent\n", "line 1 has 1 fields"),
    ],
)
def test_glue_prediction_errors(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: str, message: str
) -> None:
    (tmp_path / "p.tsv").write_text(rows)
    assert main(["glue", "mrpc", str(shared_data), str(tmp_path / "p.tsv")]) == 2
    assert message in capsys.readouterr().err


def test_squad_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text('{"data": [{"paragraphs": 3}]}')
    assert main(["squad", str(tmp_path / "none.json"), "p.json"]) == 2
    assert main(["squad", str(tmp_path / "bad.json"), "p.json"]) == 2
    errors = capsys.readouterr().err
    assert "none.json: no such file" in errors and "bad.json: not a SQuAD file (TypeError" in errors
