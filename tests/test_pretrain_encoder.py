"""The encoder on flat tokens: packed equals padded, examples are independent, every variant trains."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import transformers

from data_pipeline.records import Batch
from pretrain.encoder import BertForPreTraining
from pretrain.first_token import first_token_attention
from pretrain.hf_config import model_class, to_hf_config
from pretrain.model_config import EncoderConfig, load_encoder_config
from pretrain.name_map import from_hf_tensors, to_hf_tensors

VOCABULARY = 101
LENGTHS = [24, 24, 7, 13, 5]
SMALL = {"layers": 2, "hidden": 32, "heads": 2, "intermediate": 64, "vocab_size": VOCABULARY, "initializer_range": 0.2}
MODERN = {
    "architecture": "modernbert",
    "layers": 4,
    "norm": "pre",
    "gated": True,
    "biases": False,
    "positions": "rotary",
    "type_vocab": 0,
    "local_window": 8,
    "global_every": 3,
    "norm_eps": 1e-5,
    "sentence_objective": "none",
}
FAMILY = {
    "bert": {},
    "bert-tanh": {"activation": "gelu_tanh"},
    "bert-no-nsp": {"sentence_objective": "none"},
    "bert-ltr": {"causal": True, "sentence_objective": "none"},
    "roberta": {
        "architecture": "roberta",
        "pad_id": 1,
        "position_offset": 2,
        "type_vocab": 1,
        "norm_eps": 1e-5,
        "sentence_objective": "none",
    },
    "albert": {
        "architecture": "albert",
        "embedding_size": 16,
        "share_layers": True,
        "sentence_objective": "sop",
        "activation": "gelu_tanh",
    },
    "distilbert": {"architecture": "distilbert", "type_vocab": 0, "sentence_objective": "none"},
    "modernbert": MODERN,
}
VARIANTS = {
    **FAMILY,
    "pre-norm": {"norm": "pre"},
    "ltr-bilstm": {"causal": True, "bilstm": 1, "sentence_objective": "none"},
}


def config_of(name: str, **overrides) -> EncoderConfig:
    return load_encoder_config({**SMALL, **VARIANTS[name], **overrides})


def model_of(name: str, **overrides) -> BertForPreTraining:
    """A model whose biases and norms are random too, so that none of them can be forgotten."""
    torch.manual_seed(0)
    model = BertForPreTraining(config_of(name, **overrides))
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * 0.1)
        model.mlm_head.bias[VOCABULARY:] = 0
    return model


def make_batch(lengths=LENGTHS, seed=0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    tokens = sum(lengths)
    masked = [
        start + torch.randperm(length - 2, generator=generator)[:2].sort().values + 1
        for start, length in zip(cu_seqlens[:-1].tolist(), lengths, strict=True)
    ]
    return Batch(
        input_ids_T=torch.randint(2, VOCABULARY, (tokens,), generator=generator),
        segment_ids_T=torch.cat([(torch.arange(length) >= length // 2).long() for length in lengths]),
        position_ids_T=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=cu_seqlens,
        max_seqlen=max(lengths),
        mask_positions_P=torch.cat(masked),
        mask_labels_P=torch.randint(2, VOCABULARY, (2 * len(lengths),), generator=generator),
        cls_positions_E=cu_seqlens[:-1].long(),
        nsp_labels_E=torch.randint(0, 2, (len(lengths),), generator=generator),
    )


def hidden(model: BertForPreTraining, batch: Batch) -> torch.Tensor:
    return model.encoder(
        batch.input_ids_T, batch.segment_ids_T, batch.position_ids_T, batch.cu_seqlens, batch.max_seqlen
    )


def peer(model: BertForPreTraining, config: EncoderConfig):
    """The model of `transformers` with the same weights."""
    content = to_hf_config(config)
    settings = getattr(transformers, model_class(config)).config_class(**content)
    theirs = getattr(transformers, model_class(config))(settings)
    lost = theirs.load_state_dict(to_hf_tensors(model.state_dict(), config), strict=False)
    assert not lost.unexpected_keys
    assert all("decoder" in name or "projector" in name for name in lost.missing_keys)
    theirs.tie_weights()
    return theirs


def padded_loss(theirs, config: EncoderConfig, batch: Batch) -> torch.Tensor:
    """Mean losses of `transformers` on the same examples padded to rows."""
    real = torch.arange(batch.max_seqlen) < (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1])[:, None]
    labels_T = torch.full_like(batch.input_ids_T, -100)
    # Left to right, a token is predicted from the state before it: the language-model classes shift the labels themselves.
    labels_T[batch.mask_positions_P] = batch.mask_labels_P
    rows = {"input_ids": torch.full(real.shape, config.pad_id), "labels": torch.full(real.shape, -100)}
    rows["input_ids"][real], rows["labels"][real] = batch.input_ids_T, labels_T
    if config.type_vocab > 1:
        rows["token_type_ids"] = torch.zeros(real.shape, dtype=torch.int64)
        rows["token_type_ids"][real] = batch.segment_ids_T
    if config.sentence_objective == "nsp":
        rows["next_sentence_label"] = batch.nsp_labels_E
    if config.sentence_objective == "sop":
        rows["sentence_order_label"] = batch.nsp_labels_E
    return theirs(**rows, attention_mask=real.long()).loss


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", FAMILY)
def test_losses_and_gradients_equal_transformers_on_padded_rows(name, training):
    """`training`: our training path, with nothing to drop."""
    table = {"hidden_dropout": 0.0, "attention_dropout": 0.0} if training else {}
    model, batch = model_of(name, **table).train(training), make_batch()
    theirs = peer(model, model.config).eval()
    losses = model(batch)
    ours = losses.mlm_loss_sum / losses.mlm_count + losses.nsp_loss_sum / max(1, losses.nsp_count)
    expected = padded_loss(theirs, model.config, batch)
    assert ours.item() == pytest.approx(expected.item(), abs=1e-5)
    ours.backward()
    expected.backward()
    gradients = {key: tensor.grad for key, tensor in theirs.named_parameters()}
    own, missing, unused = from_hf_tensors(gradients, model.state_dict(), model.config)
    assert not missing and not unused
    for key, tensor in model.named_parameters():
        torch.testing.assert_close(tensor.grad, own[key], atol=1e-5, rtol=1e-4, msg=key)


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_equals_one_by_one(name):
    model, batch = model_of(name).eval(), make_batch()
    packed = hidden(model, batch)
    ends = batch.cu_seqlens.tolist()
    for start, end in pairwise(ends):
        alone = model.encoder(
            batch.input_ids_T[start:end],
            batch.segment_ids_T[start:end],
            batch.position_ids_T[start:end],
            torch.tensor([0, end - start], dtype=torch.int32),
            end - start,
        )
        torch.testing.assert_close(packed[start:end], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_changing_one_example_leaves_the_others_bit_equal(name):
    model, batch = model_of(name).eval(), make_batch()
    before = hidden(model, batch)
    start, end = batch.cu_seqlens[1:3].tolist()
    batch.input_ids_T[start:end] = batch.input_ids_T[start:end].flip(0)
    after = hidden(model, batch)
    others = torch.ones(batch.tokens, dtype=torch.bool)
    others[start:end] = False
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])


@pytest.mark.parametrize("name", VARIANTS)
def test_place_in_the_batch_does_not_matter(name):
    model, lengths = model_of(name).eval(), [13, 24, 7, 21]
    forward, backward = make_batch(lengths), make_batch(lengths[::-1])
    for column in ("input_ids_T", "segment_ids_T"):
        parts = getattr(forward, column).split(lengths)
        getattr(backward, column).copy_(torch.cat(parts[::-1]))
    parts = hidden(model, forward).split(lengths)
    torch.testing.assert_close(hidden(model, backward), torch.cat(parts[::-1]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_tensor_gets_a_gradient_in_training(name):
    model, batch = model_of(name).train(), make_batch()
    losses = model(batch)
    (losses.mlm_loss_sum + losses.nsp_loss_sum).backward()
    assert not [
        key for key, tensor in model.named_parameters() if tensor.grad is None or not tensor.grad.isfinite().all()
    ]
    assert (losses.mlm_count, losses.nsp_count) == (10, 0 if model.config.sentence_objective == "none" else 5)


@pytest.mark.parametrize("name", FAMILY)
def test_r42_padding_rows_are_never_predicted_nor_trained(name):
    plain, gradients = losses_and_gradients(model_of(name, pad_vocab_to=64), make_batch())
    model = model_of(name, pad_vocab_to=64)
    assert model.word_embedding.shape[0] == model.mlm_head.bias.shape[0] == 128
    with torch.no_grad():
        model.word_embedding[VOCABULARY:] = 100.0
        model.mlm_head.bias[VOCABULARY:] = 1e6
    loss, found = losses_and_gradients(model, make_batch())
    assert torch.equal(loss, plain)
    for key in ("encoder.embeddings.word.weight", "mlm_head.bias"):
        assert torch.equal(found[key], gradients[key]) and found[key].any() and not found[key][VOCABULARY:].any()
    states = hidden(model.eval(), make_batch())
    assert model.mlm_head.logits(states, model.word_embedding).shape[1] == VOCABULARY


def test_causal_attention_does_not_look_ahead():
    model, batch = model_of("bert-ltr").eval(), make_batch([9])
    before = hidden(model, batch)
    batch.input_ids_T[6] = (batch.input_ids_T[6] + 1) % VOCABULARY
    after = hidden(model, batch)
    assert torch.equal(before[:6], after[:6])
    assert not torch.equal(before[6:], after[6:])


def test_shared_layers_are_one_set_of_weights():
    model = model_of("albert", layers=3)
    assert len(model.encoder.layers) == 1
    deeper = model_of("albert", layers=6)
    assert sum(tensor.numel() for tensor in model.parameters()) == sum(tensor.numel() for tensor in deeper.parameters())
    assert not torch.equal(hidden(model.eval(), make_batch()), hidden(deeper.eval(), make_batch()))


def losses_and_gradients(model: BertForPreTraining, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The summed loss of a training pass from a fixed seed, and every gradient."""
    torch.manual_seed(1)
    losses = model.train()(batch)
    loss = losses.mlm_loss_sum.float() + losses.nsp_loss_sum.float()
    loss.backward()
    return loss.detach(), {key: tensor.grad for key, tensor in model.named_parameters()}


