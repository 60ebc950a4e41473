"""The WordPiece and SentencePiece backends: normalisation, markers, long words, parity with `tokenizers`."""

from __future__ import annotations

import json
import os
import pickle
import random
import string
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer

from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import TokenizerError, import_tokenizer, load_tokenizer
from data_pipeline.tokenizer_folder import SPECIAL_TOKENS, Normalisation
from data_pipeline.wordpiece import WordPieceTokenizer, _few_cores, rare_characters, wordpiece_pipeline

ROOT = Path(__file__).resolve().parent.parent
UNCASED = Normalisation(lowercase=True, strip_accents=True, split_cjk=True)
KEEP_ACCENTS = Normalisation(lowercase=True, strip_accents=False, split_cjk=True)
CASED = Normalisation(lowercase=False, strip_accents=False, split_cjk=True)
HINDI, THAI = "अपने में", "ที่नी่".replace("ี่", "ี่")
NORMALISATION = {  # R06
    "a\u200db": "ab",
    "a\0b\ufffdc": "abc",
    "co\u00adop": "coop",
    "x\uf059y": "xy",
    "a\u0085b": "ab",
    "a\u2028b": "a b",
    "a\tb\u00a0c\u3000d": "a b c d",
    "\ufeffabc": "abc",
    "\u200b": "",
    "$5+3^2`": "$ 5 + 3 ^ 2 `",
    "BERT模型2": "bert 模 型 2",
}


def fixture_tokenizer(words: str, flags: Normalisation = UNCASED) -> WordPieceTokenizer:
    return WordPieceTokenizer([*SPECIAL_TOKENS, *words.split()], flags)


def encode(tokenizer, text: str) -> list[str]:
    ids, lengths = tokenizer.encode_flat([text])
    assert lengths.tolist() == [len(ids)]
    return [tokenizer.tokens[i] for i in ids]


def rows(tokenizer, texts: list[str]) -> list[list[int]]:
    ids, lengths = tokenizer.encode_flat(texts)
    assert ids.dtype == np.int32 and lengths.dtype == np.int64 and lengths.sum() == len(ids)
    return [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])]


def characters(*texts: str) -> WordPieceTokenizer:
    """A vocabulary of all characters of the texts, so that the ids spell out the normalised text."""
    seen = sorted({c for text in texts for c in text if not c.isspace()})
    return fixture_tokenizer(" ".join(seen + ["##" + c for c in seen]))


def spelled(words: str, flags: Normalisation, text: str) -> str:
    """Normalised text, as the pieces of a character vocabulary spell it."""
    vocabulary = characters(words)
    pieces = encode(WordPieceTokenizer(vocabulary.tokens, flags), text)
    return "".join(p.removeprefix("##") if p.startswith("##") else f" {p}" for p in pieces).strip()


@pytest.mark.parametrize("text, stripped", [("अपने में", "अपन म"), ("ที่นี่", "ทน")])
def test_r01_accent_stripping_is_a_setting_of_its_own(text, stripped, tmp_path):
    both = text + stripped
    assert spelled(both, UNCASED, text) == stripped
    assert spelled(both, KEEP_ACCENTS, text) == text
    assert spelled(both, CASED, text) == text
    tokenizer = WordPieceTokenizer(characters(both).tokens, KEEP_ACCENTS)
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).flags == KEEP_ACCENTS
    evaluation = import_tokenizer(tmp_path, TokenizerConfig())
    assert rows(evaluation, [text]) == rows(tokenizer, [text])
    from transformers import AutoTokenizer

    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert exported(text, add_special_tokens=False)["input_ids"] == rows(tokenizer, [text])[0]


def test_r01_unset_follows_lower_casing_and_removed_marks_are_counted():
    tokenizer = fixture_tokenizer("a")
    assert tokenizer.count_removed_marks(rare_characters(["अपने में", "ที่นี่", "cafe", "café"])) == 3 + 4 + 0 + 1
    assert fixture_tokenizer("a", KEEP_ACCENTS).count_removed_marks("अपने में") == 0


def test_rare_characters_are_those_from_delete_on_in_order_without_lone_surrogates(monkeypatch):
    texts = ["caf\u00e9 \x7f", "\U0001f600~\u4e2d", "a\ud83d", "\ude00 b", ""]
    expected = "\u00e9\x7f\U0001f600\u4e2d"
    assert rare_characters(texts) == expected
    monkeypatch.setattr("data_pipeline.wordpiece._WINDOW", 2)
    assert rare_characters(texts) == expected
    assert rare_characters([]) == ""


