"""Distillation: the loss against its formulas written out, exact counts, the student's start, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data_pipeline.loader import build_loader
from data_pipeline.records import Batch
from data_pipeline.tokenizer_folder import SPECIAL_TOKENS, Normalisation
from data_pipeline.wordpiece import WordPieceTokenizer
from pretrain.config import DistillationConfig
from pretrain.distillation import DistillationObjective, load_teacher, start_student
from pretrain.encoder import BertForPreTraining
from pretrain.export import export_to_hf
from pretrain.hf_config import InterchangeError
from pretrain.model_config import load_encoder_config

SMALL = {"vocab_size": 100, "hidden": 32, "heads": 2, "intermediate": 64, "max_positions": 32, "initializer_range": 0.2}
STUDENT = {**SMALL, "architecture": "distilbert", "type_vocab": 0, "sentence_objective": "none", "head_chunk": 7}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
TOKENS = [*SPECIAL_TOKENS, *(f"word{number}" for number in range(95))]


def make(seed: int, **table) -> BertForPreTraining:
    torch.manual_seed(seed)
    return BertForPreTraining(load_encoder_config({**SMALL, **table}))


def student_of(**table) -> BertForPreTraining:
    return make(1, **{**STUDENT, "layers": 2, **table})


def teacher_of(**table) -> BertForPreTraining:
    return make(2, **{"layers": 4, **table})


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory, write_dataset: Callable) -> list[Batch]:
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder, seed=4)
    with build_loader(folder, global_batch=8, micro_batch=4) as loader:
        return next(loader)


def written_out(student: BertForPreTraining, teacher: BertForPreTraining, batch: Batch, config) -> torch.Tensor:
    """The recipe with full logits and torch's own losses."""
    arguments = (batch.input_ids_T, batch.segment_ids_T, batch.position_ids_T, batch.cu_seqlens, batch.max_seqlen)
    x_TD = student.encoder(*arguments)
    with torch.no_grad():
        y_TD = teacher.encoder(*arguments)
        wanted = teacher.mlm_head.logits(y_TD, teacher.word_embedding) / config.temperature
    logits = student.mlm_head.logits(x_TD, student.word_embedding)
    soft = F.kl_div((logits / config.temperature).log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
    mlm = F.cross_entropy(logits[batch.mask_positions_P], batch.mask_labels_P)
    cosine = F.cosine_embedding_loss(x_TD, y_TD, torch.ones(len(x_TD)))
    return config.soft_targets * soft * config.temperature**2 + config.masked_tokens * mlm + config.cosine * cosine


@pytest.mark.parametrize("weights", [(5.0, 2.0, 1.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_loss_and_gradients_are_those_of_the_formulas_over_all_micro_batches(batches, weights):
    soft, masked, cosine = weights
    config = DistillationConfig(teacher="x", soft_targets=soft, masked_tokens=masked, cosine=cosine)
    teacher = teacher_of(**NO_DROPOUT)
    plain, student = student_of(**NO_DROPOUT), student_of(**NO_DROPOUT)
    objective = DistillationObjective(student.train(), teacher, config)
    predictions, tokens = sum(len(b.mask_labels_P) for b in batches), sum(b.tokens for b in batches)
    assert len({len(b.mask_labels_P) for b in batches}) > 1  # unequal: a mean of means would show
    factors = torch.tensor([1 / predictions, 1.0, 1 / tokens])
    total, sums = torch.zeros(()), torch.zeros(5, dtype=torch.float64)
    for batch in batches:
        loss, parts = objective(batch, factors)
        loss.backward()
        total += loss.detach()
        sums += parts
    expected = written_out(plain, teacher, joined(batches), config)
    expected.backward()
    assert expected.item() > 0.1
    torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=1e-6)
    assert float(sums[0] / predictions + sums[2]) == pytest.approx(expected.item(), rel=1e-5)
    for (name, ours), theirs in zip(student.named_parameters(), plain.parameters(), strict=True):
        wanted = torch.zeros_like(ours) if theirs.grad is None else theirs.grad
        found = torch.zeros_like(ours) if ours.grad is None else ours.grad
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert not teacher.training and all("teacher" not in name for name in objective.state_dict())


def joined(batches: list[Batch]) -> Batch:
    """All micro-batches as one."""
    starts = np.cumsum([0, *(batch.tokens for batch in batches)])
    parts = list(zip(batches, starts.tolist(), strict=False))
    return Batch(
        input_ids_T=torch.cat([batch.input_ids_T for batch in batches]),
        segment_ids_T=torch.cat([batch.segment_ids_T for batch in batches]),
        position_ids_T=torch.cat([batch.position_ids_T for batch in batches]),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int32), *(b.cu_seqlens[1:] + start for b, start in parts)]),
        max_seqlen=max(batch.max_seqlen for batch in batches),
        mask_positions_P=torch.cat([batch.mask_positions_P + start for batch, start in parts]),
        mask_labels_P=torch.cat([batch.mask_labels_P for batch in batches]),
        cls_positions_E=torch.cat([batch.cls_positions_E + start for batch, start in parts]),
        nsp_labels_E=torch.cat([batch.nsp_labels_E for batch in batches]),
    )


