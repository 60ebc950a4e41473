"""Training a vocabulary: the same bytes each time, bounded sample, nothing dropped silently."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.config import TokenizerConfig
from data_pipeline.text_sample import PIECE_CHARACTERS, TextSample, split_line
from data_pipeline.tokenizer import TokenizerError, load_tokenizer
from data_pipeline.vocabulary import REPORT, train_vocabulary

ROOT = Path(__file__).resolve().parent.parent


def corpus(sentences: int = 400) -> list[str]:
    """Made-up words with many ties between equally frequent pairs."""
    rng = random.Random(3)
    syllables = ["ka", "mi", "to", "re", "su", "no", "eh", "li", "pa", "vü"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(300)]
    return [" ".join(rng.choices(words, k=12)) + "." for _ in range(sentences)]


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(folder.iterdir()))).hexdigest()


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bpe", "byte_bpe"])
def test_r07_ten_trainings_are_byte_identical(kind, tmp_path):
    size = 400 if kind == "byte_bpe" else 200
    config = TokenizerConfig(kind=kind, vocab_size=size)
    digests = set()
    for run in range(8):
        train_vocabulary(corpus(), config, 0, tmp_path / str(run))
        digests.add(digest(tmp_path / str(run)))
    script = (
        "import sys; sys.path.insert(0, 'tests'); from pathlib import Path; import test_data_vocabulary as t; "
        f"t.train_vocabulary(t.corpus(), t.TokenizerConfig(kind={kind!r}, vocab_size={size}), 0, Path(sys.argv[1]))"
    )
    for run in ("8", "9"):  # another process has other hash seeds
        subprocess.run([sys.executable, "-c", script, str(tmp_path / run)], cwd=ROOT, check=True)
        digests.add(digest(tmp_path / run))
    assert len(digests) == 1
    tokenizer = load_tokenizer(tmp_path / "0")
    assert tokenizer.kind == kind and size // 2 < tokenizer.vocab_size <= size
    if kind != "byte_bpe":
        assert tokenizer.tokens[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    ids, _ = tokenizer.encode_flat(corpus(20))
    assert tokenizer.unk_id not in ids


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_r08_long_lines_are_split_not_dropped(kind, tmp_path):
    long_line = " ".join(["zzyzx"] * 900)
    assert len(long_line) == 5399
    config = TokenizerConfig(kind=kind, vocab_size=120)
    report = train_vocabulary([*corpus(), *[long_line] * 3], config, 0, tmp_path / "a")
    assert (report.lines_split, report.lines_skipped, report.line_limit) == (3, 0, PIECE_CHARACTERS)
    ids, _ = load_tokenizer(tmp_path / "a").encode_flat(["zzyzx"])
    assert load_tokenizer(tmp_path / "a").unk_id not in ids
    assert json.loads((tmp_path / "a" / REPORT).read_text())["lines_split"] == 3
    only = train_vocabulary([long_line], config, 0, tmp_path / "b")
    assert only.bytes_skipped == 0 and f"1 lines over {PIECE_CHARACTERS} characters split" in only.message()


def test_r08_overlong_words_are_counted_and_too_many_end_the_training(tmp_path):
    config = TokenizerConfig(vocab_size=120)
    report = train_vocabulary([*corpus(), "x" * 101 + " fine " + "y" * 100], config, 0, tmp_path / "a")
    assert (report.lines_skipped, report.bytes_skipped) == (1, 101)
    with pytest.raises(TokenizerError, match="limit of 100 characters"):
        train_vocabulary(["x" * 101] * 5, config, 0, tmp_path / "b")
    strict = TokenizerConfig(vocab_size=120, max_skipped=0.001)
    with pytest.raises(TokenizerError, match=r"more than the share that tokenizer\.max_skipped = 0\.001 allows"):
        train_vocabulary([*corpus(), "x" * 101], strict, 0, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_r08_sample_is_spread_over_the_corpus(tmp_path):
    lines = corpus(800)
    upper = str.maketrans("aeiokmtrsnhlpvü", "аеиокмтрснхлпвю")
    text = "\n".join(lines + [line.translate(upper) for line in lines])
    half = TokenizerConfig(vocab_size=300, sample_megabytes=len(text.encode()) / 2e6)
    report = train_vocabulary([text], half, 0, tmp_path)
    assert 0.4 < report.bytes_sampled / report.bytes_offered <= 0.5
    tokens = load_tokenizer(tmp_path).tokens
    assert any("а" <= t[-1] <= "я" for t in tokens) and any("a" <= t[-1] <= "z" for t in tokens)


def test_sample_is_bounded_and_a_function_of_the_seed():
    texts = [f"{n} " + "word " * 100 for n in range(500)]
    samples = [TextSample(20_000, seed).extend(iter(texts)).pieces() for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]
    sizes = sum(len(piece) for piece in samples[0])
    assert 19_000 < sizes <= 20_000
    numbers = [int(piece.split()[0]) for piece in samples[0]]
    assert numbers == sorted(numbers) and numbers[0] < 100 and numbers[-1] > 400


def test_split_line_loses_nothing():
    line = "ab " * 5000 + "x" * 9000
    parts = list(split_line(line))
    assert "".join(parts) == line and max(map(len, parts)) <= PIECE_CHARACTERS
    assert all(part.endswith("ab") for part in parts[:3])


def test_nothing_to_train_on(tmp_path):
    for texts in ([], ["", "  \n "]):
        with pytest.raises(TokenizerError, match="nothing to train on"):
            train_vocabulary(texts, TokenizerConfig(), 0, tmp_path / "x")
