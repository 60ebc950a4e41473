"""Byte-level BPE: ids of GPT-2 and RoBERTa, import, training, markers, export."""

from __future__ import annotations

import gzip
import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, GPT2Tokenizer, RobertaTokenizer

from data_pipeline.byte_bpe import SPECIAL_NAMES, ByteBPETokenizer
from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import TokenizerError, import_tokenizer, load_tokenizer
from data_pipeline.tokenizer_folder import Normalisation
from data_pipeline.vocabulary import train_vocabulary

AS_IS = Normalisation(lowercase=False, strip_accents=False, split_cjk=False)
ODD = [
    "",
    " ",
    "a",
    "Don't stop!",
    "BERT模型2",
    "e\u0301é",
    "😀👍🏽",
    "a\u00a0b\u200bc",
    "x\tyy  z",
    "अपने में",
    "\x00\x7f",
    "<mask> [SEP]",
]


@pytest.fixture(scope="module")
def gpt2(shared_data, tmp_path_factory) -> Path:
    """A folder with GPT-2's files under the names of its authors."""
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "encoder.json").write_bytes(gzip.decompress((shared_data / "vocab/gpt2-encoder.json.gz").read_bytes()))
    (folder / "vocab.bpe").write_bytes((shared_data / "vocab/gpt2-roberta-merges.txt").read_bytes())
    return folder


@pytest.fixture(scope="module")
def tokenizer(gpt2) -> ByteBPETokenizer:
    found = import_tokenizer(gpt2, TokenizerConfig())
    assert isinstance(found, ByteBPETokenizer)
    return found


def rows(tokenizer, texts: list[str]) -> list[list[int]]:
    ids, lengths = tokenizer.encode_flat(texts)
    assert ids.dtype == np.int32 and lengths.dtype == np.int64 and lengths.sum() == len(ids)
    return [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])]


def strings(shared_data: Path, count: int) -> list[str]:
    """Real sentences in six languages and random strings over odd characters."""
    rng = random.Random(1)
    real = []
    for language in ("en", "de", "zh", "ar", "hi", "ru"):
        content = json.loads(gzip.decompress((shared_data / f"xquad/xquad.{language}.json.gz").read_bytes()))
        real += [p["context"] for article in content["data"] for p in article["paragraphs"]][:50]
    alphabet = "aBz 09.,'!-éß模कไ😀\u0301\u200d\t\u00a0" + "".join(map(chr, range(33, 127)))
    return ODD + real + ["".join(rng.choices(alphabet, k=rng.randint(1, 60))) for _ in range(count)]


def test_ids_are_those_of_transformers(gpt2, tokenizer, shared_data):
    vocab = json.loads((gpt2 / "encoder.json").read_text())
    merges = [tuple(line.split(" ")) for line in (gpt2 / "vocab.bpe").read_text().split("\n")[1:-1]]
    texts = [text for text in strings(shared_data, 2000) if text.strip() and "<" not in text and "\n" not in text]
    ours = rows(tokenizer, texts)
    theirs = GPT2Tokenizer(vocab=vocab, merges=merges, add_prefix_space=True)
    assert ours == theirs(texts, add_special_tokens=False)["input_ids"]
    with_special = tokenizer.tokens
    roberta = RobertaTokenizer(
        vocab={token: i for i, token in enumerate(with_special)}, merges=merges, add_prefix_space=True
    )
    assert ours == roberta(texts, add_special_tokens=False)["input_ids"]


def test_vocabulary_and_special_tokens(gpt2, tokenizer):
    assert tokenizer.vocab_size == 50257 + 5 and tokenizer.tokens[50257:] == list(SPECIAL_NAMES.values())
    assert not {tokenizer.mask_id, tokenizer.pad_id, 50256} & set(tokenizer.ordinary_ids.tolist())
    assert len(tokenizer.ordinary_ids) == 50256
    (ids,) = rows(tokenizer, ["Unbelievable, isn't it?"])
    pieces = [tokenizer.tokens[i] for i in ids]
    assert pieces == ["ĠUn", "bel", "iev", "able", ",", "Ġisn", "'t", "Ġit", "?"]
    assert tokenizer.word_starts[ids].tolist() == [True, False, False, False, False, True, False, True, False]
    assert tokenizer.word_starts[[tokenizer.cls_id, tokenizer.mask_id]].all()
    assert tokenizer.decode([tokenizer.cls_id, *ids, tokenizer.mask_id]) == "<s> Unbelievable, isn't it? <mask>"
    assert pickle.loads(pickle.dumps(tokenizer)).fingerprint == tokenizer.fingerprint
    bare = import_tokenizer(gpt2 / "vocab.bpe", TokenizerConfig())
    assert bare.fingerprint == tokenizer.fingerprint  # with the JSON beside it


