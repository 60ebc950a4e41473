"""The command: refusals in one line, the dry run, a complete run, and the launcher with a signal in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from data_pipeline.config import ConfigError
from data_pipeline.shard_index import ShardIndex
from pretrain.checkpoint import CheckpointError, SaveError, list_steps, read_state
from pretrain.run import _report, main
from pretrain.stops import EXIT_DONE, EXIT_FAULT, EXIT_NOT_SAVED, EXIT_STOPPED, EXIT_USAGE, TrainingFault

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
[tracking]
enabled = false
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


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a"), EXIT_USAGE),
        (CheckpointError("b"), EXIT_USAGE),
        (SaveError("c"), EXIT_NOT_SAVED),
        (TrainingFault("d"), EXIT_FAULT),
    ],
)
def test_r22_each_kind_of_end_has_its_exit_code(
    toml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    monkeypatch.setattr("pretrain.run._run", lambda *_, **__: (_ for _ in ()).throw(error))
    assert main(["--config", str(toml)]) == code != EXIT_DONE
    assert capsys.readouterr().err == f"error: {error}\n"


def test_r41_what_only_one_node_lacks_is_said_there(
    toml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the ranks know each other no other one can say it; where all raise the same, rank 0 does."""
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["--config", str(toml), "--set", "data.dir=/nowhere"]) == EXIT_USAGE
    assert re.match(r"error: rank 2 on \S+: /nowhere/train", capsys.readouterr().err)
    assert _report(ConfigError("all ranks differ"), everywhere=True) == EXIT_USAGE
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["--config", str(toml), "--set", "data.dir=/nowhere"]) == EXIT_USAGE
    assert capsys.readouterr().err == ""


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


def test_data_that_are_not_built_are_refused_but_planned_for(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(toml), "--set", "data.dir=/nowhere"]
    assert main(arguments) == EXIT_USAGE
    assert "python -m data_pipeline.build" in capsys.readouterr().err
    assert main([*arguments, "--dry-run"]) == EXIT_DONE
    assert "not built yet" in capsys.readouterr().out


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
    deepspeed = str(Path(sys.executable).with_name("deepspeed"))
    port = str(20_000 + os.getpid() % 9_000)
    return start(toml, [deepspeed, "--num_gpus", "2", "--master_port", port], overrides)


def start(toml: Path, launcher: list[str], overrides: tuple[str, ...], **variables: str) -> subprocess.Popen[str]:
    """The training command behind a launcher."""
    command = [*launcher, str(ROOT / "pretrain" / "run.py"), "--config", str(toml)]
    for override in overrides:
        command += ["--set", override]
    environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    return subprocess.Popen(
        command,
        cwd=toml.parent,
        # no rank compiles anything, and importing the compiler takes seconds in each
        env={**environment, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(launcher.pid).children(recursive=True)
    return [child for child in children if any(part.startswith("--local_rank=") for part in child.cmdline())]


def wait_for_step(run: Path, step: int, *processes: subprocess.Popen[str]) -> None:
    """Until metrics.jsonl has this step's line."""
    deadline = time.monotonic() + 600
    line = f'"kind": "train", "step": {step},'
    while not (run / "metrics.jsonl").is_file() or line not in (run / "metrics.jsonl").read_text():
        for process in processes:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=60)[0]
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(1800)
def test_r40_r41_r26_signals_a_dead_rank_and_another_world_size_in_one_run(toml: Path) -> None:
    """SIGUSR1 to one rank; SIGTERM to the launcher; kill -9 of one rank; then one rank alone finishes the run."""
    run = toml.parent / "pretrain"
    first = launch(toml)
    try:
        wait_for_step(run, 3, first)
        ranks_of(first)[1].send_signal(signal.SIGUSR1)
        printed = first.communicate(timeout=300)[0]
    finally:
        first.kill()
    assert first.returncode == EXIT_STOPPED, printed
    (saved,) = list_steps(run / "checkpoints")
    stopped = read_state(saved).step
    assert f"stopped after step {stopped}/3000 (SIGUSR1, seen by rank 1), checkpoint saved" in printed

    second = launch(toml, "optimizer.lr=5e-4")
    try:
        wait_for_step(run, stopped + 2, second)
        left_behind = psutil.Process(second.pid).children(recursive=True)
        second.terminate()
        printed = second.communicate(timeout=300)[0]  # to the end of all processes that hold the pipe
    finally:
        second.kill()
    assert second.returncode == -signal.SIGTERM  # `deepspeed` has no handler, see pretrain/stops.py
    assert psutil.wait_procs(left_behind, timeout=300)[1] == []
    assert f"resumed from {saved}" in printed and "optimizer.lr: 0.001 -> 0.0005" in printed
    assert re.search(r"\(DeepSpeed's launcher is gone, seen by rank [01]\), checkpoint saved", printed), printed
    assert printed.count("checkpoint saved") == 1
    again = read_state(list_steps(run / "checkpoints")[-1]).step
    assert again > stopped

    world = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start(toml, [sys.executable], (), RANK=str(r), LOCAL_RANK=str(r), **world) for r in range(2)]
    try:
        wait_for_step(run, again + 2, *ranks)
        ranks[1].kill()
        printed = ranks[0].communicate(timeout=300)[0]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 1
    assert f"rank 0 on {socket.gethostname()} failed:\nTraceback" in printed

    alone = start(toml, [sys.executable], (f"train.steps={again + 3}",))
    try:
        printed = alone.communicate(timeout=600)[0]
    finally:
        alone.kill()
    assert alone.returncode == EXIT_DONE, printed
    assert "2 ranks and ZeRO 1 -> 1 ranks and ZeRO 1" in printed
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, again + 4))
    record = json.loads((run / "run.json").read_text())
    assert [begun["step"] for begun in record["starts"]] == [0, stopped, again, again]
    assert record["unigram_loss"] > 0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_complete_run_is_left_alone(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goes on where the test above ended."""
    last = read_state(list_steps(toml.parent / "pretrain" / "checkpoints")[-1]).step
    before = (toml.parent / "pretrain" / "run.json").read_bytes()
    assert main(["--config", str(toml), "--set", f"train.steps={last}"]) == EXIT_DONE
    assert "nothing to do" in capsys.readouterr().out
    assert (toml.parent / "pretrain" / "run.json").read_bytes() == before
