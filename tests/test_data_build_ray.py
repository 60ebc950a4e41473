"""A build on Ray: the same bytes as with local processes. Runs where Ray is installed."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import orjson
import pytest

from data_pipeline.build import main

ROOT = Path(__file__).resolve().parent.parent
RAY = importlib.util.find_spec("ray") is not None


def write_config(folder: Path) -> Path:
    rows = [orjson.dumps({"text": text}) for _, text in sorted(topics.items())[:60]]
    for part in range(3):
        (folder / f"{part}.jsonl").write_bytes(b"\n".join(rows[part::3]) + b"\n")
    path = folder / "config.toml"
    path.write_text(
        f'[corpus]\nsource = "jsonl"\npaths = ["{folder}/*.jsonl"]\nheld_out = 0.0\n[cleaning]\nexact_duplicates = true\n'
        f'[tokenizer]\nvocab_size = 600\n[data]\ndir = "{folder}/local"\nbuckets = 2\nmask_sets = 1\nworkers = 2\ntasks = 3\n'
    )
    return path


def digests(data: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((data / "train").iterdir())}


@pytest.mark.slow
@pytest.mark.skipif(not RAY, reason="Ray is not installed: pip install -e '.[ray]'")
def test_ray_makes_the_bytes_of_a_local_build(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert main(["--config", str(config)]) == 0
    command = [sys.executable, "-m", "data_pipeline.build", "--config", str(config), "--set", "data.executor=ray"]
    # Another folder, another working folder: the workers must find the package all the same.
    command += ["--set", f"data.dir={tmp_path}/ray"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert digests(tmp_path / "ray") == digests(tmp_path / "local")
    for stage in ("cleaning", "tokens", "assemble"):
        assert len(list((tmp_path / "ray" / stage / "state/completions").iterdir())) in (2, 3)
    (tmp_path / "0.jsonl").write_bytes(b'{"text": "\xff"}\n')
    failed = subprocess.run(
        [*command, "--set", "corpus.encoding_errors=strict", "--set", f"data.dir={tmp_path}/strict"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert failed.returncode == 2
    assert "1 of 3 tasks did not complete on Ray" in failed.stderr, failed.stderr
    assert failed.stderr.count("\n") < 5  # no log of the library on top of it
