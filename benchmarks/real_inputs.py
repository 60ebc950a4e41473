"""Every real corpus at hand becomes verified shards: what was read, dropped and repaired, and whether the shards are whole.

Reads the data sets of `CLOZEWORKS_DATA` (default `../shared/data`); says so and ends where they are absent. `--quick` takes a slice
of each.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from measure import ROOT, machine, quick_argument

from data_pipeline.build import main as build
from data_pipeline.verify import main as verify

UNCASED, CASED = "vocab/bert-base-uncased-vocab.txt", "vocab/bert-base-cased-vocab.txt"
ALBERT = "vocab/albert-v2-spiece.model"
UDHR, GENESIS = "text/multilingual/nltk-udhr.zip", "text/multilingual/nltk-genesis.zip"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One corpus.

    Attributes:
        name: for the table.
        paths: below the data folder; globs.
        archive: a zip file that is unpacked, of which members that end so are taken.
        members: those ends.
        vocabulary: below the data folder; "" trains one.
        corpus: keys of `[corpus]`.
    """

    name: str
    paths: tuple[str, ...] = ()
    archive: str = ""
    members: tuple[str, ...] = ()
    vocabulary: str = ""
    mode: str = "nsp"
    corpus: dict[str, object] = field(default_factory=dict)


def declaration(suffix: str, encoding: str, *more: str, **corpus: object) -> Case:
    """The Declaration of Human Rights: files with this suffix, which names their encoding."""
    return Case(
        name=f"UDHR {suffix}",
        archive=UDHR,
        members=(f"-{suffix}", *more),
        mode="full_sentences",
        corpus={"source": "file", "encoding": encoding, "sentences": "en"} | corpus,
    )


def genesis(names: tuple[str, ...], encoding: str, sentences: str) -> Case:
    """Genesis, a verse or a line each."""
    return Case(
        name=f"Genesis {encoding}",
        archive=GENESIS,
        members=tuple(f"{name}.txt" for name in names),
        mode="sop",
        corpus={"source": "file", "encoding": encoding, "sentences": sentences, "keep_lines": True},
    )


CASES = (
    Case(
        name="Gutenberg, 12 novels",
        paths=tuple(f"text/gutenberg/{n}-*" for n in (1342, 135, 1400, 145, 158, 1661, 2600, 2701, 345, 766, 84, 98)),
        vocabulary=UNCASED,
        corpus={"source": "file"},
    ),
    Case(
        name="Gutenberg, Die Verwandlung",
        paths=("text/gutenberg/22367-*",),
        mode="full_sentences",
        corpus={"source": "file", "encoding": "latin-1", "sentences": "de"},
    ),
    Case(name="WikiText-2", paths=("text/wikitext-2",), vocabulary=CASED, corpus={"source": "wikitext"}),
    Case(
        name="enwiki dump",
        paths=("samples/mediawiki/enwiki-pages-articles-shortened.xml.bz2",),
        vocabulary=UNCASED,
        corpus={"source": "mediawiki"},
    ),
    Case(
        name="enwiki dump, tables",
        paths=("samples/mediawiki/enwiki-table-markup.xml.bz2",),
        vocabulary=UNCASED,
        corpus={"source": "mediawiki"},
    ),
    Case(
        name="bgwiki (UTF-16) and viwiki dumps",
        paths=("samples/mediawiki/bgwiki-*", "samples/mediawiki/wikiextractor-test.xml"),
        corpus={"source": "mediawiki", "sentences": "bg"},
    ),
    Case(
        name="WET",
        paths=("samples/warc/whirlwind.warc.wet.gz", "samples/warc/cc_net-sample.wet.txt"),
        vocabulary=ALBERT,
        corpus={"source": "wet", "sentences": "es"},
    ),
    Case(
        name="WARC",
        paths=(
            "samples/warc/whirlwind.warc.gz",
            "samples/warc/warcio-example.warc",
            "samples/warc/warcio-post-test.warc.gz",
        ),
        vocabulary=ALBERT,
        corpus={"source": "warc", "sentences": "es"},
    ),
    Case(
        name="sample_text of google-research/bert",
        paths=("text/google-bert-sample_text.txt",),
        vocabulary=UNCASED,
        corpus={"source": "text", "sentences": "line"},
    ),
    Case(
        name="inaugural addresses",
        archive="text/nltk-inaugural.zip",
        members=(".txt",),
        vocabulary=UNCASED,
        corpus={"source": "file", "encoding": "latin-1"},
    ),
    Case(
        name="State of the Union",
        archive="text/nltk-state_union.zip",
        members=(".txt",),
        vocabulary=UNCASED,
        corpus={"source": "file", "encoding": "latin-1"},
    ),
    genesis(("english-kjv", "english-web", "lolcat", "portuguese"), "utf-8", "en"),
    genesis(("finnish", "french", "german"), "latin-1", "de"),
    genesis(("swedish",), "cp850", "sv"),
    declaration("UTF8", "utf-8"),
    declaration("Latin1", "latin-1", "Amahuaca"),
    declaration("Latin2", "iso8859-2"),
    declaration("Cyrillic", "cp1251", "-Cyrillic+Abkh"),
    declaration("Greek", "iso8859-7", sentences="el"),
    declaration("Hebrew", "cp1255", sentences="he"),
    declaration("Arabic", "cp1256", sentences="ar"),
    declaration("Turkish", "iso8859-9", sentences="tr"),
    declaration("Baltic", "iso8859-4", sentences="lt"),
    declaration("Unicode", "utf-16-le", sentences="hu"),
    declaration("SJIS", "shift_jis", sentences="ja"),
    declaration("JIS", "iso2022_jp", sentences="ja"),
    declaration("EUC", "euc_jp", sentences="ja"),
    declaration("GB2312", "gb2312", sentences="zh"),
    declaration("HZ", "hz", sentences="zh"),
)
"""What is left of UDHR is in the encodings of single fonts (Agra, VPS, WinResearcher, ...), which no codec knows."""