def test_ids_are_the_same_where_the_caller_names_the_rare_characters():
    tokenizer = fixture_tokenizer("a")
    texts = ["caf\u00e9 a\x7fa", "a\u0378a", "plain a"]  # U+007F and U+0378 are for the slower encoder
    ids, lengths = tokenizer.encode_flat(texts)
    for rare in (rare_characters(texts), rare_characters([" ".join(texts), "\u00fc\u0379"])):
        same, same_lengths = tokenizer.encode_flat(texts, rare)
        assert same.tolist() == ids.tolist()
        assert same_lengths.tolist() == lengths.tolist()


@pytest.mark.parametrize("locale", ["C.UTF-8", "tr_TR.UTF-8"])
def test_r02_lower_casing_ignores_the_locale(locale):
    script = """
from data_pipeline.tokenizer_folder import Normalisation
from data_pipeline.wordpiece import WordPieceTokenizer
words = "[PAD] [UNK] [CLS] [SEP] [MASK] istanbul isik i\u0307stanbul i\u015fik \u0131\u015f\u0131k".split()
letters = sorted(set("".join(words[5:])))  # with every letter an entry, tokie encodes, otherwise the slow way
words += letters + ["##" + letter for letter in letters]
for strip in (True, False):
    t = WordPieceTokenizer(words, Normalisation(lowercase=True, strip_accents=strip, split_cjk=True))
    print(ascii([t.tokens[i] for i in t.encode_flat(["\u0130STANBUL I\u015eIK"])[0]]))
"""
    environment = {**os.environ, "LC_ALL": locale, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.splitlines() == ["['istanbul', 'isik']", r"['i\u0307stanbul', 'i\u015fik']"]


def test_r03_composed_and_decomposed_agree_with_the_export(tmp_path):
    tokenizer = fixture_tokenizer("cafe ##\u0301 caf caf\u00e9", CASED)
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert encode(tokenizer, composed) == [composed]
    assert encode(tokenizer, decomposed) == ["cafe", "##\u0301"]
    tokenizer.save(tmp_path)
    from transformers import AutoTokenizer

    exported = AutoTokenizer.from_pretrained(tmp_path)
    evaluation = import_tokenizer(tmp_path, TokenizerConfig())
    plain = HFTokenizer.from_file(str(tmp_path / "tokenizer.json"))  # transformers builds its own from the vocabulary
    for text in (composed, decomposed):
        assert exported(text, add_special_tokens=False)["input_ids"] == rows(tokenizer, [text])[0]
        assert rows(evaluation, [text]) == rows(tokenizer, [text])
        assert plain.encode(text, add_special_tokens=False).ids == rows(tokenizer, [text])[0]


def test_r04_markers_in_text_are_text(tmp_path):
    tokenizer = fixture_tokenizer("the cat [ mask ] sat on sep")
    expected = ["the", "[", "mask", "]", "cat", "[", "sep", "]", "on"]
    assert encode(tokenizer, "the [MASK] cat [SEP]on") == expected
    tokenizer.save(tmp_path)
    assert encode(load_tokenizer(tmp_path), "the [MASK] cat [SEP]on") == expected
    from transformers import AutoTokenizer  # the explicit interface for filling masks does know the marker

    exported = AutoTokenizer.from_pretrained(tmp_path)
    ids = exported("the [MASK] [mask]")["input_ids"]
    assert exported.convert_ids_to_tokens(ids) == ["[CLS]", "the", "[MASK]", "[", "mask", "]", "[SEP]"]


def test_r05_word_length_limit():
    tokenizer = fixture_tokenizer("a ##a")
    for length, expected in ((99, 99), (100, 100), (101, 1)):
        pieces = encode(tokenizer, "a" * length)
        assert len(pieces) == expected and (pieces == ["[UNK]"]) == (length == 101)
    # Counted after normalisation: 100 letters with an accent each are 200 code points before it.
    assert len(encode(tokenizer, "a\u0301" * 100)) == 100
    word = "".join(random.Random(0).choices(string.ascii_lowercase, k=100_000))
    assert encode(tokenizer, f"a {word} a") == ["a", "[UNK]", "a"]
    texts = ["a " * 500, "a" * 100, "a" * 101, f"a {word} {word}", "a\u0301" * 100, "a" * 60 + "\x1f" + "a" * 60]
    assert tokenizer.count_overlong_words(texts) == 4


@pytest.mark.parametrize("text", NORMALISATION)
def test_r06_normalisation(text, tmp_path):
    words = "ab abc coop xy a b c d $ 5 + 3 ^ 2 ` bert 模 型"
    tokenizer = fixture_tokenizer(words)
    expected = NORMALISATION[text].split()
    assert encode(tokenizer, text) == expected
    tokenizer.save(tmp_path)
    assert encode(import_tokenizer(tmp_path, TokenizerConfig()), text) == expected  # the evaluation
    from transformers import AutoTokenizer

    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert exported.convert_ids_to_tokens(exported(text, add_special_tokens=False)["input_ids"]) == expected


ALPHABET = (
    string.printable
    + "éÀßİıŞñÅ\u0301\u0327\u200b\u200d\u00ad\u0085\u2028\u00a0\u3000\ufeff\ufffd\uf059\0\x1c\x1f\x7f"
    + "模型中文𠀀豈ひカ한안ตี่अपने“”—…€£¥¿¡·\u2581\U0001f600\U0001f468\u200d\ufe0f\u0661ﬁⅷ①"
)


ANY_POINT = [*range(0xD800), *range(0xE000, 0x30000)]


def adversarial(count: int, seed: int) -> list[str]:
    """Random strings of awkward characters, glued to words, markers and repetitions."""
    rng = random.Random(seed)
    pieces = ["the", "un", "believ", "able", "[MASK]", "[SEP]", "##ing", "a" * 99, "é" * 101, "\u00c5" * 100, "İ" * 60]
    texts = []
    for _ in range(count):
        kind = rng.random()
        if kind < 0.6:
            text = "".join(rng.choices(ALPHABET, k=rng.randint(0, 40)))
        elif kind < 0.8:
            text = "".join(rng.choice([*pieces, *ALPHABET]) for _ in range(rng.randint(1, 12)))
        else:
            text = "".join(map(chr, rng.choices(ANY_POINT, k=rng.randint(1, 20))))
        texts.append(text)
    return texts


def all_flags() -> list[Normalisation]:
    switches = (True, False)
    return [
        Normalisation(lowercase=lower, strip_accents=strip, split_cjk=cjk)
        for lower in switches
        for strip in switches
        for cjk in switches
    ]


def differences(tokens: list[str], flags: Normalisation, texts: list[str]) -> list[str]:
    ours = rows(WordPieceTokenizer(tokens, flags), texts)
    reference = wordpiece_pipeline(tokens, flags).encode_batch(texts, add_special_tokens=False)
    return [text for text, mine, theirs in zip(texts, ours, reference, strict=True) if mine != theirs.ids]


@pytest.fixture(scope="module")
def spelling_vocabulary() -> list[str]:
    """Most characters of the alphabet and some words: few unknown tokens, so that differences show."""
    kept = sorted(c for c in set(ALPHABET.lower() + ALPHABET) if c.isprintable() and not c.isspace())[::2]
    characters = [*kept, *string.ascii_letters]
    words = ["the", "un", "##believ", "##able", "mask", "sep", "##ing"]
    return [*SPECIAL_TOKENS, *dict.fromkeys([*characters, *("##" + c for c in characters), *words])]


@pytest.mark.parametrize("flags", all_flags(), ids=str)
def test_same_ids_as_tokenizers_on_adversarial_text(flags, spelling_vocabulary):
    texts = adversarial(2000, seed=1)
    assert differences(spelling_vocabulary, flags, texts) == []


def test_same_ids_where_entries_lack_their_first_character():
    tokens = [*SPECIAL_TOKENS, "g", "i", "the", "##ing", "##believ", "##a"]
    texts = ["Gi", "gib", "ga", "gai", "kb", "t", "th", "the", "thea", "i\u0307", "gb the"]
    assert differences(tokens, UNCASED, texts) == []


@pytest.mark.slow
@pytest.mark.parametrize("flags", [UNCASED, KEEP_ACCENTS], ids=str)
def test_same_ids_as_tokenizers_on_huge_texts(flags, spelling_vocabulary):
    sizes = (9_000, 40_000, 90_000)
    units = ("x", "x,", "模", "x\u0301", "the ", "the\u200b", "unbelievable [MASK]\u2028", "ab\x1f")
    texts = [
        before + unit * (size // len(unit)) for size in sizes for unit in units for before in ("", "the able " * 900)
    ]
    assert differences(spelling_vocabulary, flags, texts) == []


@pytest.mark.slow
@pytest.mark.parametrize("flags", [UNCASED, CASED], ids=str)
def test_same_ids_as_tokenizers_on_every_assigned_code_point(flags, spelling_vocabulary):
    """`unicode_gaps` lists all code points that the two treat differently; a new version of either may change it.

    Whole planes are unassigned (4 to 13) or private (15, 16): every 61st code point there.
    """
    assigned = [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xF0000)]
    others = [*range(0x40000, 0xE0000, 61), *range(0xF0000, 0x110000, 61)]
    texts = [f"a{chr(point)}b" for point in assigned + others]
    assert [ascii(text) for text in differences(spelling_vocabulary, flags, texts)[:20]] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-base-uncased", "bert-base-cased", "bert-base-chinese"])
def test_same_ids_as_tokenizers_on_100000_texts(name, shared_data):
    flags = UNCASED if name == "bert-base-uncased" else CASED
    path = shared_data / "vocab" / f"{name}-vocab.txt"
    tokens = import_tokenizer(path, TokenizerConfig()).tokens
    assert differences(tokens, flags, adversarial(100_000, seed=len(name))) == []


@cache
def letter_tokenizer() -> WordPieceTokenizer:
    letters = string.ascii_lowercase + string.digits
    return fixture_tokenizer(" ".join([*letters, *("##" + c for c in letters)]))


@given(st.lists(st.text(max_size=60), max_size=8))
@settings(max_examples=60, deadline=None)
def test_any_text_encodes_alone_as_in_a_batch(texts):
    tokenizer = letter_tokenizer()
    assert rows(tokenizer, texts) == [row for text in texts for row in rows(tokenizer, [text])] or not texts


def test_lone_surrogates_and_an_empty_batch():
    tokenizer = fixture_tokenizer("abc a b")
    assert rows(tokenizer, ["a\udc80bc", "b"]) == [[5], [7]]
    ids, lengths = tokenizer.encode_flat([])
    assert len(ids) == len(lengths) == 0


def test_word_starts_and_ordinary_ids():
    tokenizer = fixture_tokenizer("[unused0] un ##able [unused1] ##x")
    assert tokenizer.word_starts.tolist() == [True] * 5 + [True, True, False, True, False]
    assert tokenizer.ordinary_ids.tolist() == [6, 7, 9] and tokenizer.ordinary_ids.dtype == np.int32
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id) == (
        0,
        1,
        2,
        3,
        4,
    )


