"""Multiple choice: CSV with quoting, four inputs an example, honest labels (R38)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eval.choice_readers import read_choices
from eval.packing import Encoded
from eval.problems import ChoiceProblem
from eval.readers import ReadError
from eval.run import main
from eval.task_data import TaskData, score_split
from eval.tasks import TASKS

HEADER = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label\n"
SWAG = TASKS["SWAG"]


def write(folder: Path, content: str, name: str = "train.csv") -> Path:
    (folder / "swag").mkdir(exist_ok=True)
    (folder / "swag" / name).write_text(content, newline="")
    return folder


def test_r38_rows_are_csv_with_quoting_and_have_four_inputs(tmp_path: Path) -> None:
    row = (
        '0,v,1,"He stops, looks. He","He stops, looks.",He,gold,"runs, falls.",sits.,"turns, ""slowly"".",waits.,2\r\n'
    )
    examples = read_choices(write(tmp_path, HEADER + row + row), SWAG, "train")
    assert len(examples) == 2 and examples.labels.tolist() == [2, 2] and examples.choices == 4
    assert examples.texts_a[:4] == ["He stops, looks."] * 4
    assert examples.texts_b[:4] == ["He runs, falls.", "He sits.", 'He turns, "slowly".', "He waits."]
    one = examples.take(np.array([1]))
    assert len(one) == 1 and len(one.texts_a) == len(one.texts_b) == 4


def test_r38_accuracy_counts_examples(tmp_path: Path) -> None:
    row = "0,v,1,s,a,b,gold,e0,e1,e2,e3,{}\n"
    examples = read_choices(write(tmp_path, HEADER + row.format(1) + row.format(2)), SWAG, "train")
    logits = np.array([0, 5, 0, 0, 5, 0, 0, 0], dtype=np.float32)[:, None]
    encoded = Encoded(ids=np.zeros(8, np.int32), offsets=np.arange(9), segment_a=np.ones(8, np.int64), truncated=0)
    problem = ChoiceProblem(encoded=encoded, labels=examples.labels, choices=4)
    scores = score_split(TaskData(task=SWAG, train=examples, scored={"dev": examples}), "dev", problem, logits, [])
    assert scores["metrics"]["accuracy"]["value"] == 0.5 and scores["n"] == 2 and len(problem) == 2


def test_r38_a_file_without_labels_has_none(tmp_path: Path) -> None:
    content = HEADER.replace(",label", "") + "0,v,1,s,a,b,gold,e0,e1,e2,e3\n"
    assert read_choices(write(tmp_path, content, "test.csv"), SWAG, "test").labels is None


def test_r38_a_file_without_labels_yields_predictions_and_no_score(
    write_bert: Callable[..., Path], tmp_path: Path
) -> None:
    """Four inputs an example, through the whole command."""
    rows = "".join(f"{n},v,1,s,he stops,he,gold,runs,sits,turns,waits,{n % 4}\n" for n in range(8))
    unlabelled = "".join(f"{n},v,1,s,he stops,he,gold,runs,sits,turns,waits\n" for n in range(3))
    write(tmp_path, HEADER + rows)
    write(tmp_path, HEADER + rows, "val.csv")
    write(tmp_path, HEADER.replace(",label", "") + unlabelled, "test.csv")
    model = write_bert(tmp_path / "model", ["he", "stops", "runs", "sits", "turns", "waits"])
    command = ["--model", str(model), "--data", str(tmp_path), "--output", str(tmp_path / "out"), "--tasks", "SWAG"]
    assert main([*command, "--max-length", "16", "--epochs", "1", "--predictions"]) == 0
    (result,) = (tmp_path / "out" / "SWAG").glob("seed-0-*.json")
    assert set(json.loads(result.read_text())["splits"]) == {"dev"}
    lines = (result.with_suffix("") / "test.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and [line.split("\t")[0] for line in lines[1:]] == ["0", "1", "2"]
    assert {line.split("\t")[1] for line in lines[1:]} <= set("0123")


def test_r38_the_right_ending_is_never_always_first(tmp_path: Path) -> None:
    always = HEADER + "".join(f"{n},v,1,s,a,b,gold,e0,e1,e2,e{n},0\n" for n in range(30))
    with pytest.raises(ReadError, match="the first ending is the right one in all 30 rows"):
        read_choices(write(tmp_path, always), SWAG, "train")
    full = "video-id,fold-ind,startphrase,sent1,sent2,gold-source,gold-ending,distractor-0,distractor-1,distractor-2\n"
    full += "".join(f"v,1,s,a,b,gold,right {n},wrong {n},bad {n},no {n}\n" for n in range(40))
    examples = read_choices(write(tmp_path, full), SWAG, "train")
    assert set(examples.labels.tolist()) == {0, 1, 2, 3}
    for number, label in enumerate(examples.labels):
        assert examples.texts_b[4 * number + label] == f"b right {number}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", r"no column \['sent1', 'sent2'"),
        (HEADER + "0,v,1,s,a,b,gold,e0,e1,e2,e3,4\n", "row 0 has the label '4'"),
        (HEADER + "0,v,1,s,a,b,gold,e0\n", "row 0 has too few fields"),
        (HEADER, "no example in this file"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ReadError, match=message):
        read_choices(write(tmp_path, content), SWAG, "train")


def test_real_files(shared_data: Path, tmp_path: Path) -> None:
    sample = (shared_data / "samples" / "fixtures" / "allennlp-swag.csv").read_text(encoding="utf-8")
    assert len(read_choices(write(tmp_path, sample), SWAG, "train")) == sample.count("\n") - 1
    arc = TASKS["ARC-easy"]
    assert len(read_choices(shared_data, arc, "train")) == 1172
    easy = read_choices(shared_data, arc, "dev")
    assert len(easy) == 2376 and set(easy.labels.tolist()) == {0, 1, 2, 3} and len(easy.texts_a) == 4 * 2376
