"""How many builds that were killed at a random moment and started again end with the bytes of an undisturbed one.

Each round starts a build with two workers and another number of tasks, kills it (kill -9, only the main process or all of
them) after a random time, and starts it again. The reference is built by one worker in one go.
Every fourth round cleans the corpus as well: quality rules, exact and near duplicates, decontamination.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from data_build import sentences
from measure import ROOT, report

SENTENCES_PER_DOCUMENT = 40


# Some documents of the corpus come twice, and one is an evaluation file.
CLEANING = """
[cleaning]
quality = true
exact_duplicates = true
near_duplicates = true
decontaminate = ["{evaluation}"]
"""


def write_corpus(folder: Path, megabytes: float) -> Path:
    """Pre-split text in three files, and a document of it as an evaluation file."""
    lines = sentences(megabytes)
    documents = [lines[i : i + SENTENCES_PER_DOCUMENT] for i in range(0, len(lines), SENTENCES_PER_DOCUMENT)]
    corpus = folder / "corpus"
    corpus.mkdir()
    for part in range(3):
        text = "\n\n".join("\n".join(document) for document in documents[part::3] + documents[:3])
        (corpus / f"{part}.txt").write_text(text, encoding="utf-8")
    (folder / "evaluation.txt").write_text("\n".join(documents[5]), encoding="utf-8")
    return corpus


def command(corpus: Path, data: Path, workers: int, tasks: int, cleaning: bool) -> list[str]:
    """The build; its configuration is written beside its folder."""
    config = data.with_suffix(".toml")
    config.write_text(
        f'seed = 3\n[corpus]\nsource = "text"\npaths = ["{corpus}"]\nsentences = "line"\n[tokenizer]\nvocab_size = 2000\n'
        f'[data]\ndir = "{data}"\nbuckets = 4\nmask_sets = 2\nshard_megabytes = 0.5\nworkers = {workers}\ntasks = {tasks}\n'
        + (CLEANING.format(evaluation=corpus.parent / "evaluation.txt") if cleaning else "")
    )
    return [sys.executable, "-m", "data_pipeline.build", "--config", str(config)]


def digest(data: Path) -> str:
    """sha256 over names and bytes of all files of both splits."""
    total = hashlib.sha256()
    for path in sorted(path for split in ("train", "validation") for path in (data / split).iterdir()):
        total.update(f"{path.parent.name}/{path.name}".encode() + path.read_bytes())
    return total.hexdigest()


def run(arguments: list[str]) -> None:
    """A build that nothing disturbs."""
    subprocess.run(arguments, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def killed_build(arguments: list[str], seconds: float, everything: bool) -> bool:
    """Start a build and kill it after this time; whether it was still running."""
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        (os.killpg if everything else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False


def main() -> None:
    """Kill, rebuild, compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: proves that the script runs")
    parser.add_argument("--rounds", type=int, help="kills; 20, or 2 with --quick")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    options = parser.parse_args()
    quick, rng = options.quick, random.Random(options.seed)
    rounds = options.rounds or (2 if quick else 20)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_corpus(folder, 0.3 if quick else 2.0)
        expected, durations = {}, {}
        for cleaning in (False, True):
            reference, timed = folder / f"reference-{cleaning}", folder / f"timed-{cleaning}"
            run(command(corpus, reference, 1, 1, cleaning))
            expected[cleaning] = digest(reference)
            started = time.monotonic()
            run(command(corpus, timed, 2, 5, cleaning))
            durations[cleaning] = time.monotonic() - started
        if expected[False] == expected[True]:
            raise SystemExit("cleaning left nothing out: the corpus no longer shows whether it works")
        identical = 0
        for number in range(rounds):
            data, cleaning = folder / f"round-{number}", number % 4 == 1
            arguments = command(corpus, data, 2, 5, cleaning)
            moment = rng.uniform(0.1, 1.0) * durations[cleaning]
            while not killed_build(arguments, moment, everything=rng.random() < 0.5):
                shutil.rmtree(data)  # it was finished by then: a machine with less to do; once more, earlier
                moment *= 0.7
            again = subprocess.run(arguments, check=False, cwd=ROOT, capture_output=True, text=True)
            same = again.returncode == 0 and digest(data) == expected[cleaning]
            identical += same
            reused = sum(line.endswith("complete") for line in again.stdout.splitlines())
            print(
                f"{'with' if cleaning else 'no'} cleaning, killed after {moment:.2f} of {durations[cleaning]:.2f} s: "
                f"same bytes: {same}, stages found complete: {reused}"
            )
            if not same:
                print(again.stderr)
    report("kill_build", identical, "builds with identical bytes", rounds, 1.0)


if __name__ == "__main__":
    main()
