"""The report page: from real run files to one self-contained page, with what is missing or not finite said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from eval.report import main, task_label
from eval.report_data import as_number, best_row, find_runs, finite_mean, read_run, series


def train_line(step: int, loss: float | str) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "mlm_loss": loss,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tokens": 1_200_000,  # since the line before
        "tokens_per_second": 20000.0,
    }


def validation_line(step: int, loss: float | str) -> dict[str, Any]:
    return {
        "kind": "validation",
        "step": step,
        "mlm_loss": loss,
        "mlm_accuracy": 0.25,
        "perplexity": 12.3,
        "nsp_loss": 0.6,
        "nsp_accuracy": 0.7,
        "examples": 64,
    }


def write_run(folder: Path, lines: list[dict[str, Any]]) -> Path:
    (folder / "pretrain").mkdir(parents=True)
    (folder / "pretrain" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def result_group(task: str, mean: float | None, left_out: int = 0) -> dict[str, Any]:
    metric = {"mean": mean, "sd": None, "n": int(mean is not None), "left_out": left_out, "reasons": ["constant"]}
    split = {"n": 1043, "metrics": {"mcc": metric}, "baseline": {"mcc": {"value": 0.0, "undefined": ""}}}
    return {"task": task, "headline": {"split": "dev", "metric": "mcc"}, "splits": {"dev": split}, "warnings": []}


def page_of(runs: Path, output: Path) -> str:
    assert main(["--runs", str(runs), "--output", str(output)]) == 0
    return (output / "index.html").read_text()


def test_whole_run_is_one_self_contained_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "demo", [train_line(10, 5.0), train_line(20, 4.5), validation_line(20, 4.25)])
    (run / "pretrain" / "run.json").write_text(
        json.dumps(
            {"config": {"model": {"layers": 2}}, "unigram_loss": 6.5, "created": 86400.0, "starts": [{"git": "abcdef"}]}
        )
    )
    for part in ("train", "validation"):
        (run / "data" / part).mkdir(parents=True)
        (run / "data" / part / "stats.json").write_text(
            json.dumps(
                {"documents": {"kept": 1234, "dropped": {"empty": 2}}, "lengths": {"bin_width": 8, "examples": [1, 5]}}
            )
        )
    (run / "eval").mkdir()
    (run / "eval" / "results.json").write_text(json.dumps({"schema": 1, "results": [result_group("CoLA", 0.125)]}))
    page = page_of(run, tmp_path / "report")
    assert "Notes" not in page
    for text in (
        "4.250",
        "unigram baseline 6.500",
        "25.00 %",
        "70.00 %",
        "12.50",
        "1,234",
        "config.model.layers",
        "2.4 M tokens",
        "1,043",
        "created 1970-01-02 00:00 UTC · code abcdef",
    ):
        assert text in page, text
    assert page.count("<svg") == 9  # seven pretraining curves, the task scores, the lengths
    # Nothing is fetched: the only addresses are the SVG name spaces.
    assert not re.search(r'(?:src|href)="(?!#)', page) and "@import" not in page
    assert page_of(run, tmp_path / "again") == page


def test_r29_non_finite_values_are_shown_left_out_and_never_best(tmp_path: Path) -> None:
    losses = ["nan", 1.797e308, 2.5]
    run = write_run(
        tmp_path / "run", [line(n, loss) for n, loss in enumerate(losses, 1) for line in (train_line, validation_line)]
    )
    page = page_of(run, tmp_path / "report")
    assert "2 non-finite of 3 values (steps 1, 2)" in page
    assert ">nan<" in page and ">inf<" in page
    best = re.search(r'<tr class="best"><td class="">(\d+)<', page)
    assert best and best[1] == "3"
    data = read_run(run)
    assert finite_mean(series(data.train, "mlm_loss")[1]) == 2.5
    chosen = best_row(data.validation, "mlm_loss")
    assert chosen is not None and chosen["step"] == 3


def test_r29_a_run_without_any_finite_loss_has_no_best(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [validation_line(1, "inf"), validation_line(2, "nan")])
    page = page_of(run, tmp_path / "report")
    assert "there is no best step" in page and 'class="best"' not in page


@pytest.mark.parametrize(
    ("stored", "value"),
    [("nan", "nan"), ("-inf", "-inf"), (1.797e308, "inf"), (-1.8e308, "-inf"), (3, "3.0"), ("x", "None")],
)
def test_r29_stored_spellings(stored: object, value: str) -> None:
    assert str(as_number(stored)) == value


def test_missing_parts_and_broken_lines_are_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [train_line(1, 3.0)])
    with open(run / "pretrain" / "metrics.jsonl", "a") as handle:
        handle.write('{"kind": "train", "st')
    (run / "eval").mkdir()
    (run / "eval" / "results.json").write_text("{")
    page = page_of(run, tmp_path / "report")
    assert "no pretrain/run.json in this run" in page and "no data/train/stats.json" in page
    assert "line 2 is no metrics line" in page and "results.json: not readable" in page


def test_undefined_task_scores_are_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [train_line(1, 3.0)])
    (run / "eval").mkdir()
    (run / "eval" / "results.json").write_text(json.dumps({"results": [result_group("CoLA", None, left_out=2)]}))
    page = page_of(run, tmp_path / "report")
    assert ">undefined<" in page and "2 run(s) without a score (constant)" in page


def test_r34_the_report_shows_matched_and_mismatched_mnli_separately(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [train_line(1, 3.0)])
    (run / "eval").mkdir()
    group = result_group("MNLI", 0.85)
    group["headline"] = {"split": "dev_matched", "metric": "mcc"}
    matched = group["splits"].pop("dev")
    group["splits"] = {"dev_matched": matched, "dev_mismatched": result_group("MNLI", 0.80)["splits"]["dev"]}
    (run / "eval" / "results.json").write_text(json.dumps({"schema": 1, "results": [group]}))
    cells = re.findall(r">([^<>]+)</td>", page_of(run, tmp_path / "report"))
    for split, score in (("dev_matched", "85.00"), ("dev_mismatched", "80.00")):
        at = cells.index(split)
        assert cells[at - 1 : at + 3] == ["MNLI", split, "mcc", score]


def test_a_repeated_step_counts_once_as_written_last(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [train_line(1, 9.0), train_line(2, 8.0), train_line(2, 7.0), train_line(3, 6.0)])
    assert series(read_run(run).train, "mlm_loss") == ([1, 2, 3], [9.0, 7.0, 6.0])


def test_folder_of_runs_and_folder_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "a", [train_line(1, 3.0)])
    write_run(tmp_path / "runs" / "b", [train_line(1, 3.0)])
    assert [path.name for path in find_runs(tmp_path / "runs")] == ["a", "b"]
    assert "2 runs" in page_of(tmp_path / "runs", tmp_path / "report")
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "absent"):
        assert main(["--runs", str(tmp_path / folder), "--output", str(tmp_path / "none")]) == 2
    errors = capsys.readouterr().err
    assert "no run here; a run holds at least one of pretrain/metrics.jsonl" in errors and "no such folder" in errors
    assert not (tmp_path / "none").exists()


def test_the_best_of_a_grid_is_called_that() -> None:
    assert task_label({"task": "MRPC"}) == "MRPC"
    marked = task_label({"task": "RTE", "start": {"task": "MNLI"}, "best_of_grid": 4})
    assert marked == "RTE from MNLI, best of 4 settings on dev"