@pytest.mark.parametrize("name", VARIANTS)
def test_activation_checkpointing_changes_nothing_with_dropout_on(name):
    table = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    plain, expected = losses_and_gradients(model_of(name, **table), make_batch())
    loss, gradients = losses_and_gradients(model_of(name, activation_checkpointing=True, **table), make_batch())
    still, _ = losses_and_gradients(model_of(name, hidden_dropout=0.0, attention_dropout=0.0), make_batch())
    assert torch.equal(loss, plain) and not torch.equal(loss, still)
    for key, gradient in expected.items():
        assert torch.equal(gradient, gradients[key]), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", VARIANTS)
def test_half_precision_trains_without_overflow_and_near_fp32(name, dtype):
    """Rows with padding, causal and windowed masks, dropout on: nothing overflows; without dropout the loss is fp32's."""
    batch = make_batch([24, 7, 4, 13])
    _, gradients = losses_and_gradients(model_of(name, hidden_dropout=0.1, attention_dropout=0.1).to(dtype), batch)
    assert [key for key, gradient in gradients.items() if not gradient.isfinite().all()] == []
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    loss, gradients = losses_and_gradients(model_of(name, **still).to(dtype), batch)
    expected, wanted = losses_and_gradients(model_of(name, **still), batch)
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)
    ours, theirs = (torch.cat([tree[key].float().flatten() for key in wanted]) for tree in (gradients, wanted))
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.99


