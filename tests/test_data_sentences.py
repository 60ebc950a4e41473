"""Splitting a text into sentences."""

from __future__ import annotations

import pytest

from data_pipeline.sentences import split_sentences


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


@pytest.mark.parametrize("method", ["punkt", "line"])
def test_no_empty_sentences_and_no_text_lost(method):
    text = "  \n\nFirst one here.  Second!\n \n\tThird?\n"
    parts = split_sentences(text, method)
    assert all(part and part == part.strip() for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert split_sentences(" \n\r\n", method) == []


def test_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"expected 'punkt' or 'line'"):
        split_sentences("a", "other")
