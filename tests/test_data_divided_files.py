"""One file, many tasks: parts of dumps, crawls and Parquet files together give what the whole file gives."""

from __future__ import annotations

import bz2
import codecs
import gzip
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mwparserfromhell import nodes, parse

from data_pipeline import corpus_files
from data_pipeline.config import CorpusConfig, PipelineConfig
from data_pipeline.corpus_files import CorpusError, FileRange, InputFile, find_files
from data_pipeline.csv_rows import with_row_starts
from data_pipeline.mediawiki import dump_documents
from data_pipeline.plan import print_plan
from data_pipeline.progress import BuildProgress
from data_pipeline.readers import find_inputs, read_documents
from data_pipeline.web_archive import warc_documents, wet_documents
from data_pipeline.wikitext import (
    _BLANK,
    _DROPPED_TAG,
    _INTERWIKI,
    _LIST_ITEM,
    _LIST_MARKS,
    FILE_NAMESPACES,
    _paragraph,
    prose,
)


def write_dump(pages: int, longest: int = 90) -> bytes:
    """A dump in UTF-8 with pages of very different lengths, a redirect and a talk page."""
    parts = [
        '<mediawiki xmlns="x" xml:lang="de">\n  <siteinfo><namespaces><namespace key="6" case="a">Datei</namespace>'
    ]
    parts.append('<namespace key="0" case="a" /></namespaces></siteinfo>\n')
    for number in range(1, pages + 1):
        text = f"Der Text von Größe {number} [[Datei:x.jpg|thumb|nicht]] endet. " * (1 + (number * 37) % longest)
        ns = 1 if number % 10 == 0 else 0
        redirect = '<redirect title="x" />' if number % 7 == 0 else ""
        parts.append(
            f"  <page>\n    <title>Seite {number}</title><ns>{ns}</ns><id>{number + 1000}</id>{redirect}"
            f"<revision><text>{text}</text></revision>\n  </page>\n"
        )
    return "".join([*parts, "</mediawiki>\n"]).encode()


def parts_of(path: Path, edges: list[int]) -> list[FileRange]:
    file = InputFile(path=str(path), name=path.name, size=path.stat().st_size, modified="")
    return [FileRange(file=file, start=a, end=b) for a, b in itertools.pairwise([*edges, None])]


def read(parts: list[FileRange]) -> tuple[list[list[tuple[str, str]]], Counter[str]]:
    counts: Counter[str] = Counter()
    return [[(d.id, d.text) for d in dump_documents(part, counts)] for part in parts], counts


def streams(content: bytes, cuts: list[int]) -> bytes:
    return b"".join(bz2.compress(content[a:b]) for a, b in itertools.pairwise([0, *cuts, len(content)]))


def test_parts_of_a_dump_give_every_page_once(tmp_path: Path) -> None:
    """Uncompressed; bzip2 in one stream; a stream for some pages each (Wikimedia); streams cut anywhere (pbzip2)."""
    content = write_dump(60)
    pages = [match.start() for match in re.finditer(b"<page>", content)]
    tags = [pages[20] + 3, pages[40] + 1, pages[41] - 2, pages[50] + 40]
    files = {
        "plain.xml": (content, [0, *tags, len(content) - 5]),
        "one.xml.bz2": (bz2.compress(content), [0, 1, 500, 1500]),
        "multistream.xml.bz2": (streams(content, [*pages[::9], len(content) - 13]), list(range(0, 6000, 700))),
        "anywhere.xml.bz2": (
            streams(content, [10, *tags, *range(pages[50] + 50, len(content), 5000)]),
            list(range(0, 4000, 300)),
        ),
    }
    whole: list[tuple[str, str]] = []
    for name, (stored, edges) in files.items():
        path = tmp_path / name
        path.write_bytes(stored)
        (all_of_it,), counts = read(parts_of(path, [0]))
        texts = [text for _, text in all_of_it]
        assert len(texts) == 60 - 6 - 8 and "Größe" in texts[0] and "nicht" not in texts[0]
        assert counts == {"dropped:redirect": 8, "dropped:not_an_article": 6}
        divided, again = read(parts_of(path, edges))
        assert [document for part in divided for document in part] == all_of_it
        assert again == counts
        assert sum(bool(part) for part in divided) >= (1 if name.startswith("one") else 4)
        whole = whole or [(i.rpartition(":")[2], t) for i, t in all_of_it]
        assert [(i.rpartition(":")[2], t) for i, t in all_of_it] == whole


