"""`python -m data_pipeline.build`: reproducible, resumable, clear about errors."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import orjson
import psutil
import pytest

from data_pipeline.build import main
from data_pipeline.corpus_files import InputFile
from data_pipeline.loader import build_loader
from data_pipeline.plan import choose_tasks
from data_pipeline.shard_index import ShardIndex
from data_pipeline.shards import iter_members
from data_pipeline.stats import main as stats_main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three JSONL files with 75 topics of Python's documentation."""
    folder = tmp_path_factory.mktemp("corpus")
    rows = [orjson.dumps({"id": f"topic/{name}.v1", "text": text}) for name, text in sorted(topics.items())[:75]]
    for part in range(3):
        (folder / f"{part}.jsonl").write_bytes(b"\n".join(rows[part::3]) + b"\n")
    return folder


def write_config(folder: Path, corpus: Path, **changes: object) -> Path:
    """A small build below `folder`; changes are `table__key=value`."""
    tables: dict[str, dict[str, object]] = {
        "corpus": {"source": "jsonl", "paths": [str(corpus)], "held_out": 0.1},
        "tokenizer": {"vocab_size": 600},
        "data": {
            "dir": str(folder / "data"),
            "max_seq_length": 64,
            "mask_sets": 2,
            "buckets": 3,
            "block_examples": 64,
            "shard_megabytes": 0.1,
            "workers": 1,
        },
    }
    for name, value in changes.items():
        table, key = name.split("__")
        tables[table][key] = value
    lines = ["seed = 5"]
    for table, keys in tables.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    path = folder / "config.toml"
    folder.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def digests(data: Path) -> dict[str, str]:
    """sha256 of every file of both splits."""
    return {
        f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for split in ("train", "validation")
        for path in sorted((data / split).iterdir())
    }


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it."""
    command = [sys.executable, "-m", "data_pipeline.build", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A finished build's folder, made in this process by one worker."""
    folder = tmp_path_factory.mktemp("built")
    assert main(["--config", str(write_config(folder, corpus))]) == 0
    return folder


def test_data_set_reads_back_and_keys_are_unique(built: Path) -> None:
    train, validation = (ShardIndex.open(built / "data" / split) for split in ("train", "validation"))
    assert len(train.shards) > 3
    assert train.examples > 500
    assert 0 < validation.examples < train.examples / 3
    assert train.info.tokenizer == validation.info.tokenizer
    assert (train.info.mask_sets, validation.info.mask_sets) == (2, 1)
    keys = [key for path in (built / "data/train").glob("*.tar") for key, _, _ in iter_members(path)]
    assert len(keys) == len(set(keys)) == len(train.blocks)
    loader = build_loader(built / "data/train", global_batch=8, micro_batch=8, rank=0, world_size=1, seed=0, state=None)
    (batch,) = next(iter(loader))
    assert batch.examples == 8
    assert int(batch.input_ids_T.max()) < train.info.vocab_size
    loader.close()


def test_stats_say_what_happened(built: Path) -> None:
    stats = json.loads((built / "data/train/stats.json").read_bytes())
    index = ShardIndex.open(built / "data/train")
    other = json.loads((built / "data/validation/stats.json").read_bytes())
    assert stats["corpus"]["documents"] == 75
    assert stats["corpus"]["documents_kept"] == stats["documents"] + other["documents"] == 75
    assert stats["examples"] == index.examples == sum(stats["lengths"]["examples"])
    assert stats["tokens"] == index.tokens
    assert stats["corpus_tokens"] + other["corpus_tokens"] == stats["corpus"]["tokens"]
    assert stats["nsp"]["next"] + stats["nsp"]["random"] == stats["examples"]
    assert abs(stats["nsp"]["random_share"] - 0.5) < 0.02
    masking = stats["masking"]
    assert abs(masking["share_of_tokens"] - 0.15) < 0.01
    assert masking["masked_share"] + masking["random_share"] + masking["kept_share"] == pytest.approx(1, abs=1e-5)
    assert abs(masking["masked_share"] - 0.8) < 0.02
    assert 0 < stats["continuation_share"] < 1


