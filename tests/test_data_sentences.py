"""Splitting a text into sentences."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import nupunkt
import pytest

from data_pipeline.config import ConfigError, CorpusConfig, validate
from data_pipeline.punkt import RememberingPunkt
from data_pipeline.sentences import _by_windows, split_sentences


def test_r14_only_lf_and_crlf_end_a_line():
    text = "one\u2028two\nthree\vfour\r\nfive\u0085six\u001cseven"
    assert split_sentences(text, "line") == ["one\u2028two", "three\vfour", "five\u0085six\u001cseven"]


def test_punkt_knows_abbreviations_and_keeps_paragraphs_apart():
    text = "A heading\n\nDr. Smith came at 3.5 p.m. on\nMonday. He left, e.g. by train.\r\n\r\nThe end"
    assert split_sentences(text, "punkt") == [
        "A heading",
        "Dr. Smith came at 3.5 p.m. on\nMonday.",
        "He left, e.g. by train.",
        "The end",
    ]


@pytest.mark.parametrize("method", ["punkt", "line", "en", "zh"])
def test_no_empty_sentences_and_no_text_lost(method):
    text = "  \n\nFirst one here.  Second!\n \n\tThird?\n"
    parts = split_sentences(text, method)
    assert all(part and part == part.strip() for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert split_sentences(" \n\r\n", method) == []


def contexts(shared_data: Path, language: str) -> list[str]:
    """The 240 paragraphs of Wikipedia that XQuAD translates."""
    content = json.loads(gzip.decompress((shared_data / f"xquad/xquad.{language}.json.gz").read_bytes()))
    return [paragraph["context"] for article in content["data"] for paragraph in article["paragraphs"]]


@pytest.mark.parametrize(("method", "language"), [("punkt", "en"), ("de", "de"), ("zh", "zh"), ("ru", "ru")])
def test_paragraphs_of_wikipedia_in_several_languages(shared_data, method, language):
    """The translations hold the same sentences: about 5 a paragraph, each with an end."""
    paragraphs = contexts(shared_data, language)
    found = [split_sentences(text, method) for text in paragraphs]
    sentences = [sentence for parts in found for sentence in parts]
    assert 1100 < len(sentences) < 1400
    assert sum(s[-1] in '.!?。！？”"»)' for s in sentences) > 0.98 * len(sentences)
    for text, parts in zip(paragraphs, found, strict=True):
        assert "".join("".join(parts).split()) == "".join(text.split())
    if language == "zh":
        assert found[0][0].endswith("四次入选职业碗。") and max(len(parts) for parts in found) > 8


def test_abbreviations_of_german():
    text = "Er kam am 3. Mai 1914 z. B. nach Prag. Dr. Müller war da. „Was ist?“ fragte er. Das ist alles."
    assert split_sentences(text, "de") == [
        "Er kam am 3. Mai 1914 z. B. nach Prag.",
        "Dr. Müller war da.",
        "„Was ist?“ fragte er.",
        "Das ist alles.",
    ]


@pytest.mark.parametrize("method", ["punkt", "de"])
def test_kept_lines_end_sentences(method):
    verse = "Wer reitet so spät durch Nacht und Wind?\nEs ist der Vater mit seinem Kind;\nEr hat\n\nIhn."
    assert split_sentences(verse, method, keep_lines=True) == [line for line in verse.split("\n") if line]
    assert len(split_sentences(verse, method)) == 3


def test_english_sentences_are_those_of_nupunkt(shared_data):
    plain = nupunkt.load("default")
    if nupunkt.__version__ != "0.8.0":
        pytest.skip("other versions of nupunkt split with their own code")
    fast = RememberingPunkt(plain.parameters)
    novel = gzip.decompress((shared_data / "text/gutenberg/1661-sherlock-holmes.txt.gz").read_bytes()).decode()[
        :200_000
    ]
    assert fast.tokenize(novel) == plain.tokenize(novel)
    marks = [*".!?…”’\"')]*»“(-,: \n\t\x1c\x85", "...", ". .", "--", "\n\n", " ", " ", ". ", "! "]
    words = [
        "Mr",
        "U.S",
        "e.g",
        "house",
        "He",
        "the",
        "A",
        "I",
        "3",
        "3.5",
        "IV",
        "x",
        "No",
        "p",
        "don't",
        "mid-jan",
        "É",
        "中",
    ]
    pairs = sorted(plain.parameters.collocations)
    words += sorted(plain.parameters.abbrev_types)[::40] + [word for pair in pairs for word in pair]
    rng = random.Random(5)
    ends = [".", ".", "!", "?", ".”", "..", "…", ". .", ".--", "?)", ".,"]
    for number in range(1500):
        if number % 3 == 0:
            parts = [rng.choice(marks if rng.random() < 0.6 else words) for _ in range(rng.randint(1, 60))]
        elif number % 3 == 1:
            parts = [rng.choice(words) + rng.choice(ends) + rng.choice(["", " ", " ", "\n\n"]) for _ in range(20)]
        else:  # pairs that belong together, and numbers
            parts = [
                f"{rng.choice(['3', '14', first])}{rng.choice(ends)} {rng.choice([second, 'he'])} "
                for first, second in rng.choices(pairs, k=10)
            ]
        assert fast.tokenize("".join(parts)) == plain.tokenize("".join(parts)), repr("".join(parts))


@pytest.mark.parametrize("window", [700, 5000])
def test_long_text_is_split_in_parts_as_in_one(shared_data, window):
    novel = gzip.decompress((shared_data / "text/gutenberg/1661-sherlock-holmes.txt.gz").read_bytes()).decode()[:60_000]
    marks = [*".!?…”\"') -\n\t", ". ", "! ", ".--", "IV. ", "1) ", " I ", " Mr", " house", " He", "\n\n"]
    noise = "".join(random.Random(window).choices(marks, k=20_000))
    for text in (novel, " ".join(novel.split()), noise, "a" * 3000 + ". B" + "c" * 3000):
        assert list(_by_windows(text, window, margin=200)) == nupunkt.load("default").tokenize(text)


def test_unknown_method_is_refused():
    with pytest.raises(ConfigError, match=r"sentences"):
        validate(CorpusConfig, {"sentences": "pnkt"}, "x.toml")
    with pytest.raises(ValueError, match=r"expected 'punkt', 'line' or a language code"):
        split_sentences("a", "other")
