"""Real corpora of every format become verified shards with a sane report."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import orjson
import pytest

from data_pipeline.build import main
from data_pipeline.inspect import main as inspect
from data_pipeline.verify import main as verify

pytestmark = pytest.mark.slow


def build(folder: Path, paths: list[Path], vocabulary: Path | None, **corpus: object) -> dict:
    """Build, verify and inspect; the training set's `stats.json`."""
    mode = corpus.pop("mode", "nsp")
    tables = {
        "corpus": {"paths": [str(path) for path in paths], "held_out": 0, **corpus},
        "tokenizer": {"path": str(vocabulary)} if vocabulary else {"vocab_size": 1500},
        "data": {"dir": str(folder / "data"), "mode": mode, "mask_sets": 1, "workers": 2},
    }
    lines = [
        line
        for name, keys in tables.items()
        for line in [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in keys.items())]
    ]
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text("\n".join(lines) + "\n")
    assert main(["--config", str(folder / "config.toml")]) == 0
    assert verify([str(folder / "data/train")]) == 0
    assert inspect([str(folder / "data/train")]) == 0
    stats = json.loads((folder / "data/train/stats.json").read_text())
    assert stats["examples"] > 0 and abs(stats["masking"]["share_of_tokens"] - 0.15) < 0.03
    return stats


def test_books_of_gutenberg(shared_data, tmp_path):
    books = [
        path for name in ("1342", "1661", "84", "98") for path in (shared_data / "text/gutenberg").glob(f"{name}-*")
    ]
    stats = build(tmp_path, books, shared_data / "vocab/bert-base-uncased-vocab.txt", source="file")
    corpus = stats["corpus"]
    assert corpus["documents_kept"] == corpus["gutenberg_books"] == len(books) == 4
    assert 5e5 < corpus["tokens"] < 7e5 and corpus["unknown_tokens"] < 1e-4 * corpus["tokens"]
    assert corpus["undecodable_bytes"] == 0 and abs(stats["nsp"]["random_share"] - 0.5) < 0.005
    # Most examples are full: 15 % of 128 tokens are 19.2, of which 19 are predicted.
    assert abs(stats["masking"]["share_of_tokens"] - 19 / 128) < 0.001
    shares = {"masked_share": 0.8, "random_share": 0.1, "kept_share": 0.1}
    assert all(abs(stats["masking"][name] - share) < 0.005 for name, share in shares.items())

    longer = ["--config", str(tmp_path / "config.toml"), "--set", f"data.tokens_from={tmp_path}/data"]
    assert main([*longer, "--set", f"data.dir={tmp_path}/512", "--set", "data.max_seq_length=512"]) == 0
    stats = json.loads((tmp_path / "512/train/stats.json").read_bytes())
    assert abs(stats["masking"]["share_of_tokens"] - 0.15) < 0.001 and verify([str(tmp_path / "512/train")]) == 0


def test_a_german_book_in_latin1(shared_data, tmp_path):
    book = list((shared_data / "text/gutenberg").glob("22367*"))
    stats = build(tmp_path, book, None, source="file", encoding="latin-1", sentences="de", mode="full_sentences")
    assert stats["corpus"]["undecodable_bytes"] == 0 and 500 < stats["corpus"]["sentences"] < 1200
    assert stats["corpus"]["unknown_tokens"] < 10


def test_wikitext(shared_data, tmp_path):
    stats = build(
        tmp_path, [shared_data / "text/wikitext-2"], shared_data / "vocab/bert-base-cased-vocab.txt", source="wikitext"
    )
    assert stats["corpus"]["documents_kept"] == 122 and stats["corpus"]["wikitext_headings"] == 1204


def test_wikipedia_dumps(shared_data, tmp_path):
    folder = shared_data / "samples/mediawiki"
    stats = build(
        tmp_path / "en",
        [folder / "enwiki-table-markup.xml.bz2"],
        shared_data / "vocab/bert-base-uncased-vocab.txt",
        source="mediawiki",
    )
    assert stats["corpus"]["documents_kept"] == 5
    others = [folder / "bgwiki-pages-articles-shortened.xml.bz2", folder / "wikiextractor-test.xml"]
    stats = build(tmp_path / "bg-vi", others, None, source="mediawiki", sentences="bg")  # one of them is UTF-16
    assert stats["corpus"]["documents_dropped"]["redirect"] == 3 and stats["corpus"]["documents_kept"] == 6


