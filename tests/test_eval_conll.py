"""CoNLL-2003: files, tags, score, examples with context, and both ways of using an encoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import import_tokenizer
from eval import feature_model
from eval.conll_data import Sentences, baseline_tags, read_conll, score_tags, spans, to_iob2
from eval.feature_model import FeatureModel
from eval.finetune import epoch_batches, finetune
from eval.frozen_states import FrozenStates
from eval.packing import build_batch, ranges
from eval.predict import predict
from eval.readers import ReadError
from eval.run import main
from eval.score import main as score_main
from eval.source import ModelSource
from eval.tagging import decode_tags, tag_problem
from eval.tasks import NER_FEATURES, TASKS, Recipe, TaskError

LABELS = TASKS["CoNLL"].labels
WORDS = ["peter", "anna", "went", "to", "oslo", "lima", "un", "##o", "the", "cat", "saw", "."]


def test_official_counts_and_the_published_baseline(shared_data: Path) -> None:
    folder = shared_data / "conll2003"
    files = {name: read_conll(folder / name, LABELS) for name in ("eng.train.gz", "eng.testa", "eng.testb")}
    counts = [(len(f), sum(map(len, f.words)), int(f.documents[-1]) + 1) for f in files.values()]
    assert counts == [(14041, 203621, 946), (3250, 51362, 216), (3453, 46435, 231)]
    names = [sum(len(spans(tags)) for tags in f.tags) for f in files.values()]
    assert names == [23499, 5942, 5648]  # table 2 of arXiv cs/0306050
    test = files["eng.testb"]
    scores, details = score_tags(test.tags, baseline_tags(files["eng.train.gz"], test))
    # The baseline of the shared task: precision 71.91, recall 50.90, F1 59.61 (table 5); how it breaks ties is not said.
    found = [100 * scores[name].value for name in ("precision", "recall", "f1")]
    assert found == pytest.approx([71.91, 50.90, 59.61], abs=0.06)
    assert details["PER_total"] == 1617 and details["LOC_total"] == 1668


def test_iob1_and_a_models_mixture_become_iob2() -> None:
    assert to_iob2(["I-PER", "I-PER", "B-PER", "O", "I-LOC", "I-ORG"]) == [
        *("B-PER", "I-PER", "B-PER", "O", "B-LOC", "B-ORG")
    ]
    iob2 = ["B-PER", "I-PER", "O", "B-LOC"]
    assert to_iob2(iob2) == iob2 and spans(iob2) == [(0, 2, "PER"), (3, 4, "LOC")]


def test_score_of_nothing_found() -> None:
    gold = [["B-PER", "O"], ["B-LOC", "I-LOC"]]
    scores, details = score_tags(gold, [["O", "O"], ["O", "O"]])
    assert scores["f1"].value == 0.0 and details["accuracy"] == 0.25
    scores, details = score_tags(gold, [["B-PER", "O"], ["B-LOC", "O"]])
    assert scores["f1"].value == 0.5 and details["PER_f1"] == 1.0 and details["LOC_f1"] == 0.0


@pytest.fixture(scope="module")
def model(write_bert: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"), WORDS, num_hidden_layers=4, max_position_embeddings=64)


def sentences(words: list[str], documents: list[int] | None = None) -> Sentences:
    rows = [row.split() for row in words]
    tags = [["B-PER" if word in ("peter", "anna") else "O" for word in row] for row in rows]
    return Sentences(
        words=rows, tags=tags, documents=np.array(documents or [0] * len(rows)), label_names=LABELS, sha256=""
    )


def test_sentences_of_a_document_share_examples_and_each_word_comes_once(model: Path) -> None:
    tokenizer = import_tokenizer(model, TokenizerConfig())
    data = sentences(["peter saw uno .", "\u200b anna", "the cat", "uno uno uno uno uno uno", "lima"], [0, 0, 1, 1, 1])
    problem = tag_problem(tokenizer, data, 10)
    rows = np.split(problem.encoded.ids, problem.encoded.offsets[1:-1])
    # The third document sentence has 12 pieces: it begins a new example and goes on in another one.
    assert [" ".join(tokenizer.tokens[i] for i in row) for row in rows] == [
        "[CLS] peter saw un ##o . [UNK] anna [SEP]",
        "[CLS] the cat [SEP]",
        "[CLS] un ##o un ##o un ##o un ##o [SEP]",
        "[CLS] un ##o un ##o lima [SEP]",
    ]
    logits = np.zeros((len(problem.encoded.ids), len(LABELS)), dtype=np.float32)
    tagged = problem.tags >= 0
    assert tagged.sum() == sum(map(len, data.words)) == 15
    logits[tagged, problem.tags[tagged]] = 1.0
    assert decode_tags(problem, logits) == data.tags
    assert [tokenizer.tokens[i] for i in problem.encoded.ids[problem.first_pieces]][2:4] == ["un", "."]


@pytest.mark.parametrize("features", NER_FEATURES)
def test_features_are_the_states_they_are_named_after(model: Path, features: str) -> None:
    source = ModelSource(model)
    problem = tag_problem(source.tokenizer, sentences(["peter saw uno anna", "the cat ."], [0, 1]), 16)
    torch.manual_seed(0)
    tagger = FeatureModel(source.encoder(), 9, features).train()
    words = tagger.words(problem)
    batch = build_batch(problem.encoded, np.arange(2))
    arguments = (batch.input_ids_T, batch.segment_ids_T, batch.position_ids_T, batch.cu_seqlens, batch.max_seqlen)
    with torch.no_grad():
        _, states = source.encoder().eval()(*arguments, output_hidden_states=True)
    expected = {
        "embeddings": states[0],
        "second-to-last": states[3],
        "last": states[4],
        "weighted-last-four": torch.stack(states[1:]).mean(0),
        "concat-last-four": torch.cat(states[1:], dim=1),
        "weighted-all": torch.stack(states[1:]).mean(0),
    }[features][problem.first_pieces]
    both = words.batch(np.arange(2))
    assert both.tokens == 7 and torch.allclose(tagger.mix(both.states), expected, atol=1e-5)
    # In either order, the second example alone: the same words.
    assert torch.equal(words.batch(np.array([1, 0])).states[0], both.states[0][[4, 5, 6, 0, 1, 2, 3]])
    tagger(both).square().sum().backward()
    assert all(p.grad is None for p in tagger.encoder.parameters()) and tagger.classifier.weight.grad is not None
    tagger.eval()
    with torch.no_grad():
        whole, alone = tagger(both), tagger(words.batch(np.array([1])))
    assert whole.shape == (7, 9) and torch.allclose(whole[-3:], alone, atol=1e-5)


def test_kept_states_give_the_losses_of_states_computed_anew(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_model, "BILSTM_SIZE", 32)
    monkeypatch.setattr(feature_model, "DROPOUT", 0.0)
    source = ModelSource(model)
    texts = ["peter saw uno .", "anna saw the cat", "the cat went to lima", "uno uno", "peter"]
    problem = tag_problem(source.tokenizer, sentences(texts, [0, 1, 2, 3, 4]), 16)
    recipe, frozen = Recipe(batch_size=2, learning_rate=1e-2, epochs=2), FrozenStates(["weighted-all"])
    runs = [
        finetune(source.encoder(), problem, recipe, seed=1, features="weighted-all", frozen=kept)
        for kept in (frozen, frozen, None)
    ]
    assert runs[0].losses == runs[1].losses == runs[2].losses

    # Plain code: the encoder runs for every batch, and torch's own BiLSTM reads packed sequences.
    torch.manual_seed(1)
    tagger = FeatureModel(source.encoder(), 9, "weighted-all")
    plain = torch.nn.LSTM(32, 16, num_layers=2, bidirectional=True)
    for layer in range(2):
        for ours, suffix in ((tagger.bilstm.forwards, ""), (tagger.bilstm.backwards, "_reverse")):
            for name, tensor in ours[layer].named_parameters():
                getattr(plain, name.replace("l0", f"l{layer}{suffix}")).data.copy_(tensor.data)
    first = epoch_batches(5, 2, 1, 0)[0]
    batch = build_batch(problem.encoded, first)
    arguments = (batch.input_ids_T, batch.segment_ids_T, batch.position_ids_T, batch.cu_seqlens, batch.max_seqlen)
    with torch.no_grad():
        _, states = tagger.encoder.eval()(*arguments, output_hidden_states=True)
        tags = torch.from_numpy(problem.tags[ranges(problem.encoded.offsets[first], problem.encoded.lengths[first])])
        mixed = torch.stack(states[1:]).mean(0)
        rows = [
            part[mask >= 0]
            for part, mask in zip(
                mixed.split(batch.cu_seqlens.diff().tolist()), tags.split(batch.cu_seqlens.diff().tolist()), strict=True
            )
        ]
        packed = torch.nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)
        out = torch.cat(torch.nn.utils.rnn.unpack_sequence(plain(packed)[0]))
        expected = torch.nn.functional.cross_entropy(tagger.classifier(out), tags[tags >= 0])
    assert runs[0].losses[0] == pytest.approx(float(expected), abs=1e-5)
    predicted = predict(runs[0].model, problem)
    assert predicted.shape == (len(problem.encoded.ids), 9) and not predicted[problem.encoded.offsets[:-1]].any()


def test_last_four_needs_four_layers(write_bert: Callable[..., Path], tmp_path: Path) -> None:
    encoder = ModelSource(write_bert(tmp_path, WORDS)).encoder()
    with pytest.raises(TaskError, match="'concat-last-four' need four layers, the encoder has 2"):
        FeatureModel(encoder, 9, "concat-last-four")


def write_conll(path: Path, number: int) -> None:
    rng = np.random.default_rng(number)
    lines = ["-DOCSTART- -X- -X- O", ""]
    for _ in range(number):
        person, place = rng.choice(["peter", "anna"]), rng.choice(["oslo", "lima", "uno"])
        lines += [
            f"{person} NNP I-NP I-PER",
            "saw VB I-VP O",
            "the DT I-NP O",
            f"{place} NNP I-NP I-LOC",
            ". . O O",
            "",
        ]
    path.write_text("\n".join(lines))


@pytest.mark.slow
def test_both_ways_run_as_tasks(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_model, "BILSTM_SIZE", 64)  # the paper's width takes seconds a step on one core
    folder = tmp_path / "conll2003"
    folder.mkdir()
    for name, rows in (("eng.train", 120), ("eng.testa", 20), ("eng.testb", 30)):
        write_conll(folder / name, rows)
    arguments = ["--model", str(model), "--data", str(tmp_path), "--output", str(tmp_path / "out"), "--device", "cpu"]
    fast = ["--max-length", "32", "--batch-size", "2"]
    assert main([*arguments, "--tasks", "conll", *fast, "--learning-rate", "0.005", "--epochs", "4"]) == 0
    frozen_arguments = ["--tasks", "CoNLL-weighted-all", *fast, "--learning-rate", "0.02", "--epochs", "8"]
    assert main([*arguments, *frozen_arguments]) == 0
    summary = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert [group["task"] for group in summary] == ["CoNLL", "CoNLL-weighted-all"]
    tuned, frozen = (group["splits"]["test"] for group in summary)
    assert tuned["n"] == frozen["n"] == 30 and tuned["metrics"]["f1"]["mean"] > 0.95
    assert frozen["metrics"]["f1"]["mean"] > 0.3  # a few steps on a random encoder


def test_score_command_reads_either_spelling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_conll(tmp_path / "gold", 3)
    predicted = (tmp_path / "gold").read_text().replace("I-PER", "B-PER").replace("I-LOC", "O", 1)
    (tmp_path / "predicted").write_text(predicted)
    assert score_main(["conll", str(tmp_path / "gold"), str(tmp_path / "predicted")]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert (scores["precision"], scores["recall"]) == (1.0, pytest.approx(5 / 6)) and scores["LOC_total"] == 3
    (tmp_path / "short").write_text("peter I-PER\n")
    assert score_main(["conll", str(tmp_path / "gold"), str(tmp_path / "short")]) == 2
    assert "short: 1 sentences, expected 3" in capsys.readouterr().err
    (tmp_path / "other").write_text(predicted.replace("saw", "see", 1))
    assert score_main(["conll", str(tmp_path / "gold"), str(tmp_path / "other")]) == 2
    assert "sentence 1 is not the gold file's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("peter\n", "line 1 has one column"),
        ("a b\nc X-Y\n", "line 1 has the tag 'b'"),
        ("\n\n", "no sentence"),
        ("a I-DOG\n", "'I-DOG'"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad").write_text(text)
    with pytest.raises(ReadError, match=message):
        read_conll(tmp_path / "bad", LABELS)