def test_saved_folder_is_reproducible_pickles_and_notices_edits(tmp_path):
    tokenizer = fixture_tokenizer("the cat")
    for folder in ("one", "two"):
        tokenizer.save(tmp_path / folder)
    names = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert names == ["clozeworks_tokenizer.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]
    assert all((tmp_path / "one" / n).read_bytes() == (tmp_path / "two" / n).read_bytes() for n in names)
    copy = pickle.loads(pickle.dumps(load_tokenizer(tmp_path / "one")))
    assert copy.fingerprint == tokenizer.fingerprint and encode(copy, "The cat") == ["the", "cat"]
    assert WordPieceTokenizer(tokenizer.tokens, CASED).fingerprint != tokenizer.fingerprint
    (tmp_path / "one" / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "cat", "the"]))
    with pytest.raises(TokenizerError, match="edited after it was written"):
        load_tokenizer(tmp_path / "one")
    with pytest.raises(TokenizerError, match="holds no finished tokenizer"):
        load_tokenizer(tmp_path / "three")


def test_import_from_every_form(tmp_path):
    tokenizer = fixture_tokenizer("the cat", CASED)
    tokenizer.save(tmp_path / "ours")
    default = TokenizerConfig()
    assert import_tokenizer(tmp_path / "ours", default).flags == CASED
    assert import_tokenizer(tmp_path / "ours" / "tokenizer.json", default).fingerprint == tokenizer.fingerprint
    (tmp_path / "ours" / "clozeworks_tokenizer.json").unlink()
    assert import_tokenizer(tmp_path / "ours", default).fingerprint == tokenizer.fingerprint
    (tmp_path / "ours" / "tokenizer.json").unlink()
    assert import_tokenizer(tmp_path / "ours", default).fingerprint == tokenizer.fingerprint
    assert import_tokenizer(tmp_path / "ours" / "vocab.txt", default).flags == UNCASED
    cased = TokenizerConfig(lowercase=False)
    assert import_tokenizer(tmp_path / "ours" / "vocab.txt", cased).fingerprint == tokenizer.fingerprint
    with pytest.raises(TokenizerError, match=r"made with lowercase = false, but tokenizer.lowercase is true"):
        import_tokenizer(tmp_path / "ours", TokenizerConfig(lowercase=True))


