"""SentencePiece models from elsewhere: byte fallback, missing special tokens, decomposed text; ids as `transformers` has them."""

from __future__ import annotations

import gzip
import io
import json
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import Tokenizer, TokenizerError, import_tokenizer, load_tokenizer

SCRIPTS = (
    "Vietnamese_Quocngu",
    "Korean_Hankuko",
    "Thai",
    "Hindi",
    "Arabic_Alarabia",
    "Greek_Ellinika",
    "Japanese_Nihongo",
)


@pytest.fixture(scope="module")
def lines(shared_data: Path) -> list[str]:
    """English, and the Declaration of Human Rights in six languages, composed and decomposed."""
    english = gzip.decompress((shared_data / "text/gutenberg/84-frankenstein.txt.gz").read_bytes()).decode("utf-8-sig")
    found = english.split("\r\n")[:1500]
    with zipfile.ZipFile(shared_data / "text/multilingual/nltk-udhr.zip") as archive:
        for name in archive.namelist():
            if name.endswith("-UTF8") and any(script in name for script in SCRIPTS):
                text = archive.read(name).decode("utf-8", "replace").split("\n")
                found += [*text[:40], *(unicodedata.normalize("NFD", line) for line in text[:40])]
    assert len(found) > 1800
    return found


def train(folder: Path, lines: list[str], kind: str, byte_fallback: bool) -> Path:
    """A model as other people train them: `<unk>`, `<s>`, `</s>` and nothing else."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type=kind,
        vocab_size=1500,
        byte_fallback=byte_fallback,
        character_coverage=0.98,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "m.model").write_bytes(model.getvalue())
    return folder / "m.model"


def rows(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    ids, lengths = tokenizer.encode_flat(texts)
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


@pytest.mark.parametrize(
    ("kind", "byte_fallback", "lowercase"), [("unigram", True, False), ("bpe", True, True), ("unigram", False, True)]
)
def test_models_with_byte_fallback_and_decomposed_text(tmp_path, lines, kind, byte_fallback, lowercase):
    from transformers import AutoTokenizer

    path = train(tmp_path, lines, kind, byte_fallback)
    tokenizer = import_tokenizer(path, TokenizerConfig(lowercase=lowercase))
    tokenizer.save(tmp_path / "saved")
    exported = AutoTokenizer.from_pretrained(tmp_path / "saved")
    texts = [
        *lines[::3],
        "a😀b 😀😀 c",
        "\u200b",
        "½ ①ﬁ",
        "\u0001x\x7f",
        "ab\x00c",
        "x" * 300 + "ﷺ",
        "e\u0300\u0302 \u01a1\u0323",
    ]
    found = rows(tokenizer, texts)
    assert found == [exported(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert load_tokenizer(tmp_path / "saved").fingerprint == tokenizer.fingerprint
    composed = [unicodedata.normalize("NFC", text) for text in lines[1500:]]
    assert rows(tokenizer, composed) == rows(tokenizer, lines[1500:])
    if not lowercase:  # text that needs no preparation has the ids of the model itself
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        assert rows(tokenizer, composed) == model.encode(composed, out_type=int)

    known = [tokenizer.tokens[i] for i in (tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)]
    assert known == ["[PAD]", "<s>", "</s>", "[MASK]"] and tokenizer.mask_id == tokenizer.vocab_size - 1
    assert exported("a [MASK]", "the").tokens() == ["<s>", "▁a", "[MASK]", "</s>", "▁the", "</s>"]
    assert tokenizer.mask_id not in tokenizer.encode_flat(["a [MASK] <s>"])[0]  # markers in a text are text
    unknown = sum(row.count(tokenizer.unk_id) for row in found)
    assert (unknown == 0) == byte_fallback
    if kind == "unigram":  # what `transformers` writes is read as well, with the same ids
        from_json = import_tokenizer(tmp_path / "saved/tokenizer.json", TokenizerConfig())
        assert (from_json.tokens, from_json.flags) == (tokenizer.tokens, tokenizer.flags)
        assert rows(from_json, texts) == found and from_json.mask_id == tokenizer.mask_id
    if byte_fallback:
        assert (
            tokenizer.decode(tokenizer.encode_flat(["a😀b"])[0])
            == "a😀b"
            == exported.decode(exported("a😀b", add_special_tokens=False)["input_ids"])
        )
        bytes_ = [i for i, token in enumerate(tokenizer.tokens) if token.startswith("<0x")]
        assert len(bytes_) == 256 and not tokenizer.word_starts[bytes_].any()
        assert not np.isin(bytes_, tokenizer.ordinary_ids).any()


def test_published_model_as_tokenizer_json(tmp_path, shared_data):
    """ALBERT as `tokenizer.json`; a step that SentencePiece does not have is refused by name."""
    model = import_tokenizer(shared_data / "vocab/albert-v2-spiece.model", TokenizerConfig())
    model.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    texts = (shared_data / "text/google-bert-sample_text.txt").read_text(encoding="utf-8").split("\n")
    assert rows(import_tokenizer(path, TokenizerConfig()), texts) == rows(model, texts)
    with pytest.raises(TokenizerError, match=r"made with lowercase = true, but tokenizer\.lowercase is false"):
        import_tokenizer(path, TokenizerConfig(lowercase=False))
    content = json.loads(path.read_bytes())
    content["normalizer"]["normalizers"].insert(0, {"type": "Replace", "pattern": {"String": "``"}, "content": '"'})
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=r"a step Replace of a string.*import the \.model file"):
        import_tokenizer(path, TokenizerConfig())