def test_every_place_of_a_cut_is_right(tmp_path: Path) -> None:
    content = write_dump(4, longest=1)
    path = tmp_path / "d.xml"
    path.write_bytes(content)
    ((*wanted,),), _ = read(parts_of(path, [0]))
    for cut in range(1, len(content), 3):
        divided, _ = read(parts_of(path, [0, cut]))
        assert divided[0] + divided[1] == wanted, cut


def test_damaged_dumps_are_refused(tmp_path: Path) -> None:
    content = write_dump(30)
    path = tmp_path / "d.xml.bz2"
    path.write_bytes(streams(content, [3000, 9000])[:-40])
    with pytest.raises(CorpusError, match=r"d\.xml\.bz2: damaged or truncated bz2 data"):
        read(parts_of(path, [0]))
    path = tmp_path / "d.xml"
    path.write_bytes(content[:9000])
    with pytest.raises(
        CorpusError, match=r"d\.xml: not a MediaWiki XML dump, or cut off after page \d+: the file ends inside"
    ):
        read(parts_of(path, [0]))
    lost = content.index(b"</page>", 5000)
    path.write_bytes(content[: lost - 30] + content[lost + 40 :])
    with pytest.raises(
        CorpusError, match=r"cut off after page \d+( of the part that begins at byte 4000)?: mismatched tag"
    ):
        read(parts_of(path, [0, 4000]))
    path.write_bytes(b"<html><page>no</page></html>")
    with pytest.raises(CorpusError, match="expected <mediawiki>"):
        read(parts_of(path, [0]))


def crawl(kind: str, pages: int) -> list[bytes]:
    """The records of a crawl, each in gzip; every third page is long and does not compress."""
    rng = np.random.default_rng(0)
    members = []
    for number in range(pages):
        words = " ".join(map(str, rng.integers(0, 10**9, 2000 if number % 3 == 0 else 30)))
        body = f"Page {number} says: {words}".encode()
        if kind == "response":
            body = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html><body><p>" + body + b"</p></body></html>"
        head = (
            f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{number:032x}>\r\nWARC-Target-URI: http://x.org/{number}"
            f"\r\nContent-Type: {'application/http; msgtype=response' if kind == 'response' else 'text/plain'}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        members.append(gzip.compress(head.encode() + body + b"\r\n\r\n"))
    return members


@pytest.mark.parametrize(("kind", "documents_of"), [("conversion", wet_documents), ("response", warc_documents)])
def test_parts_of_a_crawl_give_every_record_once(tmp_path: Path, kind: str, documents_of: Callable) -> None:
    """Members of gzip, also around the magic bytes inside a member, a part without a member, and a cut file."""
    members = crawl(kind, 40)
    path = tmp_path / "c.gz"
    path.write_bytes(b"".join(members))
    starts = [0, *itertools.accumulate(map(len, members))]

    def parts(edges: list[int]) -> list[list[str]]:
        found = [list(documents_of(part, Counter())) for part in parts_of(path, edges)]
        return [[f"{d.id} {d.text}" for d in part] for part in found]

    (whole,) = parts([0])
    assert len(whole) == 40 and whole[7].startswith(f"c.gz:urn:uuid:{7:032x} Page 7 says: ")
    for edges in ([0, starts[3], starts[3] + 1, starts[20] - 1], [0, 5, starts[1] + 3, starts[1] + 9, starts[30] - 10]):
        divided = parts(edges)
        assert list(itertools.chain(*divided)) == whole
    assert list(map(len, parts([0, starts[3], starts[3] + 1, starts[20]]))) == [3, 1, 16, 20]
    assert list(map(len, parts([0, starts[39] + 1]))) == [40, 0]
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CorpusError, match=r"c\.gz: .*(damaged|truncated|cut off)"):
        parts([0, starts[20]])


