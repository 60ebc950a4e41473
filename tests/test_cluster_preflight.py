"""Preflight: what it compares between nodes and finds on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.preflight import Facts, code_hash, compare, main, shard_problems

ROOT = Path(__file__).parent.parent


def facts(node: str, **change: object) -> Facts:
    values = {
        "code": "c" * 64,
        "config": "k" * 64,
        "python": "3.11.7 /p/python",
        "clock_offset": 0.0,
        "free_gib": 100.0,
    }
    return Facts(**{"node": node, "problems": (), **values, **change})  # type: ignore[arg-type]


def test_agreement_has_no_problems() -> None:
    assert compare([facts("n1"), facts("n2", clock_offset=4.9)], min_free_gib=50) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": "d" * 64}, "the code differs: cccccccccccc on n1, n3; dddddddddddd on n2"),
        ({"config": "d" * 64}, "the configuration differs: kkkkkkkkkkkk on n1, n3; dddddddddddd on n2"),
        ({"python": "3.12.1 /q"}, "the Python differs"),
        ({"clock_offset": 7.0}, "the clock of n2 is 7.0 s ahead of n1's"),
        ({"free_gib": 3.0}, "n2: 3.0 GiB free for the run folder, expected 50"),
        ({"problems": ("a.tar: missing",)}, "n2: a.tar: missing"),
    ],
)
def test_differences_name_the_node(change: dict[str, object], message: str) -> None:
    problems = compare([facts("n1"), facts("n2", **change), facts("n3")], min_free_gib=50)
    assert len(problems) == 1 and message in problems[0]


def test_code_hash_sees_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    file = tmp_path / "cluster" / "a.py"
    file.write_text("x = 1\n")
    first = code_hash(tmp_path)
    file.write_text("x = 2\n")
    second = code_hash(tmp_path)
    file.rename(file.with_name("b.py"))
    assert len({first, second, code_hash(tmp_path)}) == 3
    (tmp_path / "cluster" / "notes.txt").write_text("no code")
    assert code_hash(tmp_path) == code_hash(tmp_path)


def test_damaged_shards_are_named(tmp_path: Path, write_dataset: Callable[..., object]) -> None:
    for part in ("train", "validation"):
        write_dataset(tmp_path / part, shards=3)
    assert shard_problems(tmp_path, 0, 1) == []
    shards = sorted((tmp_path / "train").glob("*.tar"))
    content = bytearray(shards[1].read_bytes())
    content[700] ^= 1
    shards[1].write_bytes(content)
    shards[2].unlink()
    (tmp_path / "validation" / "index.json").unlink()
    problems = shard_problems(tmp_path, 0, 1)
    assert [f"{shards[1]}: SHA-256 is" in problems[0], problems[1]] == [True, f"{shards[2]}: missing"]
    assert "build the data first" in problems[2] and len(problems) == 3
    # the nodes share the work: together they find the same, each once
    shares = [
        problem for rank in range(2) for problem in shard_problems(tmp_path, rank, 2) if "index.json" not in problem
    ]
    assert sorted(shares) == sorted(problems[:2])


def test_command_on_one_node(
    tmp_path: Path,
    write_dataset: Callable[..., object],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for part in ("train", "validation"):
        write_dataset(tmp_path / "data" / part)
    config = tmp_path / "c.toml"
    config.write_text(f'[run]\ndir = "{tmp_path}/run"\n[data]\ndir = "{tmp_path}/data"\n')
    assert main(["--config", str(config), "--min-free-gib", "0"]) == 0
    assert "1 node(s) agree, the data is complete" in capsys.readouterr().out
    assert list((tmp_path / "run" / "cluster").iterdir()) == [], "nothing is left behind"
    assert main(["--config", str(config), "--min-free-gib", "1e9"]) == 1
    assert "GiB free for the run folder, expected 1e+09" in capsys.readouterr().err
    assert main(["--config", str(tmp_path / "none.toml")]) == 2
    assert "cannot read the configuration" in capsys.readouterr().err
