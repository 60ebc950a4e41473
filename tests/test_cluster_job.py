"""The job script as text, the host file, and the command that submits."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.hostfile import HostFileError, devices_of, host_file, slots_of
from cluster.job import STOPPED_CODE, Job, JobError, Resources, render
from cluster.submit import main
from pretrain.stops import EXIT_STOPPED

ASSETS = Path(__file__).parent / "assets"
CONFIG = '[run]\ndir = "runs/first/pretrain"\n'


def job(**resources: object) -> Job:
    return Job(
        name="pretrain-demo",
        command=("python", "-u", "pretrain/run.py", "--config", "configs/it's here.toml"),
        resources=Resources(**{"nodes": 2, "gpus_per_node": 4} | resources),  # type: ignore[arg-type]
        work_folder=Path("/proj/clozeworks"),
        cluster_folder=Path("/proj/runs/demo 1/cluster"),
        python=Path("/proj/clozeworks/.venv/bin/python"),
    )


def test_script_equals_the_golden_file() -> None:
    text = render(job(partition="gpu", account="nlp", time_limit="1-00:00:00", extra=("--constraint=a100",)))
    golden = ASSETS / "job_golden.sh"
    assert text == golden.read_text(), f"the job script changed; if that is meant, rewrite {golden.name}"
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_resources_reach_the_directives() -> None:
    shared = render(job(gpus_per_node=0, ranks_per_node=3, cpus_per_node=6, warn_seconds=60))
    assert "#SBATCH --cpus-per-task=6\n" in shared and "--exclusive" not in shared
    assert "--ranks-per-node 3" in shared and "#SBATCH --gpus" not in shared
    assert "#SBATCH --signal=B:USR1@60\n" in shared
    assert "@python@" not in shared and not any(word in shared for word in ("@slots@", "@command@", "@directives@"))


def test_the_stop_code_is_the_trainers() -> None:
    assert STOPPED_CODE == EXIT_STOPPED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "--nodes is 0"),
        ({"gpus_per_node": -1}, "--gpus-per-node is -1"),
        ({"ranks_per_node": 2}, "exclude each other"),
        ({"partition": "gpu\n#SBATCH --uid=0"}, "line break"),
        ({"extra": ("constraint=a100",)}, "expected an sbatch option in one word"),
        ({"extra": ('--comment="x"',)}, "quote"),
    ],
)
def test_wrong_resources_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(JobError) as caught:
        render(job(**change))
    assert message in str(caught.value)


def test_r39_host_file_of_unequal_nodes() -> None:
    slots = slots_of(["1 n2 0,1", "0 n1 0,1,2,3"], nodes=2)
    assert host_file(slots) == "n1 slots=4\nn2 slots=2\n"
    assert sum(slots.values()) == 6
    # two devices of a shared node are two slots, whatever their numbers; UUIDs of MIG slices count as well
    assert slots_of(["0 n1 4,5"], nodes=1) == {"n1": 2}
    assert devices_of("MIG-a,MIG-b") == ["MIG-a", "MIG-b"]
    # a whole node with more devices than asked for; ranks on CPUs
    assert slots_of(["0 n1 0,1,2,3,4,5,6,7"], nodes=1, gpus_per_node=2) == {"n1": 2}
    assert slots_of(["0 n1"], nodes=1, ranks_per_node=3) == {"n1": 3}


@pytest.mark.parametrize(
    ("answers", "options", "message"),
    [
        (["0 n1 0"], {"nodes": 2}, "1 of 2 nodes answered: n1"),
        (["0 n1 0", "0 n2 0"], {"nodes": 2}, "cannot read '0 n2 0'"),
        (["bash: error"], {"nodes": 1}, "cannot read 'bash: error'"),
        (["0 n1 0,1"], {"nodes": 1, "gpus_per_node": 4}, "allotted 2 devices (0,1), expected 4"),
        (["0 n1", "1 n2 0"], {"nodes": 2}, "node n1 was allotted no device"),
        (["0 n1 NoDevFiles"], {"nodes": 1, "gpus_per_node": 1}, "node n1 was allotted no device"),
    ],
)
def test_an_allocation_without_a_host_file(answers: list[str], options: dict[str, int], message: str) -> None:
    with pytest.raises(HostFileError) as caught:
        host_file(slots_of(answers, **options))
    assert message in str(caught.value)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pretrain").mkdir()
    (tmp_path / "pretrain" / "run.py").touch()
    (tmp_path / "c.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_dry_run_prints_and_writes_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(project.rglob("*"))
    assert main(["pretrain", "--config", "c.toml", "--nodes", "2", "--gpus-per-node", "8", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.startswith("#!/bin/bash\n#SBATCH --job-name=pretrain-first\n#SBATCH --nodes=2\n")
    assert f"{project}/runs/first/pretrain/cluster" in out
    assert f"python -u pretrain/run.py --config {project}/c.toml </dev/null" in out
    assert sorted(project.rglob("*")) == before
    override = ["--set", "run.dir=other/p", "--set", "optimizer.lr=1e-4"]
    assert main(["pretrain", "--config", "c.toml", "--nodes", "1", *override, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"folder={project}/other/p/cluster\n" in out and "--set run.dir=other/p --set optimizer.lr=1e-4" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "none.toml", "--nodes", "1"], "none.toml: cannot read the configuration (No such file"),
        (["--config", "pretrain/run.py", "--nodes", "1"], "no run.dir"),
        (["--config", "c.toml", "--nodes", "0"], "--nodes is 0"),
        (["--config", "c.toml", "--nodes", "1", "--set", "run.dir"], "expected TABLE.KEY=VALUE"),
        (["--config", "c.toml", "--nodes", "1", "--job-name", "a b"], "--job-name 'a b'"),
    ],
)
def test_user_errors_are_one_message(
    project: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["pretrain", *arguments, "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("submit: ") and message in err and err.count("\n") == 1


def test_no_sbatch_here(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(Path(shutil.which("true") or "").parent / "none"))
    assert main(["pretrain", "--config", "c.toml", "--nodes", "1"]) == 2
    assert "cannot run sbatch (No such file or directory)" in capsys.readouterr().err
    # the script is kept, so that it can be looked at or queued elsewhere
    assert (project / "runs/first/pretrain/cluster/pretrain-first.sh").stat().st_mode & 0o100


def test_submitting_imports_no_torch() -> None:
    code = "import sys, cluster.submit, cluster.world; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ASSETS.parent.parent, check=False).returncode == 0
