"""Chinese whole-word masking: the words are those of a segmenter, the tokens stay characters."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.assemble_stage import IdPool, make_block
from data_pipeline.build import main
from data_pipeline.config import ConfigError, TokenizerConfig, load_pipeline_config
from data_pipeline.masking import draw_masks, mask_rng, masking_rule
from data_pipeline.pairs import build_pairs
from data_pipeline.records import Document
from data_pipeline.sentences import split_sentences
from data_pipeline.shard_index import ShardIndex
from data_pipeline.tokenize_stage import tokenize_batch
from data_pipeline.tokenizer import Tokenizer, import_tokenizer
from data_pipeline.word_segmenter import _jieba

JIEBA = importlib.util.find_spec("jieba") is not None
needs_jieba = pytest.mark.skipif(not JIEBA, reason="jieba is not installed: pip install -e '.[chinese]'")


@pytest.fixture(scope="module")
def tokenizer(shared_data: Path) -> Tokenizer:
    return import_tokenizer(shared_data / "vocab/bert-base-chinese-vocab.txt", TokenizerConfig())


@pytest.fixture(scope="module")
def articles(shared_data: Path) -> list[str]:
    """The 48 Chinese articles of XQuAD."""
    content = json.loads(gzip.decompress((shared_data / "xquad/xquad.zh.json.gz").read_bytes()))
    return ["\n\n".join(part["context"] for part in article["paragraphs"]) for article in content["data"]]


def write_config(
    folder: Path, vocabulary: object = "", text: str = "一个句子。\n\n另一个句子。\n", **keys: object
) -> Path:
    (folder / "text").mkdir(parents=True)
    (folder / "text/a.txt").write_text(text, encoding="utf-8")
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    path = folder / "config.toml"
    path.write_text(
        f'[corpus]\nsource = "text"\nsentences = "zh"\nheld_out = 0\npaths = ["{folder}/text"]\n[tokenizer]\n'
        f'path = "{vocabulary}"\nvocab_size = 30\n[data]\ndir = "{folder}/data"\nworkers = 1\n' + "\n".join(lines)
    )
    return path


def test_words_of_a_segmenter_are_predicted_whole_or_not_at_all(shared_data: Path, tokenizer: Tokenizer) -> None:
    ids, _ = tokenizer.encode_flat(["我喜欢在北京大学学习自然语言处理技术"])
    words = [1, 2, 1, 4, 2, 4, 2, 2]  # 我 喜欢 在 北京大学 学习 自然语言 处理 技术
    example = np.concatenate([[tokenizer.cls_id], ids, [tokenizer.sep_id]])
    begins = np.zeros(len(example), bool)
    begins[[0, *np.cumsum([1, *words])]] = True
    settings = {"mask_prob": 0.3, "max_predictions": 9, "whole_word": True, "span_masking": False}
    rule, edges = masking_rule(tokenizer, settings), np.cumsum([1, *words])
    together = 0
    for seed in range(30):
        chosen = set(draw_masks(example, np.array([len(example)]), rule, mask_rng(seed), begins).positions.tolist())
        for start, size in zip(edges, words, strict=False):
            word = set(range(start, start + size))
            assert word <= chosen or not word & chosen
            together += size > 1 and word <= chosen
    assert together > 30
    assert not begins.all()  # the caller's array is left alone


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"segmenter": "jieba"}, "data.segmenter.*set one of them"),
        ({"segmenter": "jieba", "whole_word": True, "mask_sets": 0}, "set data.mask_sets to 1 or more"),
        ({"segmenter": "pkuseg", "whole_word": True}, "data.segmenter.*'jieba'"),
    ],
)
def test_a_segmenter_without_work_is_refused(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_pipeline_config(write_config(tmp_path, **keys))


@pytest.mark.skipif(JIEBA, reason="jieba is installed")
def test_a_missing_segmenter_is_told_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(write_config(tmp_path, segmenter="jieba", whole_word=True))]) == 2
    assert "pip install jieba" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@needs_jieba
def test_boundaries_of_real_text(articles: list[str], tokenizer: Tokenizer) -> None:
    """Put together from ids, the text has the words that jieba finds in the original; all characters of a word are one unit."""
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(articles[:12])]
    split = partial(split_sentences, method="zh")
    tokens = tokenize_batch(documents, tokenizer, split, Counter())
    pool = IdPool.of(tokens, tokenizer, "jieba 0")
    begins = pool.begins
    assert begins is not None
    ends = np.cumsum(tokens.sentence_lengths)
    sentences = [sentence for document in documents for sentence in split(document.text)]
    same = total = 0
    for sentence, end, length in zip(sentences, ends, tokens.sentence_lengths, strict=True):
        found: set[str] = set()
        word = ""
        for index, begin in zip(tokens.ids[end - length : end], begins[end - length : end], strict=True):
            if begin and word:
                found.add(word)
                word = ""
            word += tokenizer.tokens[index].removeprefix("##")
        wanted = {w for w in _jieba().cut(sentence) if len(w) > 1 and all("一" <= c <= "鿿" for c in w)}
        same, total = same + len(wanted & (found | {word})), total + len(wanted)
    assert total > 3000 and same > 0.99 * total

    rng = mask_rng(1)
    pairs = build_pairs(
        tokens.sentence_counts, tokens.sentence_lengths, max_seq_length=128, short_seq_prob=0.1, rng=rng
    )
    settings = {"mask_prob": 0.15, "max_predictions": 19, "whole_word": True, "span_masking": False}
    block = make_block(pool, pairs, masking_rule(tokenizer, settings), [rng])
    places, lengths = pool.places(pairs)
    special = np.isin(block.input_ids, [tokenizer.cls_id, tokenizer.sep_id, tokenizer.unk_id])
    starts = begins[places] | special
    starts[1:] |= special[:-1]
    unit = np.cumsum(starts)
    predicted = np.zeros(len(unit), bool)
    predicted[np.repeat(np.cumsum(lengths) - lengths, block.mask_counts[0]) + block.mask_positions] = True
    share = np.bincount(unit, predicted) / np.maximum(1, np.bincount(unit))
    assert set(share.tolist()) == {0.0, 1.0}
    assert (np.bincount(unit)[share == 1] > 1).sum() > 500
    assert abs(predicted.mean() - 0.15) < 0.02


@needs_jieba
def test_a_build_with_words(
    articles: list[str], shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n\n".join(article.replace("\n\n", "\n") for article in articles[:6]) + "\n"
    vocabulary = shared_data / "vocab/bert-base-chinese-vocab.txt"
    shards = {}
    for segmenter in ("", "jieba"):
        config = write_config(tmp_path / f"x{segmenter}", vocabulary, text, segmenter=segmenter, whole_word=True)
        assert main(["--config", str(config)]) == 0
        data = tmp_path / f"x{segmenter}/data"
        stats = json.loads((data / "train/stats.json").read_bytes())
        index = ShardIndex.open(data / "train")
        assert not (segmenter and any("no effect" in warning for warning in stats["warnings"]))
        assert index.info.settings["segmenter"].split(" ")[0] == segmenter
        shards[segmenter] = index.shards[0].sha256
    assert shards[""] != shards["jieba"]
    (tmp_path / "merges.txt").write_bytes((shared_data / "vocab/gpt2-roberta-merges.txt").read_bytes())
    config = write_config(tmp_path / "bytes", tmp_path / "merges.txt", text, segmenter="jieba", whole_word=True)
    assert main(["--config", str(config)]) == 2
    assert "tokens of whole characters" in capsys.readouterr().err and not (tmp_path / "bytes/data/tokens").exists()
