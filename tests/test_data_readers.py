"""Readers: line rules, partition, drop counts, errors."""

from __future__ import annotations

import bz2
import gzip
from collections import Counter
from pathlib import Path

import orjson
import pytest
import zstandard

from data_pipeline import corpus_files
from data_pipeline.config import CorpusConfig
from data_pipeline.readers import CorpusError, ReadStep, find_inputs, is_held_out, read_documents
from data_pipeline.sentences import split_sentences


def read(path: Path, source: str = "text", tasks: int = 1, counts: Counter[str] | None = None, **settings):
    corpus = CorpusConfig(source=source, paths=(str(path),), **settings)
    inputs = find_inputs(corpus, path)
    return [d for task in range(tasks) for d in read_documents(corpus, inputs, task, tasks, counts)]


def test_r10_blank_documents_and_boundaries(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n\n   \n\n\u200b\n\n\n\nhello world\n\nsecond doc here\n\n\n", encoding="utf-8")
    counts: Counter[str] = Counter()
    assert [d.text for d in read(path, counts=counts)] == ["\u200b", "hello world", "second doc here"]
    assert counts["dropped:blank"] == 1
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert read(path)[-1].text == "second doc here"


def test_r14_line_ends_and_undecodable_bytes(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("one\u2028two\nthree\vfour\nfive\u0085six\u001cseven".encode())
    (document,) = read(path)
    assert len(split_sentences(document.text, "line")) == 3
    path.write_bytes(b"a\r\nb\r\n\r\nc\r\n")
    documents = read(path)
    assert [split_sentences(d.text, "line") for d in documents] == [["a", "b"], ["c"]]
    assert not any("\r" in d.text for d in documents)
    path.write_bytes(b"good\nbad \xff\xfe here\n")
    counts: Counter[str] = Counter()
    assert read(path, counts=counts)[0].text == "good\nbad \ufffd\ufffd here"
    assert counts["undecodable_bytes"] == 2
    with pytest.raises(CorpusError, match=r"text\.txt: not utf-8 at byte 9: .*corpus\.encoding_errors"):
        read(path, encoding_errors="strict")


@pytest.mark.parametrize("source", ["text", "jsonl"])
@pytest.mark.parametrize("tasks", [2, 3, 7])
def test_documents_do_not_depend_on_the_number_of_tasks(tmp_path, monkeypatch, source, tasks):
    monkeypatch.setattr(corpus_files, "MIN_RANGE_BYTES", 64)  # so that a small file is cut many times
    for name in ("a", "b"):
        if source == "text":
            lines = [f"document {n}\nof {name}\n" + "\n" + " \n" * (n % 5) + "\n" * (n % 4) for n in range(60)]
        else:
            lines = [f'{{"text": "document {n} of {name}", "id": {n % 5}}}\n' for n in range(60)]
        (tmp_path / name).write_text(("\n" if source == "text" else "") + "".join(lines))
    counts: Counter[str] = Counter()
    again: Counter[str] = Counter()
    alone = {d.id: d.text for d in read(tmp_path, source, counts=counts)}
    corpus = CorpusConfig(source=source, paths=(str(tmp_path),))
    parts = [list(read_documents(corpus, find_inputs(corpus, tmp_path), t, tasks, again)) for t in range(tasks)]
    assert all(parts) and len(alone) == 120
    joined = [d for part in parts for d in part]
    assert len(joined) == 120 and {d.id: d.text for d in joined} == alone
    assert again == counts and counts["dropped:blank"] == (240 if source == "text" else 0)


def test_compressed_files_keep_the_ids_of_plain_ones(tmp_path):
    content = b"first\n\nsecond\n"
    plain = tmp_path / "plain" / "x.txt"
    plain.parent.mkdir()
    plain.write_bytes(content)
    packers = {"gz": gzip.compress, "bz2": bz2.compress, "zst": zstandard.ZstdCompressor().compress}
    expected = [(d.id, d.text) for d in read(plain)]
    assert expected == [("x.txt:0", "first"), ("x.txt:7", "second")]
    for suffix, pack in packers.items():
        path = tmp_path / suffix / f"x.txt.{suffix}"
        path.parent.mkdir()
        path.write_bytes(pack(content))
        assert [(d.id, d.text) for d in read(path)] == expected
    damaged = tmp_path / "bad.txt.gz"
    damaged.write_bytes(gzip.compress(b"some text " * 500)[:-20])
    with pytest.raises(CorpusError, match=r"bad\.txt\.gz: damaged or truncated gzip"):
        read(damaged)


def test_encodings(tmp_path):
    path = tmp_path / "text.txt"
    for encoding in ("utf-8-sig", "utf-16", "latin-1"):
        path.write_bytes("Größe\r\nzwei\r\n\r\ndrei".encode(encoding))
        assert [d.text for d in read(path, encoding=encoding)] == ["Größe\nzwei", "drei"]
    path.write_bytes("\ufeffGröße".encode())
    assert read(path)[0].text == "Größe"
    with pytest.raises(CorpusError, match=r"corpus\.encoding: 'utf-88'"):
        read(path, encoding="utf-88")


def test_json_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [b'{"text": "one", "id": "k", "url": "u"}', b"{broken", b'{"body": "no text"}', b"", b"[1]", b'{"text": 3}']
    path.write_bytes(b"\n".join([*rows, b'{"text": "two", "metadata": {"a": 1}}']))
    counts: Counter[str] = Counter()
    one, two = read(path, "jsonl", counts=counts)
    assert (one.id, one.text, one.metadata) == ("x.jsonl:0", "one", {"id": "k", "url": "u"})
    assert (two.text, two.metadata) == ("two", {"a": 1})
    assert counts == {"dropped:not_json": 1, "dropped:no_text": 3}


def test_max_megabytes_takes_the_first_documents(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"document {n:06d}\n\n" for n in range(1000)))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"".join(b"other %06d\n\n" % n for n in range(1000))))
    whole = [d.id for d in read(tmp_path)]
    some = [d.id for d in read(tmp_path, max_megabytes=0.02)]
    assert 1000 < len(some) < 1300 and some == whole[: len(some)]
    assert sorted(d.id for d in read(tmp_path, tasks=3, max_megabytes=0.02)) == sorted(some)