def test_the_student_starts_from_every_second_layer():
    student, teacher = student_of(max_positions=24), teacher_of()
    lacking = start_student(student, teacher)
    assert lacking == []
    for own, theirs in ((0, 0), (1, 2)):
        given = teacher.encoder.layers[theirs].state_dict()
        for name, tensor in student.encoder.layers[own].state_dict().items():
            assert torch.equal(tensor, given[name]), (own, name)
    assert torch.equal(student.word_embedding, teacher.word_embedding)
    assert torch.equal(student.encoder.embeddings.position.weight, teacher.encoder.embeddings.position.weight[:24])
    assert start_student(make(3, layers=2), teacher_of(sentence_objective="none")) == [
        "encoder.pooler.weight",
        "encoder.pooler.bias",
        "sentence_head.classifier.weight",
        "sentence_head.classifier.bias",
    ]


def test_what_does_not_fit_together_is_refused(tmp_path: Path):
    with pytest.raises(InterchangeError, match="the teacher has 4 layers, no multiple of the student's 3"):
        start_student(student_of(layers=3), teacher_of())
    with pytest.raises(InterchangeError, match="does not fit the teacher's"):
        start_student(student_of(intermediate=32), teacher_of())
    config = DistillationConfig(teacher="x")
    with pytest.raises(InterchangeError, match="needs equal hidden sizes, the student has 16, the teacher 32"):
        DistillationObjective(student_of(hidden=16), teacher_of(), config)
    flags = Normalisation(lowercase=True, strip_accents=True, split_cjk=True)
    WordPieceTokenizer(TOKENS, flags).save(tmp_path / "tokenizer")
    folder = export_to_hf(teacher_of().eval(), tmp_path / "tokenizer", tmp_path / "teacher")
    config = DistillationConfig(teacher=str(folder))
    found = load_teacher(config, student_of(), TOKENS)
    assert torch.equal(found.word_embedding[:100], teacher_of().word_embedding[:100])
    swapped = [*TOKENS[:7], TOKENS[8], TOKENS[7], *TOKENS[9:]]
    with pytest.raises(InterchangeError, match=r"id 7 is 'word3', there 'word2'.*build the data with tokenizer.path"):
        load_teacher(config, student_of(), swapped)
    with pytest.raises(InterchangeError, match=r"the teacher reads 32 tokens, model.max_positions is 64"):
        load_teacher(config, student_of(max_positions=64), TOKENS)
    with pytest.raises(InterchangeError, match="the teacher has 100 vocabulary entries, the data 96"):
        load_teacher(config, student_of(vocab_size=96), TOKENS)
