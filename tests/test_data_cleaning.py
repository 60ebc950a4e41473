"""Cleaning: languages, quality, repetition, duplicates, decontamination; counted, with samples, whatever the tasks."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import orjson
import pytest

from data_pipeline.build import main
from data_pipeline.clean_stage import DroppedDocuments
from data_pipeline.config import CleaningConfig
from data_pipeline.corpus_files import CorpusError, find_files
from data_pipeline.decontamination import ContaminationIndex, build_index, evaluation_texts
from data_pipeline.duplicates import clusters, same_text, signature
from data_pipeline.ngrams import ngram_hashes, word_hashes, words_of
from data_pipeline.quality import DocumentFilters
from data_pipeline.records import Document
from data_pipeline.shard_index import ShardIndex
from data_pipeline.verify import main as verify

ROOT = Path(__file__).resolve().parent.parent


def hashes_of(text: str) -> np.ndarray:
    return word_hashes(words_of(text))


def test_words_and_their_ngrams():
    assert words_of("Don't stop: BERT模型2, ÉTÉ_x!") == ["don", "t", "stop", "bert", "模", "型", "2", "été_x"]
    hashes = hashes_of("a b c a b c")
    assert hashes[0] == hashes[3] != hashes[1]
    grams = ngram_hashes(hashes, 3)
    assert len(grams) == 4 and grams[0] == grams[3] and len(set(grams.tolist())) == 3  # the order of words counts
    assert len(ngram_hashes(hashes, 7)) == 0


@pytest.mark.parametrize(("changed", "least", "most"), [(0, 1, 1), (2, 0.95, 1), (30, 0, 0.05)])
def test_signatures_agree_where_texts_are_alike(changed, least, most):
    """300 words with some replaced: 5-grams shared by 100 %, about 94 % and about 40 %."""
    rng = random.Random(4)
    words = [f"w{n}" for n in range(5000)]
    found = 0
    for _ in range(60):
        one = rng.choices(words, k=300)
        other = list(one)
        for place in rng.sample(range(300), changed):
            other[place] = f"new{place}"
        found += bool((signature(word_hashes(one)) == signature(word_hashes(other))).any())
    assert least <= found / 60 <= most


def test_the_least_key_of_a_cluster_is_kept():
    keys = np.array([50, 10, 40, 20, 30], np.uint64)
    copies, owners = same_text(keys, np.array([7, 8, 7, 8, 9], np.uint64))
    assert dict(zip(keys[copies].tolist(), keys[owners].tolist(), strict=True)) == {50: 40, 20: 10}
    bands = [np.array([1, 1, 2, 3, 4], np.uint64), np.array([9, 5, 5, 6, 7], np.uint64)]  # 0-1 and 1-2: one cluster
    copies, owners = clusters(keys, bands)
    assert dict(zip(keys[copies].tolist(), keys[owners].tolist(), strict=True)) == {50: 10, 40: 10}
    twins = np.array([1, 1], np.uint64)
    assert len(same_text(twins, twins)[0]) == 0  # one id twice: dropping it would lose both


PROSE = (
    "It is a truth that the feelings of a man in want of a wife have little to be known, and that with her family she is "
    "considered as the rightful property of some one of their daughters. My dear Mr. Bennet, said his lady to him one day, "
    "have you heard that Netherfield Park is let at last? He replied that he had not, and went on with his letters."
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (PROSE, None),
        (
            "Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte, fand er sich in seinem Bett verwandelt.",
            "language",
        ),
        ("Short and to the point.", "quality"),
        ("# " * 200 + PROSE, "quality"),
        ("\n".join([PROSE] * 6), "repetition"),
    ],
)
def test_filters_name_the_reason(text, reason):
    filters = DocumentFilters(CleaningConfig(languages=("en",), quality=True, repetition=True), None)
    found = filters.finding(Document(text=text, id="x"), words_of(text), hashes_of(text))
    assert (found and found.reason) == reason


def test_contamination_is_found_by_thirteen_words(tmp_path, shared_data):
    content = json.loads(gzip.decompress((shared_data / "squad/dev-v1.1.json.gz").read_bytes()))
    article = content["data"][3]
    (tmp_path / "squad.json.gz").write_bytes(gzip.compress(json.dumps({"data": [article]}).encode()))
    files = find_files([str(shared_data / "glue/RTE/dev.tsv"), str(tmp_path / "squad.json.gz")])
    assert sum(build_index(files, 13, tmp_path / "index.npz").values()) > 700
    index = ContaminationIndex(tmp_path / "index.npz")

    def find(text: str) -> tuple[str, str] | None:
        return index.find(words_of(text), hashes_of(text))

    words = article["paragraphs"][5]["context"].split()
    assert find("Other words before. " + " ".join(words[20:40]).upper() + " and after")[0].endswith("squad.json")  # type: ignore[index]
    assert find("Other words before. " + " ".join(words[20:31]) + " and after") is None
    assert find(PROSE) is None
    with pytest.raises(CorpusError, match=r"no text of 8 words or more"):
        path = tmp_path / "labels.txt"
        path.write_text("yes\nno\n")
        build_index(find_files([str(path)]), 13, tmp_path / "x.npz")


FORMATS = {
    "glue/STS-B/dev.tsv": "lone quotes",
    "glue/CoLA/dev.tsv": "no header",
    "samples/fixtures/hf-mrpc-dev.tsv": "byte order mark",
    "samples/fixtures/hf-squad2-sample.json": "nested JSON",
    "conll2003/eng.testb": "columns",
    "sick/SICK_trial.txt": "txt",
    "arc/arc_easy.jsonl": "JSON lines",
    "samples/fixtures/allennlp-swag.csv": "quoted fields",
    "samples/fixtures/hf-swag-sample.json": "JSON",
    "samples/fixtures/hf-conll-sample.json": "JSON lines of words, called .json",
}


def test_evaluation_files_of_every_format_are_found_again(tmp_path, shared_data):
    """A document around a real text of each file is found, and the file is named; prose that is in none is not."""
    files = find_files([str(shared_data / name) for name in FORMATS])
    counts = build_index(files, 13, tmp_path / "index.npz")
    index = ContaminationIndex(tmp_path / "index.npz")
    assert list(counts) == [file.name for file in files] and min(counts.values()) >= 10
    for file in files:
        texts = [text for text in evaluation_texts(file) if len(words_of(text)) >= 8]
        for text in (texts[len(texts) // 2], texts[-1]):
            document = words_of(f"{PROSE} {text} {PROSE}")
            found = index.find(document, word_hashes(document))
            assert found is not None and found[0] == file.name
    assert index.find(words_of(PROSE), hashes_of(PROSE)) is None
    sentence = "Japan began the defence of their Asian Cup title with a lucky 2-1 win against Syria in a Group C match"
    found = index.find(words_of(sentence), hashes_of(sentence))  # that of a column file, written as prose
    assert found is not None and found[0].endswith("eng.testb")


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Path:
    """60 topics of Python's documentation with an exact copy, a near copy, a contaminated, a repetitive and a German text."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [text for _, text in sorted(topics.items()) if 1500 < len(text) < 20_000][:60]
    near = texts[1].split(" ")
    near[len(near) // 2] = "replaced"
    rows = [
        *texts,
        texts[0] + "\n",
        " ".join(near),
        PROSE + " The quick brown evaluation sentence number one jumps over thirteen lazy test set words here.",
        "\n".join(["the same line of text again"] * 60),
        "Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte, fand er sich in seinem Bett zu einem Ungeziefer.",
    ]
    for part in range(3):
        lines = [orjson.dumps({"text": text}) for text in rows[part::3]]
        (folder / f"{part}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (folder.parent / "evaluation.tsv").write_text(
        "id\ttext\n1\tThe quick brown evaluation sentence number one jumps over thirteen lazy test set words here.\n"
    )
    return folder


def write_config(folder: Path, corpus: Path, tasks: int) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(
        f"""
[corpus]
source = "jsonl"
paths = ["{corpus}"]
[cleaning]
languages = ["en"]
repetition = true
exact_duplicates = true
near_duplicates = true
decontaminate = ["{corpus.parent / "evaluation.tsv"}"]
[tokenizer]
vocab_size = 600
[data]
dir = "{folder / "data"}"
max_seq_length = 64
tasks = {tasks}
workers = 1
"""
    )
    return folder / "config.toml"


def build(folder: Path, corpus: Path, tasks: int) -> Path:
    assert main(["--config", str(write_config(folder, corpus, tasks))]) == 0
    return folder / "data"


def test_a_build_leaves_out_what_cleaning_drops(planted, tmp_path, capsys):
    one = build(tmp_path / "one", planted, tasks=1)
    report = json.loads((one / "cleaning/report.json").read_text())
    dropped = report["dropped"]
    assert dropped["exact_duplicate"] == dropped["contaminated"] == 1 and dropped["near_duplicate"] >= 1
    assert dropped["repetition"] >= 1 and dropped["language"] >= 1
    (sample,) = report["samples"]["contaminated"]
    assert sample["text"].startswith("It is a truth") and "evaluation sentence number one jumps" in sample["detail"]
    assert sample["detail"].startswith("evaluation.tsv: ") and report["kinds"]["contaminated"] == {"evaluation.tsv": 1}
    assert (
        report["evaluation_texts"] == {"evaluation.tsv": 1}
        and sum(report["kinds"]["language"].values()) == dropped["language"]
    )
    assert report["samples"]["exact_duplicate"][0]["detail"].startswith("repeats ")
    stats = json.loads((one / "train/stats.json").read_text())["corpus"]
    read = sum(len(path.read_bytes().splitlines()) for path in planted.iterdir())
    assert stats["documents_dropped"] == dropped | {"no_tokens": 0} and stats["documents"] == read
    assert stats["documents_kept"] == read - sum(dropped.values())
    assert "cleaning: dropped" in capsys.readouterr().out
    assert verify([str(one / "train")]) == 0

    three = build(tmp_path / "three", planted, tasks=3)
    assert json.loads((three / "cleaning/report.json").read_text()) == report
    assert (three / "cleaning/dropped.npz").read_bytes() == (one / "cleaning/dropped.npz").read_bytes()
    indexes = [ShardIndex.open(folder / "train") for folder in (one, three)]
    assert [s.sha256 for s in indexes[0].shards] == [s.sha256 for s in indexes[1].shards]

    kept = DroppedDocuments(one / "cleaning/dropped.npz")
    counts: Counter[str] = Counter()
    assert [d.id for d in kept.kept([Document(text="", id="elsewhere")], counts)] == ["elsewhere"] and not counts

    assert main(["--config", str(tmp_path / "one/config.toml")]) == 0  # nothing to do
    assert "cleaning: " in capsys.readouterr().out
    changed = ["--config", str(tmp_path / "one/config.toml"), "--set", "cleaning.repetition=false"]
    assert main(changed) == 2 and "cleaning.repetition" in capsys.readouterr().err


@pytest.mark.slow
def test_cleaning_killed_at_any_point_ends_the_same(planted, tmp_path):
    """Killed when the first notes are there, and when the list of dropped documents is but no report yet."""
    wanted = build(tmp_path / "whole", planted, tasks=4)
    config, data = write_config(tmp_path / "killed", planted, tasks=4), tmp_path / "killed/data"
    command = [sys.executable, "-m", "data_pipeline.build", "--config", str(config), "--set", "data.workers=2"]
    for moment in ("task-00000.npz", "dropped.npz"):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
        while not (data / "cleaning" / moment).exists() and process.poll() is None:
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert (data / "cleaning" / moment).exists()
    assert main(["--config", str(config)]) == 0
    for name in ("cleaning/report.json", "cleaning/dropped.npz", "train/index.json", "train/stats.json"):
        assert (data / name).read_bytes() == (wanted / name).read_bytes(), name
    shards = sorted(path.name for path in (wanted / "train").glob("*.tar"))
    assert shards and all((data / "train" / s).read_bytes() == (wanted / "train" / s).read_bytes() for s in shards)
