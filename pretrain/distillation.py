"""Knowledge distillation, DistilBERT's recipe (https://arxiv.org/abs/1910.01108, section 3): the `[distillation]` table.

The student starts from every second layer of the teacher and minimises

    soft_targets * CE + masked_tokens * MLM + cosine * (1 - cos)

with weights 5, 2 and 1: CE is the divergence of the student's distribution over the vocabulary from the teacher's, both
at temperature 2, times the temperature squared (https://arxiv.org/abs/1503.02531, section 2); MLM the ordinary loss; the
cosine is between the last hidden states. CE and cosine are means over all tokens of the optimizer step, MLM over its
predictions: each is a sum divided once by the exact global count, like every loss of this project (R21).

Legend: `T` tokens, `P` predictions, `W` width of the table, `V` vocabulary entries.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import nn

from data_pipeline.records import Batch
from pretrain.config import DistillationConfig
from pretrain.encoder import BertForPreTraining
from pretrain.heads import PretrainingLosses
from pretrain.hf_config import InterchangeError
from pretrain.hf_import import check_tokens, import_from_hf
from pretrain.linear_cross_entropy import sliced_loss


class DistillationObjective(nn.Module):
    """The loss of a student against a teacher, in the form that `TrainEngine` takes.

    The teacher is no submodule: it is neither optimised, nor cut by ZeRO, nor saved.

    Args:
        model: the student.
        teacher: fp32 on the CPU; moved to the student's device and type at first use.
        config: weights and temperature.

    Raises:
        InterchangeError: the two do not fit together.
    """

    def __init__(self, model: BertForPreTraining, teacher: BertForPreTraining, config: DistillationConfig) -> None:
        super().__init__()
        if config.cosine and model.config.hidden != teacher.config.hidden:
            raise InterchangeError(
                f"distillation.cosine needs equal hidden sizes, the student has {model.config.hidden}, the teacher "
                f"{teacher.config.hidden}; set model.hidden to it or distillation.cosine=0"
            )
        self.model, self.config = model, config
        self._teacher = (teacher.eval().requires_grad_(False),)

    def forward(self, batch: Batch, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted loss of a micro-batch and its sums.

        Args:
            batch: on the student's device.
            weights: (3,) factors of sums over predictions, pairs and tokens.

        Returns:
            loss: scalar.
            sums: (5,) float64: MLM and NSP loss sums, the part of `loss` beyond `mlm * weights[0] + nsp * weights[1]`,
                correct answers of both.

        In evaluation the teacher rests: the held-out loss is that of the student alone.
        """
        student = self.model
        out, x_TD = student.losses_and_states(batch)
        plain = out.mlm_loss_sum.float() * weights[0] + out.nsp_loss_sum.float() * weights[1]
        extra = self._extra(batch, out, x_TD, weights) if self.training else torch.zeros_like(plain)
        counted = (out.mlm_loss_sum, out.nsp_loss_sum, extra, out.mlm_correct, out.nsp_correct)
        return plain + extra, torch.stack([part.detach().double() for part in counted])

    def _extra(self, batch: Batch, out: PretrainingLosses, x_TD: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        student, config = self.model, self.config
        teacher = self._teacher_for(x_TD)
        with torch.no_grad():
            target_TD = _states(teacher, batch)
            target_TW = teacher.mlm_head.hidden(target_TD)
        extra = (config.masked_tokens - 1.0) * out.mlm_loss_sum.float() * weights[0]
        if config.soft_targets:
            divergence = soft_cross_entropy(
                student.mlm_head.hidden(x_TD), student, target_TW, teacher, config.temperature
            )
            extra = extra + config.soft_targets * divergence * weights[2]
        if config.cosine:
            apart = 1.0 - F.cosine_similarity(x_TD.float(), target_TD.float(), dim=1)
            extra = extra + config.cosine * apart.sum() * weights[2]
        return extra

    def _teacher_for(self, x_TD: torch.Tensor) -> BertForPreTraining:
        (teacher,) = self._teacher
        table = teacher.word_embedding
        if table.device != x_TD.device or table.dtype != x_TD.dtype:
            self._teacher = (teacher.to(device=x_TD.device, dtype=x_TD.dtype),)
        return self._teacher[0]


def _states(model: BertForPreTraining, batch: Batch) -> torch.Tensor:
    return model.encoder(
        batch.input_ids_T, batch.segment_ids_T, batch.position_ids_T, batch.cu_seqlens, batch.max_seqlen
    )


def soft_cross_entropy(
    hidden_TW: torch.Tensor,
    student: BertForPreTraining,
    target_TW: torch.Tensor,
    teacher: BertForPreTraining,
    temperature: float,
) -> torch.Tensor:
    """Sum over tokens of t^2 KL(teacher || student) over the vocabulary at temperature t; no T x V matrix ever exists.

    With p and q the teacher's and student's distributions, it has the gradient t (q - p) in the student's logits.

    Args:
        hidden_TW: `student.mlm_head.hidden` of its states; differentiable, as are the student's table and bias.
        target_TW: the teacher's, without gradient.
    """
    entries = student.config.vocab_size
    table, bias = teacher.word_embedding[:entries], teacher.mlm_head.bias[:entries]

    def divergence(logits: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        own_log = logits.div_(temperature).log_softmax(1)
        theirs = torch.addmm(bias, target_TW[part], table.t()).float().div_(temperature)
        target_log = theirs.log_softmax(1)
        target_share = target_log.exp()
        total = temperature**2 * (target_share * (target_log - own_log)).sum()
        torch.sub(own_log.exp_(), target_share, out=logits).mul_(temperature)
        return total, torch.zeros((), dtype=torch.int64, device=logits.device)

    head = student.mlm_head
    return sliced_loss(hidden_TW, student.word_embedding, head.bias, divergence, entries, student.config.head_chunk)[0]


def load_teacher(config: DistillationConfig, student: BertForPreTraining, tokens: list[str]) -> BertForPreTraining:
    """The teacher, in fp32 on the CPU.

    Args:
        tokens: the vocabulary of the data, in the order of ids.

    Raises:
        InterchangeError: the folder cannot be read, lacks a masked-token head, has another vocabulary, or fewer
            positions than the student.
    """
    loaded = import_from_hf(config.teacher, pad_vocab_to=student.config.pad_vocab_to)
    lacking = [name for name in loaded.missing if name.startswith("mlm_head")]
    if lacking:
        raise InterchangeError(f"{config.teacher}: a teacher needs its masked-token head, this one lacks {lacking[0]}")
    ours, theirs = student.config, loaded.config
    if ours.vocab_size != theirs.vocab_size:
        raise InterchangeError(
            f"{config.teacher}: the teacher has {theirs.vocab_size} vocabulary entries, the data {ours.vocab_size}; "
            f"build the data with tokenizer.path={config.teacher}"
        )
    check_tokens(config.teacher, tokens)
    if ours.max_positions > theirs.max_positions:
        raise InterchangeError(
            f"{config.teacher}: the teacher reads {theirs.max_positions} tokens, model.max_positions is "
            f"{ours.max_positions}"
        )
    return loaded.model


def start_student(student: BertForPreTraining, teacher: BertForPreTraining) -> list[str]:
    """Copy the teacher's tensors into the student, layer i from the teacher's layer i * n, n the ratio of their depths.

    Returns:
        names of the student's tensors that the teacher has none for; they keep their random start.

    Raises:
        InterchangeError: the teacher's depth is no multiple of the student's, or shapes differ.
    """
    own, given = student.state_dict(), teacher.state_dict()
    depth = {model: len(model.encoder.layers) for model in (student, teacher)}
    step, left = divmod(depth[teacher], depth[student])
    if left:
        raise InterchangeError(
            f"the teacher has {depth[teacher]} layers, no multiple of the student's {depth[student]}; choose "
            "model.layers to divide it, or distillation.start_from_teacher=false"
        )
    state = {}
    for name in own:
        source = re.sub(r"(?<=encoder\.layers\.)\d+", lambda match: str(int(match[0]) * step), name)
        if source in given:
            tensor = given[source]
            if name == "encoder.embeddings.position.weight":
                tensor = tensor[: len(own[name])]  # a shorter student takes the first positions
            if own[name].shape != tensor.shape:
                raise InterchangeError(
                    f"{name}: the student's shape {tuple(own[name].shape)} does not fit the teacher's "
                    f"{tuple(tensor.shape)}; use its sizes, or distillation.start_from_teacher=false"
                )
            state[name] = tensor
    student.load_state_dict({**own, **state})
    return [name for name in own if name not in state]
