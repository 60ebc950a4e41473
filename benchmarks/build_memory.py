"""Peak memory of a worker of a build, for a corpus of 100 MB and for one of 1 GB.

One process does all the work here, so its peak is that of a worker and of the build around it.
The text is pre-split, so that the pipeline itself is measured and not the sentence splitter; the larger corpus repeats the
files of the smaller one under other names, so that its documents have keys of their own.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from data_build import SENTENCES_PER_DOCUMENT, sentences, vocabulary
from measure import ROOT, quick_argument, report

GOAL = 1.1
LIMIT_MEGABYTES = 1500


def peak_megabytes(folder: Path, text: str, copies: int, vocabulary_path: Path) -> float:
    """Build `copies` files of this text with one worker; the peak of its process."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for copy in range(copies):
        (corpus / f"{copy:04d}.txt").write_text(text, encoding="utf-8")
    config = folder / "build.toml"
    config.write_text(
        f'[corpus]\nsource = "text"\npaths = ["{corpus}"]\nsentences = "line"\nheld_out = 0.01\n'
        f'[tokenizer]\npath = "{vocabulary_path}"\n[data]\ndir = "{folder / "data"}"\nmask_sets = 4\nworkers = 1\n'
    )
    command = [sys.executable, "-m", "data_pipeline.build", "--config", str(config)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    peak = 0.0
    while process.poll() is None:  # not ru_maxrss: a child inherits its parent's
        peak = max(peak, _peak_so_far(process.pid))
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit("the build failed")
    print(f"{copies * len(text) / 1e6:.0f} MB of text: {peak:.0f} MB at the peak")
    return peak


def _peak_so_far(pid: int) -> float:
    with contextlib.suppress(OSError):  # it has just ended
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def main() -> None:
    """Measure both sizes."""
    quick = quick_argument(__doc__.split("\n")[0]).quick
    lines = sentences(0.5 if quick else 5.0)
    documents = [lines[i : i + SENTENCES_PER_DOCUMENT] for i in range(0, len(lines), SENTENCES_PER_DOCUMENT)]
    text = "\n\n".join("\n".join(document) for document in documents)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocabulary_path = vocabulary(folder, lines)
        small = peak_megabytes(folder / "small", text, 1 if quick else 20, vocabulary_path)
        large = peak_megabytes(folder / "large", text, 4 if quick else 200, vocabulary_path)
    print(f"limit: {LIMIT_MEGABYTES} MB a worker, {'kept' if large < LIMIT_MEGABYTES else 'EXCEEDED'}")
    report("build_memory", large, "MB at the peak", small, GOAL, higher_is_better=False)


if __name__ == "__main__":
    main()