def test_tasks_share_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parquet by row groups, a dump by pages; with the least size of a part at 2 kB. A plan says what cannot be divided."""
    monkeypatch.setattr(corpus_files, "MIN_RANGE_BYTES", 2000)
    rows = [f"document {number} " * 40 for number in range(500)]
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet", row_group_size=20, compression=None)
    (tmp_path / "d.xml").write_bytes(write_dump(60))
    for name, source in {"a.parquet": "parquet", "d.xml": "mediawiki"}.items():
        corpus = CorpusConfig.model_validate({"source": source, "paths": (str(tmp_path / name),)})
        inputs = find_inputs(corpus, tmp_path)
        one = [(d.id, d.text) for d in read_documents(corpus, inputs)]
        shares = [[(d.id, d.text) for d in read_documents(corpus, inputs, task, 4)] for task in range(4)]
        assert all(shares) and sorted(itertools.chain(*shares)) == sorted(one)
    assert [i for i, _ in one][:2] == ["d.xml:1001", "d.xml:1002"]
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"text\n" + b"one,two\n" * 1000))
    plan = {
        "corpus": {"source": "csv", "paths": [str(tmp_path / "b.csv.gz")]},
        "data": {"dir": str(tmp_path / "x"), "tasks": 3},
    }
    print_plan(PipelineConfig.model_validate(plan), BuildProgress())
    assert "1 of them cannot be divided and are read by one task each, the largest is" in capsys.readouterr().out
    assert len(find_files([str(tmp_path / "b.csv.gz")])) == 1


def random_table(rng: random.Random) -> bytes:
    """Rows of fields with quotes, line ends, delimiters, marks and damaged bytes in them; now and then a quote out of place."""
    end = rng.choice([b"\n", b"\r\n"])

    def some(*pieces: bytes) -> bytes:
        return b"".join(rng.choices(pieces, k=rng.randrange(6)))

    def field() -> bytes:
        if rng.random() < 0.5:
            return b'"' + some(b"a b", b",", b"\n", b"\r\n", b"\r", b'""', b"\xff", b"\xc2\x85", codecs.BOM_UTF8) + b'"'
        out_of_place = rng.choice([b'"', b'b"c', b' "d"', b"\r"]) if rng.random() < 0.003 else b""
        return some(b"a", b"x y", b"\xc3\xa9", b"\xff", b"\v", b"\x1c", codecs.BOM_UTF8) + out_of_place

    rows = [b",".join(field() for _ in range(rng.randrange(4))) for _ in range(60)]
    header = rng.choice([b"n,text", b'"n","text"', b'"n,""\n",text'])
    table = rng.choice([b"", codecs.BOM_UTF8]) + end.join([header, *rows]) + rng.choice([b"", end])
    return table if rng.random() < 0.8 else table[: -rng.randrange(1, 9)]


def test_tasks_share_the_rows_of_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random tables: the same documents, ids, columns and counts from one task and from many."""
    monkeypatch.setattr(corpus_files, "MIN_RANGE_BYTES", 32)
    rng, path, shared = random.Random(0), tmp_path / "t.csv", 0
    corpus = CorpusConfig.model_validate({"source": "csv", "paths": (str(path),)})
    for number in range(60):
        path.write_bytes(random_table(rng))
        inputs = find_inputs(corpus, tmp_path)
        counts, again = Counter[str](), Counter[str]()
        whole = [(d.id, d.text, d.metadata) for d in read_documents(corpus, inputs, counts=counts)]
        inputs, tasks = with_row_starts(inputs, corpus.encoding), rng.randrange(2, 6)
        shares = [
            [(d.id, d.text, d.metadata) for d in read_documents(corpus, inputs, task, tasks, again)]
            for task in range(tasks)
        ]
        shared += all(shares)
        assert sorted(itertools.chain(*shares), key=str) == sorted(whole, key=str), number
        assert again == counts and counts["undecodable_bytes"], number
    path.write_bytes(b"text\n" + b'a 5" screen\n' * 20)
    notes: list[str] = []
    (file,) = with_row_starts(find_inputs(corpus, tmp_path), "utf-8", notes.append)
    assert not file.rows and "read by one task" in notes[0]
    assert shared > 30  # the others have a quote out of place, or few rows