def test_merges_alone_number_as_gpt2_does(shared_data, tokenizer):
    alone = import_tokenizer(shared_data / "vocab/gpt2-roberta-merges.txt", TokenizerConfig())
    assert alone.tokens[:50256] == tokenizer.tokens[:50256] and alone.vocab_size == 50261
    assert rows(alone, ODD) == rows(tokenizer, ODD)


def test_r04_markers_are_ordinary_text(tokenizer):
    ids, _ = tokenizer.encode_flat(["the <mask> cat </s>on <|endoftext|> [MASK]"])
    assert not {*ids.tolist()} & {tokenizer.mask_id, tokenizer.sep_id, 50256}
    assert tokenizer.decode(ids) == "the <mask> cat </s>on <|endoftext|> [MASK]"


def test_line_breaks_are_spaces_and_blank_text_is_nothing(tokenizer):
    assert rows(tokenizer, ["one\ntwo", "one  \r\n  two"]) == rows(tokenizer, ["one two", "one two"])
    assert rows(tokenizer, [" \n ", "\u3000", ""]) == [[], [], []]
    assert rows(tokenizer, ["a\ud800b"]) == rows(tokenizer, ["a\ufffdb"])


@pytest.mark.parametrize("lowercase", [None, True])
def test_training_saving_and_loading(lowercase, tmp_path, shared_data):
    texts = strings(shared_data, 0)
    settings = {} if lowercase is None else {"lowercase": lowercase}
    config = TokenizerConfig(kind="byte_bpe", vocab_size=1000, **settings)
    report = train_vocabulary(texts, config, 0, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == report.vocab_size == 1000 and tokenizer.fingerprint == report.fingerprint
    assert tokenizer.tokens[:5] == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    assert tokenizer.flags == Normalisation(lowercase=bool(lowercase), strip_accents=bool(lowercase), split_cjk=False)
    assert any("A" <= c <= "Z" for token in tokenizer.tokens[261:] for c in token) != bool(lowercase)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    plain = [text for text in texts if text.strip() and "<" not in text][:60]
    found = exported(plain)["input_ids"]
    assert found == [[tokenizer.cls_id, *row, tokenizer.sep_id] for row in rows(tokenizer, plain)]
    assert exported("a <mask>")["input_ids"][-2] == tokenizer.mask_id
    again = import_tokenizer(tmp_path / "tokenizer.json", config)
    assert again.fingerprint == tokenizer.fingerprint


def test_files_that_do_not_fit_are_refused(gpt2, tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(TokenizerError, match=r"vocab\.json: expected a JSON object of tokens with the ids 0, 1, 2"):
        import_tokenizer(tmp_path, TokenizerConfig())
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    with pytest.raises(TokenizerError, match="254 of the 256 bytes have no entry"):
        import_tokenizer(tmp_path, TokenizerConfig())
    (tmp_path / "vocab.json").write_bytes((gpt2 / "encoder.json").read_bytes())
    (tmp_path / "merges.txt").write_text("q qq qqq\n")
    with pytest.raises(TokenizerError, match=r"merges\.txt: line 1: expected two tokens"):
        import_tokenizer(tmp_path, TokenizerConfig())
    (tmp_path / "merges.txt").write_text("Ġq zzzq\n")
    with pytest.raises(TokenizerError, match="does not fit the vocabulary"):
        import_tokenizer(tmp_path, TokenizerConfig())
    with pytest.raises(TokenizerError, match="needs 261 or more"):
        train_vocabulary(["some text"], TokenizerConfig(kind="byte_bpe", vocab_size=100), 0, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(TokenizerError, match="occurs twice"):
        ByteBPETokenizer(["a", "a"], [], AS_IS)
