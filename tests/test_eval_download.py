"""Task files through `datasets`: from clones of the hub's repositories to the official files that the readers take."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from eval.download import HUB, main
from eval.readers import read_split
from eval.run import main as run_main
from eval.squad_data import read_squad
from eval.task_data import read_examples
from eval.tasks import GLUE, TASKS

INSTALLED = importlib.util.find_spec("datasets") is not None


def test_every_row_of_the_hub_is_a_task() -> None:
    assert set(GLUE) <= set(HUB)
    for name, hub in HUB.items():
        assert set(hub.splits) <= set(TASKS[name].splits), name
        assert set(TASKS[name].dev_splits) | {"train"} <= set(hub.splits), name


@pytest.mark.skipif(INSTALLED, reason="the datasets library is installed")
def test_the_library_is_optional(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tasks", "RTE", "--output", str(tmp_path)]) == 2
    assert "pip install datasets" in capsys.readouterr().err
    assert main(["--tasks", "ARC-easy", "--output", str(tmp_path)]) == 2
    assert "ARC-easy cannot be downloaded" in capsys.readouterr().err


@pytest.fixture
def clones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Repositories in the hub's layout: a README that names the files of each configuration, and Parquet files."""
    pytest.importorskip("datasets", reason="the optional datasets library is not installed: pip install datasets")
    import datasets
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    root = tmp_path / "clones"

    def write(repository: str, config: str, splits: dict[str, dict[str, list[Any]]], **features: Any) -> None:
        folder = root / repository
        lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
        for split, columns in splits.items():
            place = folder / config / f"{split}-00000-of-00001.parquet"
            place.parent.mkdir(parents=True, exist_ok=True)
            table = datasets.Dataset.from_dict(columns)
            for name, feature in features.items():
                table = table.cast_column(name, feature) if name in columns else table
            table.to_parquet(place)
            lines += [f"  - split: {split}", f"    path: {config}/{split}-*"]
        (folder / "README.md").write_text("\n".join([*lines, "---", ""]))

    labels = datasets.ClassLabel(names=["entailment", "not_entailment"])
    pairs = {"sentence1": ["A \t tab", 'A "lone quote', "line\nend"], "sentence2": ["b", "c", "d\u2028e"]}
    scored, hidden = {**pairs, "label": [1, 0, 1]}, {**pairs, "label": [-1, -1, -1]}
    write("nyu-mll/glue", "rte", {"train": scored, "validation": scored, "test": hidden}, label=labels)
    answers = [{"text": ["Oslo"], "answer_start": [10]}, {"text": [], "answer_start": []}]
    context = "\U0001f600\U0001f600 won by Oslo"
    questions = {"id": ["a", "b"], "title": ["T", "T"], "context": [context, context], "question": ["Who?", "Why?"]}
    write(
        "rajpurkar/squad_v2",
        "squad_v2",
        {split: {**questions, "answers": answers} for split in ("train", "validation")},
    )
    swag = {"video-id": ["v"], "fold-ind": ["1"], "startphrase": ["x"], "sent1": ['He said, "go"'], "sent2": ["He"]}
    swag |= {"gold-source": ["gold"], **{f"ending{n}": [f"ends, {n}"] for n in range(4)}, "label": [2]}
    write("allenai/swag", "regular", {split: swag for split in ("train", "validation", "test")})
    words = {"document_id": [1, 1, 2], "tokens": [["U.N.", "official"], ["Ekeus"], ["Baghdad"]]}
    tags = datasets.List(datasets.ClassLabel(names=list(TASKS["CoNLL"].labels)))
    words["ner_tags"] = [
        [TASKS["CoNLL"].labels.index(tag) for tag in sentence] for sentence in (["B-ORG", "O"], ["B-PER"], ["B-LOC"])
    ]
    write("tomaarsen/conll2003", "default", {split: words for split in ("train", "validation", "test")}, ner_tags=tags)
    return root


def test_files_from_the_hub_are_read_like_the_official_ones(
    clones: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "data"
    command = ["--output", str(output), "--source", str(clones), "--tasks"]
    assert main([*command, "RTE", "SQuAD2.0", "SWAG", "CoNLL", "CoNLL-last"]) == 0
    train, test = (read_split(output, TASKS["RTE"], split) for split in ("train", "test"))
    assert train.labels is not None and train.labels.tolist() == [1, 0, 1] and test.labels is None
    assert train.texts_a == ["A   tab", 'A "lone quote', "line end"] and train.texts_b == ["b", "c", "d\u2028e"]
    squad = read_squad(output / "squad" / "dev-v2.0.json")
    assert (squad.version, squad.articles, squad.misplaced) == ("2.0", 1, [])
    assert [example.answers for example in squad.examples] == [("Oslo",), ()] and squad.examples[0].starts == (10,)
    swag: Any = read_examples(output, TASKS["SWAG"], "dev")
    assert swag.labels.tolist() == [2] and swag.texts_b == [f"He ends, {n}" for n in range(4)]
    assert swag.texts_a[0] == 'He said, "go"'
    assert read_examples(output, TASKS["SWAG"], "test").labels is None  # type: ignore[union-attr]
    names: Any = read_examples(output, TASKS["CoNLL"], "dev")
    assert names.words == [["U.N.", "official"], ["Ekeus"], ["Baghdad"]] and names.documents.tolist() == [0, 0, 1]
    assert names.tags == [["B-ORG", "O"], ["B-PER"], ["B-LOC"]]
    again = ["--model", "nowhere", "--tasks", "RTE", "--data", str(output), "--output", str(tmp_path / "out")]
    assert run_main([*again, "--download", "--dry-run"]) == 0  # nothing is missing, so nothing is fetched
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*.*")}
    assert main([*command, "RTE"]) == 0 and "everything is there" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*.*")} == before


def test_what_cannot_be_loaded_is_said(clones: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tasks", "SST-2", "--output", str(tmp_path / "data")]) == 2  # offline
    said = capsys.readouterr().err
    assert "nyu-mll/glue sst2: cannot be loaded" in said and "is there a network?" in said and "official files" in said
    assert main(["--tasks", "QNLI", "--output", str(tmp_path / "data"), "--source", str(tmp_path)]) == 2
    assert "expected a clone" in capsys.readouterr().err and not (tmp_path / "data").exists()