def test_corpus_report_is_one_page_with_figures_and_examples(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert stats_main([str(built / "data"), "--output", str(page)]) == 0
    text = page.read_text()
    assert capsys.readouterr().out.strip() == str(page)
    examples = json.loads((built / "data/train/stats.json").read_bytes())["examples"]
    assert f"{examples:,}" in text
    assert text.count("<svg") >= 6  # three figures of each split
    assert "B is from another document" in text
    assert "[MASK] &lt;- " in text
    assert "src=" not in text  # nothing is fetched from elsewhere
    again = tmp_path / "again.html"
    assert stats_main([str(built / "data"), "--output", str(again)]) == 0
    assert again.read_text() == text
    assert stats_main([str(tmp_path)]) == 2
    assert "holds no finished data set" in capsys.readouterr().err


def test_second_run_reuses_everything(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in (built / "data").rglob("*") if path.is_file()}
    assert main(["--config", str(built / "config.toml")]) == 0
    output = capsys.readouterr().out
    assert output.count("complete") == 4
    after = {path: path.stat().st_mtime_ns for path in (built / "data").rglob("*") if path.is_file()}
    changed = {path.name for path in after if before.get(path) != after[path]}
    assert changed <= {".build.lock", ".workers.lock"}


def test_other_settings_are_refused(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(built / "config.toml")
    for override, key in [
        ("data.mask_sets=3", "train.mask_sets = 2, now it is 3"),
        ("data.buckets=2", "data.buckets = 2 (2 and 1) does not divide"),
        ("tokenizer.vocab_size=700", "vocab_size = 600, now it is 700"),
        ("corpus.held_out=0.2", "held_out = 0.1, now it is 0.2"),
    ]:
        assert main(["--config", config, "--set", override]) == 2
        error = capsys.readouterr().err
        assert key in error
        assert error.count("\n") == 1
    assert main(["--config", config, "--set", "data.tasks=7", "--set", "data.workers=2"]) == 0


def test_another_data_set_from_the_same_stage_1(
    tmp_path: Path, built: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second set with longer examples, dupes and other masks: no text is read or tokenised again."""
    shared = {"data__tokens_from": str(built / "data"), "data__tasks": 2}
    longer = {"data__max_seq_length": 128, "data__mask_sets": 1, "data__dupes": 2, "data__buckets": 0}
    before = {path: path.stat().st_mtime_ns for path in (built / "data").rglob("*") if path.is_file()}
    assert main(["--config", str(write_config(tmp_path / "longer", corpus, **shared, **longer))]) == 0
    index = ShardIndex.open(tmp_path / "longer/data/train")
    assert index.info.tokenizer == ShardIndex.open(built / "data/train").info.tokenizer
    assert (index.info.max_seq_length, index.info.settings["buckets"]) == (128, 1)
    assert not (tmp_path / "longer/data/tokens").exists()
    assert (tmp_path / "longer/data/tokenizer/vocab.txt").read_bytes() == (
        built / "data/tokenizer/vocab.txt"
    ).read_bytes()
    assert main(["--config", str(write_config(tmp_path / "same", corpus, **shared))]) == 0
    assert digests(tmp_path / "same/data") == digests(built / "data")
    assert before == {path: path.stat().st_mtime_ns for path in before}
    capsys.readouterr()
    for number, (change, message) in enumerate(
        [
            ({"corpus__held_out": 0.2}, "made with corpus.held_out = 0.1, here it is 0.2"),
            ({"tokenizer__vocab_size": 700}, "tokenizer.vocab_size = 600, here it is 700"),
            ({"data__tokens_from": str(tmp_path / "absent")}, "absent holds no finished build"),
        ]
    ):
        config = write_config(tmp_path / str(number), corpus, **(shared | change))
        assert message in one_line_error(capsys, ["--config", str(config)])
        assert not (tmp_path / str(number) / "data/train").exists()


@pytest.mark.slow
def test_bytes_do_not_depend_on_workers_or_tasks(tmp_path: Path, built: Path, corpus: Path) -> None:
    result = run("--config", str(write_config(tmp_path, corpus, data__workers=2, data__tasks=3)))
    assert result.returncode == 0, result.stderr
    assert len(list((tmp_path / "data/tokens").glob("*.tokens"))) == 3
    assert digests(tmp_path / "data") == digests(built / "data")


def wait_until_session_is_empty(session: int) -> None:
    """A killed build leaves no worker behind that would go on writing."""
    deadline = time.monotonic() + 60
    while left := [p for p in psutil.pids() if p != os.getpid() and session_of(p) == session]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


@pytest.mark.slow
def test_r15_killed_build_goes_on_and_ends_the_same(tmp_path: Path, built: Path, corpus: Path) -> None:
    config = write_config(tmp_path, corpus, data__workers=2, data__tasks=3)
    data = tmp_path / "data"
    command = [sys.executable, "-m", "data_pipeline.build", "--config", str(config)]
    moments = (data / "tokens/task-00000.tokens", data / "assemble/train-00001.json")
    for moment in moments:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + 120
        while not moment.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert moment.exists()
        wait_until_session_is_empty(process.pid)
        assert not (data / "train/index.json").exists()
        finished = {path.name: path.stat().st_mtime_ns for path in data.glob("tokens/*.tokens")}
        for path in data.glob("train/*.tar"):
            assert list(iter_members(path))  # complete under its final name
    result = run("--config", str(config))
    assert result.returncode == 0, result.stderr
    assert "stage 1" in result.stdout
    assert "is complete" in result.stdout
    assert finished == {path.name: path.stat().st_mtime_ns for path in data.glob("tokens/*.tokens")}
    assert digests(data) == digests(built / "data")


def write_text_config(folder: Path, text: str) -> Path:
    """A build of one text file of lines with a vocabulary of a few words."""
    source = folder / "text"
    source.mkdir()
    (source / "a.txt").write_text(text, encoding="utf-8")
    words = ["hello", "world", "second", "doc", "here", "alpha", "beta", "gamma", "delta", "epsilon"]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    return write_config(
        folder,
        source,
        corpus__source="text",
        corpus__held_out=0.0,
        corpus__sentences="line",
        data__buckets=1,
        tokenizer__path=str(folder / "vocab.txt"),
    )


def test_building_never_imports_torch(tmp_path: Path) -> None:
    config = str(write_text_config(tmp_path, "hello world\n\nsecond doc here\n"))
    code = (
        "import sys; from data_pipeline.build import main; "
        f"assert main(['--config', {config!r}]) == 0; "
        "print(sorted({'torch', 'deepspeed', 'mlflow', 'webdataset', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"
    assert (tmp_path / "data/train/index.json").exists()


def one_line_error(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Run the command, expect exit code 2 and one line on standard error."""
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_user_errors_are_one_clear_line(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path / "a", corpus))
    assert "did you mean 'mask_sets'" in one_line_error(capsys, ["--config", config, "--set", "data.mask_set=3"])
    absent = str(tmp_path / "absent.jsonl")
    assert "absent.jsonl" in one_line_error(capsys, ["--config", config, "--set", f'corpus.paths=["{absent}"]'])
    assert "no.toml" in one_line_error(capsys, ["--config", str(tmp_path / "no.toml")])


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "empty"), (" \n\n\u200b\n", "empty"), ("alpha beta\ngamma\ndelta epsilon\n", "a single document")],
    ids=["nothing", "blank", "one document"],
)
def test_r09_r10_corpus_without_pairs_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    config = write_text_config(tmp_path, text)
    assert message in one_line_error(capsys, ["--config", str(config)])
    assert not (tmp_path / "data/train/index.json").exists()


