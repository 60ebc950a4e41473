"""The command: refusals in one line, the dry run, a complete run, and the launcher with a signal in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from data_pipeline.shard_index import ShardIndex
from pretrain.checkpoint import list_steps, read_state
from pretrain.run import main
from pretrain.stops import EXIT_DONE, EXIT_STOPPED, EXIT_USAGE

ROOT = Path(__file__).resolve().parent.parent
TEXT = """
seed = 3
[data]
dir = "{folder}/data"
[run]
dir = "{folder}/pretrain"
[model]
layers = 1
hidden = 32
heads = 2
intermediate = 64
[train]
steps = 3000
global_batch = 16
micro_batch = 4
log_every = 1
[optimizer]
lr = 1e-3
[checkpoint]
every = 1000
[validation]
every = 1000
[deepspeed]
zero_optimization = {{ stage = 1 }}
"""


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory, write_dataset: Callable[..., ShardIndex]) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for part, blocks in (("train", 6), ("validation", 2)):
        write_dataset(folder / "data" / part, shards=2, blocks=blocks, examples=9, seed=blocks)
    (folder / "run.toml").write_text(TEXT.format(folder=folder))
    return folder / "run.toml"


@pytest.fixture
def three_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stepz=3", "did you mean 'steps'?"),
        ("data.dir=/nowhere", "python -m data_pipeline.build"),
        ("model.max_positions=128", ""),
        ("data.max_seq_length=16", ""),
        ("model.vocab_size=99", "vocab_size"),
        ("train.global_batch=18", "nearest valid global_batch: 16 or 20"),
    ],
)
def test_a_user_error_is_one_message_and_exit_code_2(
    toml: Path, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    code = main(["--config", str(toml), "--dry-run", "--set", override])
    error = capsys.readouterr().err
    if words:
        assert code == EXIT_USAGE
        assert error.startswith("error: ") and words in error and "Traceback" not in error
    else:
        assert code == EXIT_DONE


def test_a_missing_file_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tmp_path / "no.toml")]) == EXIT_USAGE
    assert "no.toml: cannot read" in capsys.readouterr().err


def test_r26_three_ranks_are_refused_before_training(
    toml: Path, three_ranks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(toml)]) == EXIT_USAGE
    assert "nearest valid number of ranks: 2 or 4" in capsys.readouterr().err
    assert not (toml.parent / "pretrain").exists()


def test_dry_run_prints_sizes_and_writes_nothing(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(toml), "--dry-run"]) == EXIT_DONE
    printed = capsys.readouterr().out
    assert "16 = 4 x 4 x 1 ranks" in printed and "parameters" in printed
    assert not (toml.parent / "pretrain").exists()


def launch(toml: Path, *overrides: str) -> subprocess.Popen[str]:
    """`deepspeed --num_gpus 2 pretrain/run.py`, from another working folder than the repository."""
    command = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2", "--master_port", "0"]
    command += [str(ROOT / "pretrain" / "run.py"), "--config", str(toml)]
    for override in overrides:
        command += ["--set", override]
    command[4] = str(20_000 + os.getpid() % 9_000)
    environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    return subprocess.Popen(
        command,
        cwd=toml.parent,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(launcher.pid).children(recursive=True)
    return [child for child in children if any(part.startswith("--local_rank=") for part in child.cmdline())]


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint_and_the_same_command_goes_on(toml: Path) -> None:
    run = toml.parent / "pretrain"
    first = launch(toml)
    try:
        deadline = time.monotonic() + 240
        while not (run / "metrics.jsonl").is_file() or (run / "metrics.jsonl").read_text().count("\n") < 3:
            assert first.poll() is None and time.monotonic() < deadline, first.communicate(timeout=60)[0]
            time.sleep(0.2)
        ranks_of(first)[1].send_signal(signal.SIGUSR1)
        printed = first.communicate(timeout=120)[0]
    finally:
        first.kill()
    assert first.returncode == EXIT_STOPPED, printed
    (saved,) = list_steps(run / "checkpoints")
    stopped = read_state(saved).step
    assert f"stopped after step {stopped}/3000" in printed

    second = launch(toml, f"train.steps={stopped + 3}", "optimizer.lr=5e-4")
    try:
        printed = second.communicate(timeout=240)[0]
    finally:
        second.kill()
    assert second.returncode == EXIT_DONE, printed
    assert f"resumed from {saved}" in printed and "optimizer.lr: 0.001 -> 0.0005" in printed
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, stopped + 4))
    record = json.loads((run / "run.json").read_text())
    assert [start["step"] for start in record["starts"]] == [0, stopped]
    assert record["unigram_loss"] > 0


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_complete_run_is_left_alone(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goes on where the test above ended."""
    last = read_state(list_steps(toml.parent / "pretrain" / "checkpoints")[-1]).step
    before = (toml.parent / "pretrain" / "run.json").read_bytes()
    assert main(["--config", str(toml), "--set", f"train.steps={last}"]) == EXIT_DONE
    assert "nothing to do" in capsys.readouterr().out
    assert (toml.parent / "pretrain" / "run.json").read_bytes() == before
