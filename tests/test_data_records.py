"""Readers of whole files: books, tables, WikiText, MediaWiki dumps, web archives."""

from __future__ import annotations

import bz2
import gzip
import zipfile
from collections import Counter
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data_pipeline.config import CorpusConfig
from data_pipeline.readers import CorpusError, find_inputs, read_documents
from data_pipeline.wikitext import prose


def read(path: Path | str, source: str, counts: Counter[str] | None = None, tasks: int = 1, **settings):
    corpus = CorpusConfig.model_validate({"source": source, "paths": (str(path),), **settings})
    inputs = find_inputs(corpus, Path(path))
    return [d for task in range(tasks) for d in read_documents(corpus, inputs, task, tasks, counts)]


def test_books_lose_the_frame_of_gutenberg(shared_data):
    counts: Counter[str] = Counter()
    (book,) = read(shared_data / "text/gutenberg/1342*", "file", counts)
    assert book.text.startswith("PRIDE AND PREJUDICE\n\nBy Jane Austen")
    assert book.text.endswith("had been the means of uniting them.\n")
    assert "Gutenberg" not in book.text and "\r" not in book.text
    assert counts["gutenberg_books"] == 1 and 15_000 < counts["gutenberg_characters"] < 30_000


def test_a_latin1_book(shared_data):
    path = shared_data / "text/gutenberg/22367*"
    counts: Counter[str] = Counter()
    (book,) = read(path, "file", counts, encoding="latin-1")
    assert "Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte" in " ".join(book.text.split())
    assert counts["undecodable_bytes"] == 0
    (wrong,) = read(path, "file", counts)
    assert counts["undecodable_bytes"] == wrong.text.count("\ufffd") > 2000
    with pytest.raises(CorpusError, match=r"22367.*not utf-8.*corpus\.encoding"):
        read(path, "file", encoding_errors="strict")