def test_hidden_states_are_embeddings_and_every_layer():
    model, batch = model_of("bert").eval(), make_batch()
    out, states = model.encoder(
        batch.input_ids_T,
        batch.segment_ids_T,
        batch.position_ids_T,
        batch.cu_seqlens,
        batch.max_seqlen,
        output_hidden_states=True,
    )
    assert len(states) == 3
    assert states[-1] is out
    pooled = model.encoder.pool(out, batch.cls_positions_E)
    expected = peer(model, model.config).eval().bert.pooler(out[batch.cls_positions_E][:, None])
    torch.testing.assert_close(pooled, expected)


def test_too_long_an_example_and_a_missing_pooler_are_named():
    model = model_of("bert-no-nsp", max_positions=16).eval()
    with pytest.raises(ValueError, match=r"24 tokens, the encoder has 16 positions \(model.max_positions\)"):
        hidden(model, make_batch())
    with pytest.raises(ValueError, match="no pooler"):
        model.encoder.pool(torch.zeros(3, 32), torch.tensor([0]))


def test_initial_weights_are_truncated_normal():
    model = BertForPreTraining(load_encoder_config({"preset": "bert-tiny", "vocab_size": 1001}))
    weight = model.encoder.layers[0].up.weight
    assert weight.abs().max() <= 0.04
    assert weight.std().item() == pytest.approx(0.02 * 0.88, rel=0.02)
    assert not model.word_embedding[1001:].any()
    assert not model.encoder.layers[0].up.bias.any()


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_first_states_are_those_of_the_whole_forward_pass(name):
    """Values and gradients of what a classifier reads; the last layer is cut down where its kind allows."""
    model, batch = model_of(name).double().eval(), make_batch()
    fields = (batch.input_ids_T, batch.segment_ids_T, batch.position_ids_T, batch.cu_seqlens, batch.max_seqlen)
    whole_ED = model.encoder(*fields)[batch.cls_positions_E]
    first_ED = model.encoder.first_states(*fields)
    torch.testing.assert_close(first_ED, whole_ED, atol=1e-12, rtol=0)
    parameters = [tensor for tensor in model.encoder.parameters()]
    factors_ED = torch.randn(first_ED.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours, expected = (
        torch.autograd.grad((value * factors_ED).sum(), parameters, allow_unused=True) for value in (first_ED, whole_ED)
    )
    for found, wanted in zip(ours, expected, strict=True):
        assert (found is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(found, wanted, atol=1e-11, rtol=0)


def test_attention_dropout_reaches_the_first_tokens_last_layer():
    torch.manual_seed(0)
    q_ED, x_TD, key_DD = torch.randn(2, 8), torch.randn(24, 8), torch.randn(8, 8)
    cu_seqlens = torch.tensor([0, 10, 24], dtype=torch.int32)
    plain = first_token_attention(q_ED, x_TD, key_DD, cu_seqlens, 14, 2, 0.0)[1]
    drawn = torch.stack([first_token_attention(q_ED, x_TD, key_DD, cu_seqlens, 14, 2, 0.3)[1] for _ in range(4000)])
    assert drawn.std(0).min() > 0.01
    torch.testing.assert_close(drawn.mean(0), plain, atol=0.05, rtol=0)
