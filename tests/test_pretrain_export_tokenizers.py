"""The tokenizer inside an exported folder: reloaded with no arguments, it gives the ids of the data pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import Tokenizer, import_tokenizer, load_tokenizer
from data_pipeline.tokenizer_folder import SPECIAL_TOKENS, Normalisation
from data_pipeline.vocabulary import train_vocabulary
from data_pipeline.wordpiece import WordPieceTokenizer
from pretrain.encoder import BertForPreTraining
from pretrain.export import RECORD, export_to_hf
from pretrain.fill_mask import fill_mask
from pretrain.hf_import import import_from_hf
from pretrain.model_config import load_encoder_config

SMALL = {"layers": 1, "hidden": 16, "heads": 2, "intermediate": 32, "max_positions": 40}
ALBERT = {"architecture": "albert", "embedding_size": 8, "share_layers": True, "sentence_objective": "sop"}
# The normalisation examples of R01 to R06 and the kinds around them.
TEXTS = [
    "Hello hello",
    "अपने में",
    "ที่นี่",
    "\u0130STANBUL I\u015eIK",
    "caf\u00e9 cafe\u0301",
    "a\u200db",
    "a\0b\ufffdc",
    "co\u00adop",
    "x\uf059y",
    "a\u0085b",
    "a\u2028b",
    "a\tb\u00a0c\u3000d",
    "\ufeffabc",
    "\u200b",
    "$5+3^2`",
    "BERT模型2",
    "½ ① ﬁne  two  spaces ",
    "a" * 101,
    "",
]
CORPUS = ["low lower lowest new newer newest wide wider widest and hello hello there", "a b c d e cafe fine two spaces"]


def exported(tokenizer: Tokenizer, folder: Path, **table) -> Path:
    """The folder of a random model with this tokenizer."""
    tokenizer.save(folder / "tokenizer")
    torch.manual_seed(0)
    config = load_encoder_config({**SMALL, **table}).with_vocabulary(tokenizer.vocab_size, tokenizer.pad_id)
    return export_to_hf(BertForPreTraining(config).eval(), folder / "tokenizer", folder / "export")


def assert_same_ids(folder: Path, tokenizer: Tokenizer) -> None:
    reloaded = transformers.AutoTokenizer.from_pretrained(folder)
    bare = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))  # as programs without transformers read it
    for text in TEXTS:
        own = tokenizer.encode_flat([text])[0].tolist()
        assert bare.encode(text, add_special_tokens=False).ids == own, ascii(text)
        assert reloaded(text, add_special_tokens=False)["input_ids"] == own, ascii(text)
        assert reloaded(text)["input_ids"] == [tokenizer.cls_id, *own, tokenizer.sep_id], ascii(text)


@pytest.mark.parametrize("padding_first", [True, False])
@pytest.mark.parametrize("lowercase, strip_accents", [(False, False), (True, True), (True, False)])
def test_r43_reloaded_wordpiece_keeps_case_accents_and_ids(tmp_path, lowercase, strip_accents, padding_first):
    specials = list(SPECIAL_TOKENS) if padding_first else ["hello", *SPECIAL_TOKENS]
    letters = sorted({c for text in TEXTS for c in text + text.lower() if c.isprintable() and not c.isspace()})
    words = ["hello", "Hello", "##ello", *letters, *("##" + letter for letter in letters)]
    flags = Normalisation(lowercase=lowercase, strip_accents=strip_accents, split_cjk=True)
    tokenizer = WordPieceTokenizer(list(dict.fromkeys([*specials, *words])), flags)
    folder = exported(tokenizer, tmp_path)
    assert_same_ids(folder, tokenizer)
    reloaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert reloaded.tokenize("Hello hello") == (["hello"] * 2 if lowercase else ["Hello", "hello"])
    assert reloaded.model_max_length == 40
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["do_lower_case"], settings["strip_accents"]) == (lowercase, strip_accents)
    assert settings["tokenize_chinese_chars"] is True
    content = json.loads((folder / "config.json").read_text())
    assert (content["pad_token_id"], content["cls_token_id"], content["sep_token_id"]) == (
        tokenizer.pad_id,
        tokenizer.cls_id,
        tokenizer.sep_id,
    )
    ids = [getattr(reloaded, f"{name}_token_id") for name in ("pad", "unk", "cls", "sep", "mask")]
    first = 0 if padding_first else 1
    assert ids == [first, first + 1, first + 2, first + 3, first + 4]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_r43_a_trained_sentencepiece_model_is_exported_with_its_ids(tmp_path, kind):
    settings = TokenizerConfig(kind=kind, vocab_size=60, lowercase=False)
    train_vocabulary(CORPUS * 20, settings, 1, tmp_path / "trained")
    tokenizer = load_tokenizer(tmp_path / "trained")
    folder = exported(tokenizer, tmp_path, **ALBERT)
    assert_same_ids(folder, tokenizer)
    assert (folder / "spiece.model").read_bytes() == (tmp_path / "tokenizer" / "spiece.model").read_bytes()
    assert load_tokenizer(folder).fingerprint == tokenizer.fingerprint
    assert json.loads((folder / RECORD).read_text())["tokenizer"] == tokenizer.fingerprint
    (found,) = fill_mask(import_from_hf(folder).model, load_tokenizer(folder), "low [MASK] newest", top=3)
    assert len(found) == 3


def test_r43_byte_level_bpe_is_exported_with_its_ids(tmp_path):
    train_vocabulary(CORPUS * 20, TokenizerConfig(kind="byte_bpe", vocab_size=300), 1, tmp_path / "trained")
    tokenizer = load_tokenizer(tmp_path / "trained")
    table = {"architecture": "roberta", "type_vocab": 1, "sentence_objective": "none"}
    folder = exported(tokenizer, tmp_path, position_offset=tokenizer.pad_id + 1, **table)
    assert_same_ids(folder, tokenizer)
    assert load_tokenizer(folder).fingerprint == tokenizer.fingerprint


def test_r43_the_published_albert_vocabulary_is_exported_with_its_ids(tmp_path, shared_data):
    tokenizer = import_tokenizer(shared_data / "vocab" / "albert-v2-spiece.model", TokenizerConfig())
    folder = exported(tokenizer, tmp_path, **ALBERT)
    assert_same_ids(folder, tokenizer)
    reloaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert reloaded.model_max_length == 40
    pair = reloaded("the cat", "a fox")
    assert reloaded.convert_ids_to_tokens(pair["input_ids"]) == [
        "[CLS]",
        "▁the",
        "▁cat",
        "[SEP]",
        "▁a",
        "▁fox",
        "[SEP]",
    ]
    assert pair["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