def test_import_errors_name_file_and_remedy(tmp_path):
    config = TokenizerConfig()
    with pytest.raises(TokenizerError, match="no such file or folder"):
        import_tokenizer(tmp_path / "none.txt", config)
    with pytest.raises(TokenizerError, match=r"expected clozeworks_tokenizer\.json, tokenizer\.json, vocab\.txt"):
        import_tokenizer(tmp_path, config)
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\nthe\n")
    with pytest.raises(TokenizerError, match=r"lacks \[CLS\], \[SEP\], \[MASK\]"):
        import_tokenizer(path, config)
    path.write_text("\n".join([*SPECIAL_TOKENS, "the", "the"]))
    with pytest.raises(TokenizerError, match="'the' occurs twice"):
        import_tokenizer(path, config)
    path.write_text("")
    with pytest.raises(TokenizerError, match="empty"):
        import_tokenizer(path, config)
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps({"model": {"type": "BPE"}, "normalizer": None}))
    with pytest.raises(TokenizerError, match="expected a BPE model with a ByteLevel pre-tokenizer"):
        import_tokenizer(other, config)
    other.write_text(json.dumps({"model": {"type": "WordLevel"}, "normalizer": None}))
    with pytest.raises(TokenizerError, match="expected a WordPiece model"):
        import_tokenizer(other, config)