def tree_prose(source: str) -> str:
    """`prose` from the library's tree of nodes."""
    parts: list[str] = []

    def collect(items: list[object]) -> None:
        for node in items:
            if isinstance(node, nodes.Text):
                parts.append(str(node.value))
            elif isinstance(node, nodes.Wikilink):
                target = str(node.title)
                namespace = target.partition(":")[0].strip().lower()
                if namespace not in FILE_NAMESPACES and not (node.text is None and _INTERWIKI.match(target)):
                    collect((node.text or node.title).nodes)
            elif isinstance(node, nodes.ExternalLink) and node.title is not None:
                collect(node.title.nodes)
            elif isinstance(node, nodes.HTMLEntity):
                parts.append(node.normalize())
            elif isinstance(node, nodes.Tag):
                name = str(node.tag).strip().lower()
                if node.wiki_markup in _LIST_MARKS:
                    parts.append(_LIST_ITEM)
                elif name in ("br", "hr", "li"):
                    parts.append("\n" + (_LIST_ITEM if name == "li" else ""))
                elif not _DROPPED_TAG.fullmatch(name) and node.contents is not None:
                    collect(node.contents.nodes)

    collect(parse(source, skip_style_tags=True).nodes)
    paragraphs = (_paragraph(block) for block in _BLANK.split("".join(parts).replace("\r", "")))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


ODD = (
    "[[a|]] [[a|{{b}}]] [[de:x]] [[:de:x|y]] [[File:x.jpg|[[a|b]] c]] [http://x.org] [http://x.org a ''b''] http://y.org z",
    "&amp; &#65; &#x42; &nbsp;x &bogus; <b>x <i>y</i></b> <span style='{{a|<b>}}'>z</span> <br/> <ref name=a /> w<ref>q</ref>",
    "{{{a|b}}} {{a|{{b|[[c]]}}}} <!-- <b>no</b> --> == H ==\n=== {{x}} ===\n* a\n*# b <b>c</b>\n; d : e\n<li>f</li>\n----\ng",
    "{| class='x'\n! a\n|-\n| b || c\n{|\n| nested\n|}\n|}\nafter <div><b>n</b> x</div> <nowiki>[[a]]</nowiki> <b unclosed\n\n[[x",
)


def test_prose_from_tokens_is_that_from_the_tree(shared_data: Path) -> None:
    """The five long pages full of tables, the Vietnamese pages, and odd markup."""
    folder = shared_data / "samples/mediawiki"
    dumps = [
        bz2.decompress((folder / "enwiki-table-markup.xml.bz2").read_bytes()),
        (folder / "wikiextractor-test.xml").read_bytes(),
    ]
    found = [text for dump in dumps for text in re.findall(r"<text[^>]*>(.*?)</text>", dump.decode(), re.DOTALL)]
    sources = [
        *ODD,
        *(s.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&") for s in found),
    ]
    assert len(sources) > 15
    for source in sources:
        assert prose(source[:60_000]) == tree_prose(source[:60_000])
