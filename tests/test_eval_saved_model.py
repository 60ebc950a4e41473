"""Fine-tuned models as Hugging Face folders: `transformers` gives the same logits, and scoring them again the same scores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import import_tokenizer
from eval.model import TaskModel
from eval.packing import encode_examples
from eval.predict import predict
from eval.problems import ClassProblem
from eval.run import main
from eval.saved_model import check_savable, save_fine_tuned
from eval.source import ModelSource
from eval.tasks import TASKS, TaskError
from pretrain.encoder import BertForPreTraining
from pretrain.export import export_to_hf
from pretrain.model_config import EncoderConfig

WORDS = ["the", "a", "film", "it", "was", "good", "bad"]
TEXTS = ["the film was good", "a bad film", "it was a good good film"]
SIZES = {"layers": 2, "hidden": 32, "heads": 2, "intermediate": 64, "max_positions": 40, "initializer_range": 0.2}
FAMILIES = {
    "bert": {},
    "roberta": {"type_vocab": 1, "position_offset": 1, "sentence_objective": "none"},
    "albert": {"share_layers": True, "embedding_size": 16, "sentence_objective": "sop"},
    "distilbert": {"type_vocab": 0, "sentence_objective": "none"},
}
HEADS = {
    "MNLI": ("SequenceClassification", 3, TASKS["MNLI"].labels),
    "STS-B": ("SequenceClassification", 1, ()),
    "SQuAD1.1": ("QuestionAnswering", 2, ()),
    "SWAG": ("MultipleChoice", 1, ()),
    "CoNLL": ("TokenClassification", 9, TASKS["CoNLL"].labels),
}


@pytest.fixture(scope="module")
def sources(write_bert: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSource]:
    """A random encoder of each architecture, exported."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = import_tokenizer(write_bert(root / "vocabulary", WORDS), TokenizerConfig())
    tokenizer.save(root / "tokenizer")
    found = {}
    for family, changes in FAMILIES.items():
        torch.manual_seed(0)
        table = SIZES | {"vocab_size": tokenizer.vocab_size, "architecture": family} | changes
        model = BertForPreTraining(EncoderConfig(**table)).eval()
        found[family] = ModelSource(export_to_hf(model, root / "tokenizer", root / family))
    return found


@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_gives_the_same_logits(
    sources: dict[str, ModelSource], family: str, task: str, tmp_path: Path
) -> None:
    source, (kind, outputs, names) = sources[family], HEADS[task]
    per_token = kind in ("QuestionAnswering", "TokenClassification")
    if family == "distilbert" and not per_token:
        with pytest.raises(TaskError, match="DistilBERT's head there has ReLU"):
            check_savable(source, TASKS[task])
        return
    torch.manual_seed(1)
    model = TaskModel(source.encoder(), outputs, per_token=per_token).eval()
    save_fine_tuned(model, source, TASKS[task], names, tmp_path / "model")
    encoded = encode_examples(source.tokenizer, TEXTS, None, 40)
    problem = ClassProblem(encoded=encoded, labels=None, outputs=outputs, per_token=per_token)
    ours = predict(model, problem)
    theirs = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(tmp_path / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    real = batch["attention_mask"].bool()
    assert batch["input_ids"][real].tolist() == encoded.ids.tolist()
    with torch.no_grad():
        if kind == "MultipleChoice":
            logits = theirs(**{name: rows[None] for name, rows in batch.items()}).logits[0][:, None]
        else:
            output = theirs(**batch)
            logits = torch.stack([output.start_logits, output.end_logits], -1) if task == "SQuAD1.1" else output.logits
    assert np.abs(ours).max() > 0.05
    assert (logits[real] if per_token else logits).numpy() == pytest.approx(ours, abs=1e-5)
    if names:
        assert [theirs.config.id2label[number] for number in range(outputs)] == list(names)


def test_a_saved_model_is_scored_again(sources: dict[str, ModelSource], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "RTE").mkdir()
    for split, rows in (("train", 64), ("dev", 30)):
        lines = ["index\tsentence1\tsentence2\tlabel"]
        for n, label in enumerate(rng.integers(0, 2, rows)):
            text = " ".join([*rng.choice(WORDS[:5], 3), ["bad", "good"][label]])
            lines.append(f"{n}\tthe film\t{text}\t{['not_entailment', 'entailment'][label]}")
        (tmp_path / "RTE" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    for family in ("bert", "roberta"):
        output = tmp_path / family
        common = ["--data", str(tmp_path), "--tasks", "RTE", "--max-length", "40"]
        command = ["--model", str(sources[family].folder), "--output", str(output), *common, "--batch-size", "8"]
        assert main([*command, "--epochs", "2", "--learning-rate", "0.003", "--save-models"]) == 0
        (saved,) = output.glob("RTE/seed-0-*.model")
        assert main(["--model", str(saved), "--output", str(tmp_path / "again"), *common, "--evaluate-only"]) == 0
        (first,) = json.loads((output / "results.json").read_text())["results"]
        (again,) = json.loads((tmp_path / "again" / "results.json").read_text())["results"]
        assert again["splits"] == first["splits"], family
        shutil.rmtree(tmp_path / "again")
        # Finished, but the model is gone: the run is repeated for it.
        shutil.rmtree(saved)
        assert main([*command, "--epochs", "2", "--learning-rate", "0.003", "--save-models"]) == 0 and saved.is_dir()


def test_what_cannot_be_saved_is_said_before_training(sources: dict[str, ModelSource]) -> None:
    with pytest.raises(TaskError, match="a BiLSTM on frozen states"):
        check_savable(sources["bert"], TASKS["CoNLL-last"])
    with pytest.raises(TaskError, match="bilstm = 1"):
        check_savable(ModelSource(sources["bert"].folder, bilstm=1), TASKS["CoNLL"])