def test_official_vocabularies_equal_transformers(shared_data):
    from transformers import BertTokenizer

    path = shared_data / "vocab" / "bert-base-uncased-vocab.txt"
    tokenizer = import_tokenizer(path, TokenizerConfig())
    assert tokenizer.vocab_size == 30522 and tokenizer.mask_id == 103
    reference = BertTokenizer({token: index for index, token in enumerate(tokenizer.tokens)})
    text = (shared_data / "text" / "google-bert-sample_text.txt").read_text(encoding="utf-8")
    lines = [*text.split("\n"), *NORMALISATION]
    assert rows(tokenizer, lines) == [reference(line, add_special_tokens=False)["input_ids"] for line in lines]


def test_albert_model_keeps_markers_as_text(shared_data, tmp_path):
    tokenizer = import_tokenizer(shared_data / "vocab" / "albert-v2-spiece.model", TokenizerConfig())
    assert (tokenizer.kind, tokenizer.vocab_size) == ("unigram", 30000)
    assert [tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert encode(tokenizer, "the [MASK] cat") == ["▁the", "▁[", "mask", "]", "▁cat"]
    tokenizer.save(tmp_path)
    from transformers import AutoTokenizer

    exported = AutoTokenizer.from_pretrained(tmp_path)
    text = (shared_data / "text" / "google-bert-sample_text.txt").read_text(encoding="utf-8")
    lines = [*text.split("\n"), "Ünïcödé  ﬁne\u00a0x ", "日本語", "\u200b", "e\u0301", "½ ①"]
    assert rows(tokenizer, lines) == [exported(line, add_special_tokens=False)["input_ids"] for line in lines]
    assert exported.convert_ids_to_tokens(exported("a [MASK]", "b")["input_ids"]) == [
        "[CLS]",
        "▁a",
        "[MASK]",
        "[SEP]",
        "▁b",
        "[SEP]",
    ]
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores can be chosen on Linux only")
def test_one_thread_is_one_core_for_the_encoder(monkeypatch):
    before = os.sched_getaffinity(0)
    for threads, cores in (("1", 1), ("2", len(before))):
        monkeypatch.setenv("RAYON_NUM_THREADS", threads)
        with _few_cores():
            assert len(os.sched_getaffinity(0)) == cores
        assert os.sched_getaffinity(0) == before