def test_links_are_followed_to_files_only(tmp_path):
    (tmp_path / "elsewhere.txt").write_text("linked\n")
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "plain.txt").write_text("plain\n")
    (folder / "link.txt").symlink_to(tmp_path / "elsewhere.txt")
    assert [d.text for d in read(folder)] == ["linked", "plain"]
    assert [d.id for d in read(folder / "*.txt")] == ["link.txt:0", "plain.txt:0"]
    before = find_inputs(CorpusConfig(source="text", paths=(str(folder),)), tmp_path)
    (tmp_path / "elsewhere.txt").write_text("another text\n")
    after = find_inputs(CorpusConfig(source="text", paths=(str(folder),)), tmp_path)
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True] and after[0].size == 13
    (folder / "nowhere.txt").symlink_to(tmp_path / "missing")
    with pytest.raises(CorpusError, match=r"nowhere\.txt: a link that leads to no file"):
        read(folder)


def test_errors_name_the_path(tmp_path):
    with pytest.raises(CorpusError, match=r"corpus\.paths: .*missing: no such file or folder"):
        read(tmp_path / "missing")
    with pytest.raises(CorpusError, match=r"\*\.txt: no file matches"):
        read(tmp_path / "*.txt")
    with pytest.raises(CorpusError, match=r"corpus\.paths is empty"):
        find_inputs(CorpusConfig(source="text"), tmp_path)


def test_held_out_share():
    chosen = [n for n in range(20000) if is_held_out(f"x:{n}", 0.05)]
    assert 900 < len(chosen) < 1100
    assert set(chosen) <= {n for n in range(20000) if is_held_out(f"x:{n}", 0.1)}
    assert not is_held_out("x", 0)


def test_read_step_counts_in_one_task(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"broken\n" + orjson.dumps({"text": "fine"}))
    corpus = CorpusConfig(source="jsonl", paths=(str(path),))
    step = ReadStep(corpus, find_inputs(corpus, tmp_path))
    for _ in range(2):
        assert [d.text for d in step.run(None, 0, 1)] == ["fine"]
        assert step.counts == {"dropped:not_json": 1}