def test_r10_two_usable_documents_build(tmp_path: Path) -> None:
    text = "\n\n\n   \n\n\u200b\n\n\n\nhello world\n\n\n\nsecond doc here"
    assert main(["--config", str(write_text_config(tmp_path, text))]) == 0
    index = ShardIndex.open(tmp_path / "data/train")
    assert index.examples == 2
    assert index.tokens == 2 * (2 + 3 + 3)
    dropped = json.loads((tmp_path / "data/train/stats.json").read_bytes())["corpus"]["documents_dropped"]
    assert dropped["no_tokens"] == 1


@pytest.mark.parametrize("mode", ["sop", "full_sentences", "doc_sentences"])
def test_other_modes_build_even_from_one_document(tmp_path: Path, mode: str) -> None:
    config = write_text_config(tmp_path, "alpha beta\ngamma\ndelta epsilon\n")
    assert main(["--config", str(config), "--set", f"data.mode={mode}"]) == 0
    assert ShardIndex.open(tmp_path / "data/train").info.settings["mode"] == mode


def test_r13_whole_word_without_pieces_is_said_to_have_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R13: Chinese text has one character a token, and no segmenter says which belong together."""
    config = write_text_config(tmp_path, "我爱北京\n\n北京爱我\n")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"我爱北京", "##京"]))
    assert main(["--config", str(config), "--set", "data.whole_word=true"]) == 0
    assert "data.whole_word has no effect here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("megabytes", "workers", "tasks"), [(0.5, 2, 1), (1.5, 2, 2), (30, 4, 4), (312, 1, 5), (312, 2, 6), (5000, 4, 78)]
)
def test_few_tasks_are_as_many_for_each_worker(megabytes: float, workers: int, tasks: int) -> None:
    file = InputFile(path="a.txt", name="a.txt", size=int(megabytes * 1e6), modified="")
    assert choose_tasks(0, workers, [file]) == tasks
    assert choose_tasks(3, workers, [file]) == 3


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_ray_is_asked_for_where_it_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_text_config(tmp_path, "hello world\n\nsecond doc here\n")
    assert "pip install 'ray" in one_line_error(capsys, ["--config", str(config), "--set", "data.executor=ray"])


def test_r01_r05_build_says_what_it_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Accents of the words, an over-long word and an undecodable byte are named on the screen, not only in a file."""
    config = write_text_config(tmp_path, f"h\u00e9llo w\u00f6rld \u0905\u092a\u0928\u0947\n\nsecond doc {'x' * 101}\n")
    with (tmp_path / "text/a.txt").open("ab") as file:
        file.write(b"\nhere \xff\n")
    assert main(["--config", str(config)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("corpus: "))
    assert "3 documents read" in line
    assert "1 over-long words; 3 combining marks removed; 1 undecodable bytes replaced" in line


def test_corpus_report_shows_what_cleaning_left_out(tmp_path: Path) -> None:
    text = "hello world\n\nsecond doc here\n\nhello world\n\nalpha beta\n"
    config = str(write_text_config(tmp_path, text))
    assert main(["--config", config, "--set", "cleaning.exact_duplicates=true"]) == 0
    assert stats_main([str(tmp_path / "data")]) == 0
    page = (tmp_path / "data/corpus.html").read_text()
    assert "<h3>exact duplicate: 1</h3>" in page
    assert "a.txt:" in page


def test_dry_run_writes_nothing(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, corpus)
    assert main(["--config", str(config), "--dry-run"]) == 0
    assert "3 files" in capsys.readouterr().out
    assert not (tmp_path / "data").exists()


def test_foreign_folder_is_not_written_into(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, corpus)
    (tmp_path / "data/tokenizer").mkdir(parents=True)
    error = one_line_error(capsys, ["--config", str(config)])
    assert "does not say how it was made" in error