ENCODINGS = {
    "Greek_Ellinika-Greek": ("iso8859-7", "άνθρωπο", 0),
    "Hebrew_Ivrit-Hebrew": ("cp1255", "זכויות", 0),
    "Arabic_Alarabia-Arabic": ("cp1256", "حقوق", 0),
    "Turkish_Turkce-Turkish": ("iso8859-9", "İnsan", 0),
    "Lithuanian_Lietuviskai-Baltic": ("iso8859-4", "žmogaus", 0),
    "Hungarian_Magyar-Unicode": ("utf-16-le", "Az Emberi Jogok Egyetemes", 1),
    "Japanese_Nihongo-SJIS": ("shift_jis", "人権", 0),
    "Japanese_Nihongo-JIS": ("iso2022_jp", "人権", 1),
    "Japanese_Nihongo-EUC": ("euc_jp", "人権", 0),
    "Chinese_Mandarin-GB2312": ("gb2312", "人权", 0),
    "Chinese_Mandarin-HZ": ("hz", "人权", 0),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_encodings_of_the_declaration_of_human_rights(shared_data, tmp_path, name):
    """Each names its encoding; some are cut inside a character."""
    encoding, word, cut = ENCODINGS[name]
    with zipfile.ZipFile(shared_data / "text/multilingual/nltk-udhr.zip") as archive:
        (tmp_path / "text").write_bytes(archive.read(f"udhr/{name}"))
    counts: Counter[str] = Counter()
    (document,) = read(tmp_path / "text", "file", counts, encoding=encoding)
    assert word in document.text and counts["undecodable_bytes"] == cut and "\ufeff" not in document.text


def test_one_document_a_file(tmp_path):
    for name, content in {
        "a.txt": b"\xef\xbb\xbfone\r\n\r\ntwo",
        "b.txt": b"",
        "c.txt": b" \n",
        "d/e.txt": b"x",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    counts: Counter[str] = Counter()
    found = {d.id: d.text for d in read(tmp_path, "file", counts)}
    assert found == {"a.txt:0": "one\n\ntwo", "d/e.txt:0": "x"}
    assert counts["dropped:empty"] == 1 and counts["dropped:blank"] == 1
    assert {d.id: d.text for d in read(tmp_path, "file", tasks=3)} == found
    assert [d.text for d in read(tmp_path, "file", max_megabytes=1e-6)] == ["one\n\ntwo"]


def test_tables(tmp_path):
    rows = [("1", 'say "hi",\nplease'), ("2", ""), ("3", "Größe")]
    content = 'n,body\n1,"say ""hi"",\nplease"\n2,\n3,Größe\n'.encode()
    (tmp_path / "t.csv.zst").write_bytes(zstandard.ZstdCompressor().compress(b"\xef\xbb\xbf" + content))
    (tmp_path / "t.tsv.gz").write_bytes(
        gzip.compress(
            content.replace(b",\n3", b"\t\n3").replace(b"n,", b"n\t").replace(b'1,"', b'1\t"').replace(b"3,", b"3\t")
        )
    )
    pq.write_table(pa.table({"n": [r[0] for r in rows], "body": [r[1] for r in rows]}), tmp_path / "t.parquet")
    for name, source in {"t.csv.zst": "csv", "t.tsv.gz": "csv", "t.parquet": "parquet"}.items():
        counts: Counter[str] = Counter()
        found = read(tmp_path / name, source, counts, text_key="body")
        assert [(d.text, d.metadata) for d in found] == [(rows[0][1], {"n": "1"}), (rows[2][1], {"n": "3"})]
        assert [d.id.rpartition(":")[2] for d in found] == ["0", "2"] and counts["dropped:no_text"] == 1
        with pytest.raises(CorpusError, match=r"no column 'text'; set corpus\.text_key .* n, body"):
            read(tmp_path / name, source)
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and so on")
    with pytest.raises(CorpusError, match=r"t\.parquet: not a Parquet file"):
        read(tmp_path / "t.parquet", "parquet")


def test_wikitext_articles(shared_data):
    counts: Counter[str] = Counter()
    found = read(shared_data / "text/wikitext-2/valid.txt.gz", "wikitext", counts)
    assert len(found) == 60 and found[0].metadata == {"title": "Homarus gammarus"}
    assert found[0].text.startswith("Homarus gammarus , known as the European lobster or common lobster , is")
    assert not any(" = " in d.text.partition("\n")[0] or "@-@" in d.text for d in found)
    assert counts["wikitext_headings"] > 500 and counts["wikitext_unknown_words"] > 10_000


def test_prose_of_wikitext():
    source = (
        "{{Infobox|a={{b}}}}\n'''Ann''' ({{IPA|x}}; born {{age}} 1900<ref>{{cite}}</ref>) was a [[poet|writer]]"
        "&nbsp;of [[Rome]].<!-- no -->[[File:x.jpg|thumb|A [[cat]]]][[Category:People]][[de:Ann]]\n\n== Life ==\n"
        "She wrote ''[http://x.org Songs]''.<br />More <small>text</small>.\n* a list item\n# another\n: indented\n\n"
        "{| class=x\n| cell || cell\n|}\n<gallery>\nA.jpg|b\n</gallery>\nThe end <math>x^2</math>. __NOTOC__"
    )
    assert prose(source) == ("Ann (born 1900) was a writer of Rome.\n\nShe wrote Songs. More text.\n\nThe end.")
    assert prose("{{stub}}\n* only\n") == ""


def test_wikipedia_dumps(shared_data):
    folder = shared_data / "samples/mediawiki"
    counts: Counter[str] = Counter()
    (page,) = read(folder / "bgwiki*", "mediawiki", counts)  # UTF-16
    assert page.metadata == {"title": "Григориански календар", "page": "558"}
    assert page.text.startswith("Григорианският календар (понякога наричан и Грегориански календар, „нов стил“) е")
    assert counts["dropped:not_an_article"] == 2
    found = read(folder / "enwiki-table*", "mediawiki")
    assert len(found) == 5 and not any(mark in d.text for d in found for mark in ("{|", "|}", "||", "{{", "[[", "<ref"))
    counts.clear()
    found = read(folder / "wikiextractor-test.xml", "mediawiki", counts)  # lacks the last closing tag
    assert len(found) == 5 and counts["dumps_without_end"] == 1 and counts["dropped:redirect"] == 3


def test_a_dump_cut_inside_a_page_is_refused(shared_data, tmp_path):
    whole = bz2.decompress((shared_data / "samples/mediawiki/enwiki-table-markup.xml.bz2").read_bytes())
    path = tmp_path / "cut.xml.bz2"
    path.write_bytes(bz2.compress(whole[:200_000]))
    with pytest.raises(CorpusError, match=r"cut\.xml\.bz2: not a MediaWiki XML dump, or cut off after page \d"):
        read(path, "mediawiki")


def test_text_of_a_crawl(shared_data, tmp_path):
    folder = shared_data / "samples/warc"
    counts: Counter[str] = Counter()
    (page,) = read(folder / "whirlwind.warc.wet.gz", "wet", counts)
    assert page.metadata["url"] == "https://an.wikipedia.org/wiki/Escopete"
    assert page.text.startswith("Escopete - Biquipedia") and len(page.text.encode()) == 4456
    assert counts["records_with_wrong_length"] == 0
    found = read(folder / "cc_net-sample.wet.txt", "wet", counts)  # lengths in characters, line ends changed
    assert [d.metadata["url"].rpartition(".")[2] for d in found] == ["com", "zh", "ru"]
    assert found[1].text.rstrip().endswith("真理不是。") and counts["records_with_wrong_length"] == 4
    cut = tmp_path / "cut.wet"
    cut.write_bytes(gzip.decompress((folder / "whirlwind.warc.wet.gz").read_bytes())[:-1000])
    with pytest.raises(CorpusError, match=r"cut\.wet: cut off inside its last record"):
        read(cut, "wet")


def test_pages_of_a_crawl(shared_data):
    folder = shared_data / "samples/warc"
    (page,) = read(folder / "whirlwind.warc.gz", "warc")
    assert "Escopete ye un municipio d'a provincia de Guadalachara" in page.text and "<" not in page.text
    (page,) = read(folder / "warcio-example.warc", "warc")  # content that is compressed inside the record
    assert page.text.startswith("Example Domain\n\nThis domain is established to be used for illustrative examples")
    counts: Counter[str] = Counter()
    assert read(folder / "warcio-post-test.warc.gz", "warc", counts) == [] and counts["dropped:not_html"] == 3
    with pytest.raises(CorpusError, match=r"no response found.*'wet'"):
        read(folder / "whirlwind.warc.wet.gz", "warc")
    with pytest.raises(CorpusError, match=r"no text record found.*'warc'"):
        read(folder / "whirlwind.warc.gz", "wet")


@pytest.mark.parametrize(
    ("name", "source", "count"),
    [
        ("samples/warc/warcio-example.warc", "warc", 1),
        ("samples/warc/whirlwind.warc.gz", "warc", 1),
        ("samples/warc/cc_net-sample.wet.txt", "wet", 3),
        ("samples/mediawiki/enwiki-table-markup.xml.bz2", "mediawiki", 1),
        ("text/wikitext-2/valid.txt.gz", "wikitext", 1),
    ],
)
def test_a_slice_by_the_amount_of_text(shared_data, name, source, count):
    """Documents end once that much text is there, whatever the file is."""
    assert len(read(shared_data / name, source, max_megabytes=0.001)) == count
    assert len(read(shared_data / name, source, max_megabytes=0.001, tasks=3)) == count


def test_files_behind_a_url():
    """Any file system of fsspec, here the one in memory."""
    system = fsspec.filesystem("memory")
    try:
        for name, text in {"b.txt": "two", "a.txt": "one"}.items():
            system.pipe(f"/crawl/{name}.gz", gzip.compress(text.encode()))
        for pattern in ("memory://crawl/*.gz", "memory://crawl"):
            assert [(d.id, d.text) for d in read(pattern, "file")] == [("a.txt:0", "one"), ("b.txt:0", "two")]
        with pytest.raises(CorpusError, match=r"memory://elsewhere: no such file or folder"):
            read("memory://elsewhere", "file")
    finally:
        system.rm("/crawl", recursive=True)
