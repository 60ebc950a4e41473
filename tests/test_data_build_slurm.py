"""A build on a real Slurm cluster: the same bytes as on this machine."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import orjson
import pytest

from data_pipeline.build import main
from data_pipeline.cluster_execution import SlurmExecutor
from data_pipeline.config import SlurmConfig

Script = Callable[..., "subprocess.CompletedProcess[str]"]


def digests(data: Path) -> dict[str, str]:
    """sha256 of every file of the training set."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((data / "train").iterdir())}


@pytest.mark.slurm
@pytest.mark.slow
def test_slurm_arrays_make_the_bytes_of_a_local_build(slurm_script: Script, tmp_path: Path) -> None:
    rows = [orjson.dumps({"text": text}) for _, text in sorted(topics.items())[:60]]
    (tmp_path / "corpus.jsonl").write_bytes(b"\n".join(rows))
    config = tmp_path / "config.toml"
    config.write_text(
        f'[corpus]\nsource = "jsonl"\npaths = ["{tmp_path}/corpus.jsonl"]\nheld_out = 0.0\n[cleaning]\nexact_duplicates = true\n'
        f"[tokenizer]\nvocab_size = 600\n"
        f'[data]\ndir = "{tmp_path}/local"\nbuckets = 2\nmask_sets = 1\nworkers = 1\n[data.slurm]\nmem_per_cpu_gb = 0\n'
    )
    assert main(["--config", str(config)]) == 0
    command = [
        sys.executable,
        "-m",
        "data_pipeline.build",
        "--config",
        str(config),
        "--set",
        f"data.dir={tmp_path}/slurm",
    ]
    command += ["--set", "data.executor=slurm", "--set", "data.workers=2", "--set", "data.tasks=2"]
    refused = slurm_script("exec", *command, "--set", "data.slurm.partition=absent")
    assert refused.returncode == 2
    assert "2 of 2 tasks did not complete on the cluster, the first is 0" in refused.stderr
    done = slurm_script("exec", *command)
    assert done.returncode == 0, done.stderr + done.stdout
    assert digests(tmp_path / "slurm") == digests(tmp_path / "local")
    for stage in ("cleaning", "tokens", "assemble"):  # all ran as arrays: one log of Slurm's per task
        logs = list((tmp_path / "slurm" / stage / "state/slurm_logs").glob("*_[01].out"))
        assert len(logs) == 2


def test_job_of_an_earlier_submission_does_nothing(tmp_path: Path) -> None:
    """A build that was started again has submitted the stage anew: jobs of the first submission must not write."""
    ran: list[int] = []

    def step(data: object, rank: int, tasks: int) -> None:
        ran.append(rank)

    executor = SlurmExecutor([step], tasks=1, at_once=0, state_dir=tmp_path, slurm=SlurmConfig())  # type: ignore[list-item]
    executor.generation = "first"
    (tmp_path / "generation").write_text("second")
    executor._run_for_rank(0)
    assert ran == []
    assert executor.get_incomplete_ranks() == [0]


def test_directives_left_to_the_cluster_are_not_written(tmp_path: Path) -> None:
    slurm = SlurmConfig(mem_per_cpu_gb=0, time="00:10:00", extra={"account": "nlp"})
    arguments = SlurmExecutor([], tasks=3, at_once=2, state_dir=tmp_path, slurm=slurm).get_sbatch_args(3)
    assert not {"partition", "mem-per-cpu", "qos"} & set(arguments)
    assert (arguments["array"], arguments["time"], arguments["account"]) == ("0-2%2", "00:10:00", "nlp")
    assert "wait" in arguments