def write_config(case: Case, data: Path, folder: Path, quick: bool) -> Path:
    """The configuration of a case."""
    paths = [str(data / path) for path in case.paths]
    if case.archive:
        with zipfile.ZipFile(data / case.archive) as archive:
            names = [name for name in archive.namelist() if name.endswith(case.members) and "README" not in name]
            archive.extractall(folder / "text", names[: 6 if quick else None])
        paths = [str(folder / "text")]
    size = {"max_megabytes": 1} if quick and not case.archive else {}
    tables: dict[str, dict[str, object]] = {
        "corpus": {"paths": paths, "held_out": 0} | case.corpus | size,
        "tokenizer": {"path": str(data / case.vocabulary)}
        if case.vocabulary
        else {"vocab_size": 1000 if quick else 8000},
        "data": {"dir": str(folder / "data"), "mode": case.mode, "mask_sets": 1, "workers": 1},
    }
    lines: list[str] = []
    for table, keys in tables.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    path = folder / "config.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(case: Case, data: Path, folder: Path, quick: bool) -> Iterator[str]:
    """Build and verify; the report of a case in lines, the first one says whether its shards are whole."""
    config = write_config(case, data, folder, quick)
    shown, started = io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        whole = build(["--config", str(config)]) == 0 and verify([str(folder / "data/train")]) == 0
    if not whole:
        yield f"FAILED {case.name}: {shown.getvalue().strip().splitlines()[-1]}"
        return
    stats = json.loads((folder / "data/train/stats.json").read_bytes())
    corpus = stats["corpus"]
    dropped = ", ".join(f"{reason} {n}" for reason, n in corpus["documents_dropped"].items() if n) or "none"
    repaired = {
        name: corpus[name]
        for name in (
            "undecodable_bytes",
            "gutenberg_books",
            "dumps_without_end",
            "records_with_wrong_length",
            "wikitext_headings",
        )
        if corpus.get(name)
    }
    unknown = corpus.get("unknown_tokens", 0) / max(1, corpus["tokens"])
    yield (
        f"whole  {case.name}: {corpus['documents_kept']} of {corpus['documents']} documents kept, dropped: {dropped}; "
        f"{corpus['tokens']} tokens in {corpus['sentences']} sentences, {unknown:.2%} unknown; {stats['examples']} examples; "
        f"{time.process_time() - started:.1f} CPU s" + "".join(f"; {name} {n}" for name, n in repaired.items())
    )
    for warning in stats["warnings"]:
        yield f"         {warning}"


def main() -> int:
    """Run all cases; the exit code is 1 where one failed."""
    quick = quick_argument(__doc__.split("\n")[0]).quick
    data = Path(os.environ.get("CLOZEWORKS_DATA", ROOT.parent / "shared" / "data"))
    if not data.is_dir():
        print(f"no data sets at {data}; set CLOZEWORKS_DATA")
        return 0
    print(f"real inputs: {machine()}")
    failed = 0
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            for line in run(case, data, Path(folder), quick):
                failed += line.startswith("FAILED")
                print(line, flush=True)
    print(json.dumps({"benchmark": "real_inputs", "cases": len(CASES), "whole": len(CASES) - failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