def test_web_archives(shared_data, tmp_path):
    folder, vocabulary = shared_data / "samples/warc", shared_data / "vocab/albert-v2-spiece.model"
    wet = [folder / "whirlwind.warc.wet.gz", folder / "cc_net-sample.wet.txt"]
    assert build(tmp_path / "wet", wet, vocabulary, source="wet", sentences="es")["corpus"]["documents_kept"] == 4
    warc = [folder / "whirlwind.warc.gz", folder / "warcio-example.warc", folder / "warcio-post-test.warc.gz"]
    stats = build(tmp_path / "warc", warc, vocabulary, source="warc", sentences="es")
    assert stats["corpus"]["documents_kept"] == 2 and stats["corpus"]["documents_dropped"]["not_html"] == 3


@pytest.mark.parametrize(("name", "encoding"), [("UTF8", "utf-8"), ("Latin1", "latin-1"), ("Cyrillic", "cp1251")])
def test_human_rights_in_many_languages(shared_data, tmp_path, name, encoding):
    with zipfile.ZipFile(shared_data / "text/multilingual/nltk-udhr.zip") as archive:
        archive.extractall(tmp_path / "text", [n for n in archive.namelist() if n.endswith(f"-{name}")])
    stats = build(tmp_path, [tmp_path / "text"], None, source="file", encoding=encoding, sentences="en")
    corpus = stats["corpus"]
    assert corpus["documents_kept"] == {"UTF8": 93, "Latin1": 190, "Cyrillic": 9}[name]
    assert corpus["undecodable_bytes"] < 0.003 * corpus["characters"]


def test_genesis_in_three_encodings(shared_data, tmp_path):
    encodings = {
        "utf-8": ["english-kjv", "english-web", "lolcat", "portuguese"],
        "latin-1": ["finnish", "french", "german"],
        "cp850": ["swedish"],
    }
    for encoding, names in encodings.items():
        folder = tmp_path / encoding
        with zipfile.ZipFile(shared_data / "text/multilingual/nltk-genesis.zip") as archive:
            archive.extractall(folder / "text", [f"genesis/{name}.txt" for name in names])
        mode = "nsp" if len(names) > 1 else "sop"
        stats = build(folder, [folder / "text"], None, source="file", encoding=encoding, keep_lines=True, mode=mode)
        assert stats["corpus"]["documents_kept"] == len(names) and stats["corpus"]["undecodable_bytes"] == 0
    vocabulary = (tmp_path / "cp850/data/tokenizer/vocab.txt").read_text().split("\n")
    assert {"och", "herren"} <= set(vocabulary)


def test_speeches(shared_data, tmp_path):
    with zipfile.ZipFile(shared_data / "text/nltk-inaugural.zip") as archive:
        archive.extractall(tmp_path / "speeches", [n for n in archive.namelist() if n.endswith(".txt")])
    stats = build(tmp_path / "inaugural", [tmp_path / "speeches"], None, source="file", encoding="latin-1")
    assert 55 <= stats["corpus"]["documents_kept"] <= 60


def test_sample_text_of_bert(shared_data, tmp_path):
    """Byte-level BPE of GPT-2 on the sample that comes with google-research/bert."""
    (tmp_path / "encoder.json").write_bytes(gzip.decompress((shared_data / "vocab/gpt2-encoder.json.gz").read_bytes()))
    (tmp_path / "vocab.bpe").write_bytes((shared_data / "vocab/gpt2-roberta-merges.txt").read_bytes())
    stats = build(
        tmp_path / "run",
        [shared_data / "text/google-bert-sample_text.txt"],
        tmp_path / "vocab.bpe",
        source="text",
        sentences="line",
    )
    assert stats["corpus"]["documents_kept"] == 3 and stats["corpus"]["unknown_tokens"] == 0


def test_chinese_and_german_paragraphs(shared_data, tmp_path):
    """Character tokens with the Chinese vocabulary; about five sentences a paragraph; the parts of a pair are whole."""
    for language, vocabulary in {"zh": shared_data / "vocab/bert-base-chinese-vocab.txt", "de": None}.items():
        content = json.loads(gzip.decompress((shared_data / f"xquad/xquad.{language}.json.gz").read_bytes()))
        rows = [{"text": "\n\n".join(p["context"] for p in article["paragraphs"])} for article in content["data"]]
        path = tmp_path / f"{language}.jsonl"
        path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
        stats = build(tmp_path / language, [path], vocabulary, source="jsonl", sentences=language)
        corpus = stats["corpus"]
        assert corpus["documents_kept"] == 48 and 1100 < corpus["sentences"] < 1400
        assert abs(stats["nsp"]["random_share"] - 0.5) < 0.06
        if language == "zh":
            assert stats["continuation_share"] < 0.1 and corpus["unknown_tokens"] < 0.02 * corpus["tokens"]
            assert corpus["tokens"] > 0.6 * corpus["characters"]
