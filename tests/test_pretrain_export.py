"""Export and import of Hugging Face folders: parity, round trips, real weights, refusals."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from data_pipeline.tokenizer import load_tokenizer
from data_pipeline.tokenizer_folder import Normalisation
from data_pipeline.wordpiece import WordPieceTokenizer
from pretrain.encoder import BertForPreTraining
from pretrain.export import RECORD, compare_logits, export_to_hf
from pretrain.fill_mask import fill_mask
from pretrain.fill_mask import main as fill_mask_main
from pretrain.hf_config import InterchangeError, model_class
from pretrain.hf_import import import_from_hf, start_from
from pretrain.model_config import load_encoder_config
from pretrain.name_map import tensor_names

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "quick", "brown", "fox", "hello", "##s", "a", "b", "c", "d", ",", "$", ".", "cat"]
SMALL = {"layers": 2, "hidden": 32, "heads": 2, "intermediate": 64, "initializer_range": 0.1}
VARIANTS = {
    "bert": {},
    "bert-tanh": {"activation": "gelu_tanh"},
    "bert-no-nsp": {"sentence_objective": "none"},
    "bert-ltr": {"sentence_objective": "none", "causal": True},
    "roberta": {"architecture": "roberta", "type_vocab": 1, "sentence_objective": "none"},
    "roberta-ltr": {"architecture": "roberta", "type_vocab": 1, "sentence_objective": "none", "causal": True},
    "albert": {"architecture": "albert", "embedding_size": 16, "share_layers": True, "sentence_objective": "sop"},
    "distilbert": {"architecture": "distilbert", "type_vocab": 0, "sentence_objective": "none"},
    "modernbert": {
        "architecture": "modernbert",
        "norm": "pre",
        "gated": True,
        "biases": False,
        "positions": "rotary",
        "type_vocab": 0,
        "local_window": 8,
        "global_every": 2,
        "norm_eps": 1e-5,
        "sentence_objective": "none",
    },
}


def save_tokenizer(folder: Path, padding_first: bool = True, lowercase: bool = True) -> Path:
    specials = SPECIALS if padding_first else [SPECIALS[1], SPECIALS[0], *SPECIALS[2:]]
    flags = Normalisation(lowercase=lowercase, strip_accents=lowercase, split_cjk=True)
    WordPieceTokenizer([*specials, *WORDS], flags, folder).save(folder)
    return folder


def model_for(tokenizer_dir: Path, **table) -> BertForPreTraining:
    tokenizer = load_tokenizer(tokenizer_dir)
    if table.get("architecture") == "roberta":
        table["position_offset"] = tokenizer.pad_id + 1
    torch.manual_seed(0)
    config = load_encoder_config({**SMALL, **table}).with_vocabulary(tokenizer.vocab_size, tokenizer.pad_id)
    model = BertForPreTraining(config)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * 0.1)
        model.mlm_head.bias[config.vocab_size :] = 0
    return model.eval()


@pytest.mark.parametrize("padding_first", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_r44_exported_logits_are_the_models_and_the_round_trip_is_bit_equal(tmp_path, name, padding_first):
    tokenizer_dir = save_tokenizer(tmp_path / "tokenizer", padding_first)
    model = model_for(tokenizer_dir, **VARIANTS[name])
    folder = export_to_hf(model, tokenizer_dir, tmp_path / "export")
    assert json.loads((folder / RECORD).read_text())["largest_logit_difference"] < 1e-5
    written = json.loads((folder / "config.json").read_text())
    activation = written.get("hidden_act") or written.get("hidden_activation") or written.get("activation")
    assert activation == ("gelu_new" if name == "bert-tanh" else "gelu")
    assert written["pad_token_id"] == (0 if padding_first else 1)
    back = import_from_hf(folder, pad_vocab_to=8)
    assert not back.missing and not back.unused
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, back.model.state_dict()[key]), key
    again = export_to_hf(back.model, tokenizer_dir, tmp_path / "again")
    for file in ("model.safetensors", "config.json"):
        assert (again / file).read_bytes() == (folder / file).read_bytes()


def test_folder_loads_with_no_arguments(tmp_path):
    tokenizer_dir = save_tokenizer(tmp_path / "tokenizer", lowercase=False)
    model = model_for(tokenizer_dir)
    folder = export_to_hf(model, tokenizer_dir, tmp_path / "export")
    loaded, details = transformers.AutoModelForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert type(loaded).__name__ == "BertForPreTraining"
    assert not any(details[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 512
    pair = tokenizer("the cat", "a fox")
    assert tokenizer.convert_ids_to_tokens(pair["input_ids"]) == ["[CLS]", "the", "cat", "[SEP]", "a", "fox", "[SEP]"]
    assert pair["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    card = (folder / "README.md").read_text()
    assert "BertForPreTraining" in card and load_tokenizer(tokenizer_dir).fingerprint in card


@pytest.mark.parametrize("name", VARIANTS)
def test_r42_exported_sizes_are_one_and_padding_rows_are_gone(tmp_path, name):
    tokenizer_dir = save_tokenizer(tmp_path / "tokenizer")
    model = model_for(tokenizer_dir, pad_vocab_to=64, **VARIANTS[name])
    entries = len(SPECIALS) + len(WORDS)
    with torch.no_grad():
        model.word_embedding[entries:] = 100.0  # were they exported or predicted, the parity check would fail
    assert model.word_embedding.shape[0] == model.mlm_head.bias.shape[0] == 64
    folder = export_to_hf(model, tokenizer_dir, tmp_path / "export")
    tensors = load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == entries
    assert not any(
        64 in tensor.shape[:1] for key, tensor in tensors.items() if "embed" in key and "position" not in key
    )
    words, biases = tensor_names(
        ["encoder.embeddings.word.weight", "mlm_head.bias"], model.config.architecture
    ).values()
    assert tensors[words[0]].shape[0] == tensors[biases[0]].shape[0] == entries
    loaded, details = getattr(transformers, model_class(model.config)).from_pretrained(folder, output_loading_info=True)
    assert not any(details[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.get_input_embeddings().weight.shape[0] == loaded.get_output_embeddings().weight.shape[0] == entries
    output = loaded(torch.tensor([[2, 5, 3]]))
    logits = output.prediction_logits if "prediction_logits" in output else output.logits
    assert logits.shape[-1] == loaded.get_output_embeddings().bias.shape[0] == entries


def test_a_wrong_weight_stops_the_export(tmp_path, monkeypatch):
    tokenizer_dir = save_tokenizer(tmp_path / "tokenizer")
    model = model_for(tokenizer_dir)

    def swapped(state, config):
        from pretrain.name_map import to_hf_tensors

        tensors = to_hf_tensors(state, config)
        first, second = (f"bert.encoder.layer.0.attention.self.{part}.weight" for part in ("query", "value"))
        tensors[first], tensors[second] = tensors[second], tensors[first]
        return tensors

    monkeypatch.setattr("pretrain.export.to_hf_tensors", swapped)
    with pytest.raises(InterchangeError, match="logits of the exported model differ"):
        export_to_hf(model, tokenizer_dir, tmp_path / "export")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer"]


def test_r22_weights_that_are_not_finite_are_never_exported(tmp_path):
    tokenizer_dir = save_tokenizer(tmp_path / "tokenizer")
    model = model_for(tokenizer_dir)
    with torch.no_grad():
        model.encoder.layers[1].down.weight[3, 5] = float("nan")
    with pytest.raises(InterchangeError, match="differ by nan"):
        export_to_hf(model, tokenizer_dir, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_what_hugging_face_cannot_hold_is_refused(tmp_path):
    tokenizer_dir = save_tokenizer(tmp_path / "tokenizer")
    for table, message in (
        ({"norm": "pre"}, "bert models of Hugging Face cannot have norm = 'pre'"),
        ({"bilstm": 1}, "bilstm = 1"),
    ):
        with pytest.raises(InterchangeError, match=message):
            export_to_hf(model_for(tokenizer_dir, **table), tokenizer_dir, tmp_path / "export")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("text")
    with pytest.raises(InterchangeError, match="not empty and not an export"):
        export_to_hf(model_for(tokenizer_dir), tokenizer_dir, tmp_path / "mine")
    other = save_tokenizer(tmp_path / "other", padding_first=False)
    with pytest.raises(InterchangeError, match="padding id 1, the model was made for"):
        export_to_hf(model_for(tokenizer_dir), other, tmp_path / "export")


def test_real_weights_give_the_reference_outputs(shared_data):
    folder = shared_data / "models" / "splade-tiny-bert-mlm"
    loaded = import_from_hf(folder)
    assert not loaded.missing and not loaded.unused
    assert (loaded.config.has_pooler, loaded.config.sentence_objective) == (False, "none")
    reference = json.loads((shared_data / "models" / "reference_outputs.json").read_text())
    examples = reference["models"]["splade-tiny-bert-mlm"]
    ids = [torch.tensor(example["input_ids"]) for example in examples]
    lengths = [len(row) for row in ids]
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    segments = torch.cat([torch.tensor(example["token_type_ids"]) for example in examples])
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        x_TD = loaded.model.encoder(torch.cat(ids), segments, positions, cu_seqlens, max(lengths))
        logits = loaded.model.mlm_head.logits(x_TD, loaded.model.word_embedding)
    for example, states, scores in zip(examples, x_TD.split(lengths), logits.split(lengths), strict=True):
        torch.testing.assert_close(states[:, :8], torch.tensor(example["last_hidden_state_first8"]), atol=1e-5, rtol=0)
        top = torch.tensor(example["mlm_logits_top5_values"])
        found = scores.gather(1, torch.tensor(example["mlm_logits_top5_ids"]))
        torch.testing.assert_close(found, top, atol=1e-5 * max(1.0, top.abs().max().item()), rtol=0)


def test_bin_folder_old_names_and_bare_encoders_are_read(tmp_path):
    tokenizer_dir = save_tokenizer(tmp_path / "tokenizer")
    model = model_for(tokenizer_dir)
    folder = export_to_hf(model, tokenizer_dir, tmp_path / "export")
    tensors = load_file(folder / "model.safetensors")
    old = {}
    for name, tensor in tensors.items():
        if name.startswith("bert."):
            renamed = name.removeprefix("bert.")
            if "LayerNorm" in name:
                renamed = renamed.replace("weight", "gamma").replace("bias", "beta")
            old[renamed] = tensor
    old["embeddings.position_ids"] = torch.arange(512)
    (folder / "model.safetensors").unlink()
    torch.save(old, folder / "pytorch_model.bin")
    back = import_from_hf(folder, pad_vocab_to=8)
    assert all(name.startswith("mlm_head") for name in back.missing) and back.missing
    assert back.config.has_pooler and back.config.sentence_objective == "none"
    for key, tensor in model.state_dict().items():
        if key.startswith("encoder."):
            assert torch.equal(tensor, back.model.state_dict()[key]), key


def test_weights_in_parts_are_read(tmp_path):
    tokenizer_dir = save_tokenizer(tmp_path / "tokenizer")
    model = model_for(tokenizer_dir)
    folder = export_to_hf(model, tokenizer_dir, tmp_path / "export")
    parts = tmp_path / "parts"
    transformers.AutoModelForPreTraining.from_pretrained(folder).save_pretrained(parts, max_shard_size="20KB")
    assert not (parts / "model.safetensors").exists() and len(list(parts.glob("*.safetensors"))) > 1
    back = import_from_hf(parts, pad_vocab_to=8)
    assert not back.missing and not back.unused
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, back.model.state_dict()[key]), key
    next(parts.glob("*.safetensors")).unlink()
    with pytest.raises(InterchangeError, match="cannot be read"):
        import_from_hf(parts)


class Danger:
    """What a hostile pickle does: runs a command while it is read."""

    def __reduce__(self):
        return (Path.touch, (Path("was-run"),))


def test_damaged_folders_are_refused_and_pickles_do_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InterchangeError, match="expected a Hugging Face folder"):
        import_from_hf(tmp_path / "nothing")
    tokenizer_dir = save_tokenizer(tmp_path / "tokenizer")
    folder = export_to_hf(model_for(tokenizer_dir), tokenizer_dir, tmp_path / "export")
    weights = folder / "model.safetensors"
    # Copies: load_file maps the file that is overwritten below.
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(InterchangeError, match="cannot be read"):
        import_from_hf(folder)
    save_file({**tensors, "bert.embeddings.LayerNorm.bias": torch.zeros(7)}, weights)
    with pytest.raises(InterchangeError, match=r"asks for \(32,\), the weights have \(7,\)"):
        import_from_hf(folder)
    save_file({name: tensor for name, tensor in tensors.items() if ".layer.1." not in name}, weights)
    with pytest.raises(InterchangeError, match=r"the weights lack encoder.layers.1"):
        import_from_hf(folder)
    weights.unlink()
    with pytest.raises(InterchangeError, match=r"expected model.safetensors or pytorch_model.bin"):
        import_from_hf(folder)
    torch.save({"x": Danger()}, folder / "pytorch_model.bin")
    with pytest.raises(InterchangeError, match="more than tensors"):
        import_from_hf(folder)
    assert not (tmp_path / "was-run").exists()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(InterchangeError, match="model_type 'gpt2'; known: albert, bert"):
        import_from_hf(folder)


def test_real_tokenizer_and_weights_survive_our_export(tmp_path, shared_data):
    """The published uncased vocabulary and real weights through import, export and `transformers`."""
    source = shared_data / "models" / "splade-tiny-bert-mlm"
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(gzip.decompress((source / "tokenizer.json.gz").read_bytes()))
    from data_pipeline.config import TokenizerConfig
    from data_pipeline.tokenizer import import_tokenizer

    import_tokenizer(folder, TokenizerConfig()).save(tmp_path / "tokenizer")
    loaded = import_from_hf(source)
    exported = export_to_hf(loaded.model, tmp_path / "tokenizer", tmp_path / "export")
    ours = load_file(exported / "model.safetensors")
    theirs = load_file(source / "model.safetensors")
    for name, tensor in theirs.items():
        current = name.replace("gamma", "weight").replace("beta", "bias")
        if current in ours:
            assert torch.equal(ours[current], tensor), name
    assert len(ours) >= len(theirs) - 2
    again = transformers.AutoModelForMaskedLM.from_pretrained(exported).eval()
    difference, scale = compare_logits(loaded.model, again)
    assert difference < 1e-5 * max(1.0, scale)
    shutil.rmtree(exported)


def test_left_to_right_exports_as_a_language_model_and_a_bilstm_goes_on_top(tmp_path):
    tokenizer_dir = save_tokenizer(tmp_path / "tokenizer")
    model = model_for(tokenizer_dir, causal=True, sentence_objective="none")
    folder = export_to_hf(model, tokenizer_dir, tmp_path / "export")
    assert type(transformers.AutoModelForCausalLM.from_pretrained(folder)).__name__ == "BertLMHeadModel"
    loaded = import_from_hf(folder, pad_vocab_to=8, bilstm=1)
    assert loaded.config.causal and {name.split(".")[1] for name in loaded.missing} == {"bilstm"}
    ids = torch.tensor([2, 5, 6, 7, 3])
    arguments = (ids, torch.zeros_like(ids), torch.arange(5), torch.tensor([0, 5], dtype=torch.int32), 5)
    below = import_from_hf(folder, pad_vocab_to=8).model.encoder
    expected, _ = loaded.model.encoder.bilstm(below(*arguments)[:, None])
    torch.testing.assert_close(loaded.model.encoder(*arguments), expected[:, 0])
    with pytest.raises(InterchangeError, match=r"bert models of Hugging Face cannot have bilstm = 1"):
        export_to_hf(loaded.model, tokenizer_dir, tmp_path / "other")
    # Pre-training can go on below a new one too.
    assert all("bilstm" in name for name in start_from(loaded.model, folder))
    # Left to right, [MASK] is filled from the state before it.
    tokenizer = load_tokenizer(folder)
    (found,) = fill_mask(import_from_hf(folder).model, tokenizer, "the [MASK] fox.", top=3)
    (same,) = fill_mask(import_from_hf(folder).model, tokenizer, "the [MASK] cat.", top=3)
    assert found == same


def test_pretraining_starts_from_a_folder(tmp_path):
    tokenizer_dir = save_tokenizer(tmp_path / "tokenizer")
    source = model_for(tokenizer_dir, sentence_objective="none")
    folder = export_to_hf(source, tokenizer_dir, tmp_path / "export")
    model = model_for(tokenizer_dir, hidden_dropout=0.0)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
    lacking = start_from(model, folder)
    assert {name.split(".")[0] for name in lacking} == {"encoder", "sentence_head"}
    assert all("pooler" in name or "sentence_head" in name for name in lacking)
    for key, tensor in source.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[key]), key
    with pytest.raises(InterchangeError, match=r"differs in layers 3 \(folder: 2\)"):
        start_from(model_for(tokenizer_dir, layers=3), folder)


def test_fill_mask_reads_the_marker_and_agrees_with_transformers(tmp_path, capsys):
    tokenizer_dir = save_tokenizer(tmp_path / "tokenizer")
    folder = export_to_hf(model_for(tokenizer_dir, initializer_range=0.5), tokenizer_dir, tmp_path / "export")
    (found,) = fill_mask(import_from_hf(folder).model, load_tokenizer(folder), "the [MASK] fox.", top=3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoModelForPreTraining.from_pretrained(folder).eval()
    inputs = tokenizer("the [MASK] fox.", return_tensors="pt")
    with torch.no_grad():
        shares = theirs(**inputs).prediction_logits[0, 2].softmax(-1).topk(3)
    assert [entry for entry, _ in found] == tokenizer.convert_ids_to_tokens(shares.indices.tolist())
    assert [share for _, share in found] == pytest.approx(shares.values.tolist(), abs=1e-5)
    assert fill_mask_main(["--model", str(folder), "a [mask] cat"]) == 2
    assert "no [MASK]" in capsys.readouterr().err
    assert fill_mask_main(["--model", str(folder), "a [MASK] [MASK]"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
