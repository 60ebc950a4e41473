"""`python -m eval.embedded_task --data DIR --output DIR`: the demo's task, made from the embedded corpus.

Which package is a paragraph of documentation from? Training rows come from documents that the encoder was pre-trained
on, dev rows from held-out ones, by the rule of the data pipeline. Sentences that name any package are left out, so that
the answer is not written in the question. The same corpus gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.artefacts import write_text
from data_pipeline.build_state import SETTINGS_NAME
from data_pipeline.config import CorpusConfig
from data_pipeline.embedded import FILE_NAME
from data_pipeline.readers import is_held_out
from data_pipeline.sentences import split_sentences
from eval.tasks import TASKS, TaskError

PACKAGES = 8
"""Classes: the packages with the most paragraphs."""
TRAIN_ROWS, DEV_ROWS = 4000, 800
"""Upper limits over all classes; each class gets an equal share of them, as far as it has that many paragraphs."""
MIN_WORDS, MAX_WORDS = 14, 80
"""Words of a row: shorter ones say too little, longer ones are cut at a sentence's end."""
ALIASES = {"sklearn": ("scikit", "scikit-learn"), "matplotlib": ("pyplot", "mpl"), "sqlalchemy": ("alchemy",)}
"""Other names that give a package away."""


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A row before selection."""

    package: str
    text: str
    held_out: bool


def make_task(data: Path, output: Path) -> dict[str, Counter[str]]:
    """Write `output/package/{train.tsv,dev.tsv,labels.txt}` and return the rows by class of each split.

    Raises:
        TaskError: no embedded corpus in `data`, or too little text in it for two classes.
    """
    paragraphs = list(_read_paragraphs(data))
    sizes = Counter(paragraph.package for paragraph in paragraphs)
    # Ties go by name, so that the choice never depends on the order of reading.
    names = sorted(sorted(sizes, key=lambda name: (-sizes[name], name))[:PACKAGES])
    rows = {
        "train": _select(paragraphs, names, held_out=False, limit=TRAIN_ROWS),
        "dev": _select(paragraphs, names, held_out=True, limit=DEV_ROWS),
    }
    for split, chosen in rows.items():
        if len({paragraph.package for paragraph in chosen}) < 2:
            raise TaskError(
                f"{data}: {len(chosen)} usable paragraphs for {split}, of fewer than two packages; "
                "build with a larger corpus.max_megabytes or corpus.held_out"
            )
    folder = output / TASKS["package"].folder
    for split, chosen in rows.items():
        lines = ["index\tsentence\tlabel", *(f"{n}\t{row.text}\t{row.package}" for n, row in enumerate(chosen))]
        write_text(folder / f"{split}.tsv", "\n".join(lines) + "\n")
    write_text(folder / TASKS["package"].labels_file, "\n".join(names) + "\n")
    return {split: Counter(row.package for row in chosen) for split, chosen in rows.items()}


def _read_paragraphs(data: Path) -> Iterator[Paragraph]:
    path = data / "corpus" / FILE_NAME
    if not path.is_file():
        raise TaskError(
            f"{path}: no such file; build with corpus.source = 'embedded' first (python -m data_pipeline.build)"
        )
    share = held_out_share(data)
    documents = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    names = _names_pattern({document["metadata"]["package"] for document in documents})
    for document in documents:
        held_out = is_held_out(document["id"], share)
        for text in document["text"].split("\n\n"):
            usable = usable_text(text, names)
            if usable:
                yield Paragraph(document["metadata"]["package"], usable, held_out)


def held_out_share(data: Path) -> float:
    """The held-out share that the corpus was built with, as the build noted it; the default where there is no note."""
    path = data / SETTINGS_NAME
    try:
        return float(json.loads(path.read_bytes())["tokens"]["corpus"]["held_out"])
    except (OSError, ValueError, KeyError, TypeError):
        return CorpusConfig().held_out


def _names_pattern(packages: set[str]) -> re.Pattern[str]:
    """Matches any package's name as a word or as part of a longer one (`SciPy's`, `mlflow_run`, `torch.nn`)."""
    names = sorted(
        packages | {alias for package in packages for alias in ALIASES.get(package, ())}, key=len, reverse=True
    )
    return re.compile("|".join(map(re.escape, names)), re.IGNORECASE)


def usable_text(paragraph: str, names: re.Pattern[str]) -> str:
    """The paragraph on one line, without sentences that name a package and cut to `MAX_WORDS`; empty if too short."""
    kept: list[str] = []
    words = 0
    for sentence in split_sentences(paragraph, "punkt"):
        sentence = " ".join(sentence.split())
        if names.search(sentence):
            continue
        if kept and words + sentence.count(" ") + 1 > MAX_WORDS:
            break
        kept.append(sentence)
        words += sentence.count(" ") + 1
    return " ".join(kept) if words >= MIN_WORDS else ""


def _select(paragraphs: Sequence[Paragraph], names: Sequence[str], *, held_out: bool, limit: int) -> list[Paragraph]:
    """An equal share of each class, chosen and ordered by a hash of the text; a text occurs once."""
    distinct = {p.text: p for p in paragraphs if p.held_out == held_out and p.package in names}
    taken: Counter[str] = Counter()
    chosen = []
    for paragraph in sorted(distinct.values(), key=lambda p: hashlib.blake2b(p.text.encode(), digest_size=8).digest()):
        if taken[paragraph.package] < limit // len(names):
            taken[paragraph.package] += 1
            chosen.append(paragraph)
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m eval.embedded_task", description=__doc__)
    parser.add_argument("--data", required=True, type=Path, help="data folder of a build with the embedded corpus")
    parser.add_argument("--output", required=True, type=Path, help="folder for the task: package/{train,dev}.tsv")
    options = parser.parse_args(arguments)
    try:
        rows = make_task(options.data, options.output)
    except TaskError as error:
        print(f"eval.embedded_task: {error}", file=sys.stderr)
        return 2
    for split, counts in rows.items():
        print(f"{split}: {counts.total()} rows; " + ", ".join(f"{name} {counts[name]}" for name in sorted(counts)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
