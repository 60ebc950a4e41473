"""Fused kernels against the plain path, value and gradient; Triton on the CPU through its interpreter.

The interpreter is chosen when triton is first imported, so the Triton checks run in a process of their own (this file as
a script); without triton they skip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from data_pipeline.records import Batch
from pretrain.encoder import BertForPreTraining
from pretrain.kernels import (
    BetweenNorm,
    GeluLinear,
    Kernels,
    SublayerNorm,
    _compiled,
    _plain_bias_gelu,
    _plain_norm,
    _plain_sum_and_norm,
    choose_kernels,
    describe_kernels,
)
from pretrain.model_config import load_encoder_config

ROOT = Path(__file__).resolve().parent.parent
SMALL = {"vocab_size": 101, "layers": 2, "hidden": 48, "heads": 2, "intermediate": 64, "max_positions": 32}
MODERN = {"norm": "pre", "gated": True, "biases": False, "positions": "rotary", "activation": "gelu_tanh"}
GELUS = [(tanh, gated, bias) for tanh in (False, True) for gated in (False, True) for bias in (True, False)]


def largest_difference(found, wanted) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


def rows(bias: bool, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """x, residual, weight and, if asked for, bias of 7 rows of 48; the last number is no power of two."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 48), (7, 48), (48,), (48,)][: 4 if bias else 3]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def norm_of(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None):
    return F.layer_norm(residual + x, weight.shape, weight, bias, 1e-5)


def compare_norm(device: str, dtype: torch.dtype, kernel, both: bool = False) -> dict[str, float]:
    """Largest differences of values and gradients, with and without a bias vector.

    `both`: the kernel gives the sum and its norm, and a gradient comes in from each.
    """
    worst = {"value": 0.0, "gradient": 0.0}
    for bias in (True, False):
        tensors = rows(bias, device, dtype)
        mine = kernel(*tensors[:3], tensors[3] if bias else None, 1e-5, 0.0)
        mine = mine if both else (mine,)
        plain = (*([tensors[0] + tensors[1]] if both else []), norm_of(*tensors))
        worst["value"] = max(worst["value"], largest_difference(mine, plain))
        gradients = (torch.autograd.grad(out, tensors, upstream_of(out)) for out in (mine, plain))
        worst["gradient"] = max(worst["gradient"], largest_difference(*gradients))
    return worst


def upstream_of(outputs) -> list[torch.Tensor]:
    """A gradient for each output, not the same for any two."""
    return [
        torch.linspace(-1, 1 + number, out.numel(), device=out.device).view_as(out).to(out.dtype)
        for number, out in enumerate(outputs)
    ]


def compare_gelu(device: str, dtype: torch.dtype, kernel) -> dict[str, float]:
    """Bias and GELU, exact and tanh, gated or not, with and without bias; far out to both sides too."""
    worst = {"value": 0.0, "gradient": 0.0}
    generator = torch.Generator().manual_seed(2)
    for tanh, gated, bias in GELUS:
        width = 2100 if gated else 1050  # more than one block of columns
        x = torch.randn(5, width, generator=generator) * 3
        x[0, :4] = torch.tensor([-40.0, -6.0, 6.0, 40.0])
        tensors = [x, torch.randn(width, generator=generator)][: 2 if bias else 1]
        tensors = [tensor.to(device, dtype).requires_grad_() for tensor in tensors]
        mine = kernel(tensors[0], tensors[1] if bias else None, tanh, gated)
        total = tensors[0] + tensors[1] if bias else tensors[0]
        value, gate = (total.split(1050, dim=1)) if gated else (total, 1.0)
        plain = F.gelu(value, approximate="tanh" if tanh else "none") * gate
        worst["value"] = max(worst["value"], largest_difference([mine], [plain]))
        gradients = (torch.autograd.grad(out, tensors, upstream_of([out])) for out in (mine, plain))
        worst["gradient"] = max(worst["gradient"], largest_difference(*gradients))
    return worst


def check_dropout(device: str, kernel) -> dict[str, float]:
    """The share dropped, seen from outside; the value and the gradients given that mask."""
    x, residual = torch.rand(64, 48, device=device) + 0.5, torch.zeros(64, 48, device=device)
    weight, bias, share = torch.ones(48, device=device), torch.zeros(48, device=device), 0.25
    tensors = [t.requires_grad_() for t in (x, residual, weight, bias)]
    out = kernel(*tensors, 1e-5, share)
    upstream = torch.linspace(-1, 1, out.numel(), device=device).view_as(out)
    found = torch.autograd.grad(out, tensors, upstream)
    keep = found[0] != 0  # a dropped element has no gradient, a kept one almost surely has
    plain = F.layer_norm(residual + x * keep / (1 - share), weight.shape, weight, bias, 1e-5)
    wanted = torch.autograd.grad(plain, tensors, upstream)
    torch.manual_seed(5)
    first = kernel(*tensors, 1e-5, share)
    second = kernel(*tensors, 1e-5, share)
    torch.manual_seed(5)
    return {
        "dropped": 1 - keep.float().mean().item(),
        "value": largest_difference([out], [plain]),
        "gradient": largest_difference(found, wanted),
        "two_draws": float(torch.equal(first, second)),
        "same_seed": float(torch.equal(first, kernel(*tensors, 1e-5, share))),
    }


def compare_models(kernels: str, table: dict, device: str = "cpu") -> dict[str, float]:
    """Loss and gradients of a whole model with `kernels` against the plain one on the CPU, without dropout."""
    results = []
    for name, place in (("plain", "cpu"), (kernels, device)):
        torch.manual_seed(0)
        settings = {**SMALL, **table, "kernels": name, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        model = BertForPreTraining(load_encoder_config(settings)).to(place).train()
        out = model(example_batch().to(place))
        (out.mlm_loss_sum + out.nsp_loss_sum).backward()
        tensors = [tensor.grad.cpu() for tensor in model.parameters()]
        results.append((out.mlm_loss_sum.detach().cpu(), int(out.mlm_correct), tensors))
    (plain_loss, plain_correct, plain), (loss, correct, found) = results
    return {
        "loss": abs(float(loss - plain_loss)),
        "correct": float(correct == plain_correct),
        "gradient": largest_difference(found, plain),
    }


def example_batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 101, (20,), generator=generator)
    return Batch(
        input_ids_T=ids,
        segment_ids_T=torch.zeros(20, dtype=torch.int64),
        position_ids_T=torch.cat([torch.arange(12), torch.arange(8)]),
        cu_seqlens=torch.tensor([0, 12, 20], dtype=torch.int32),
        max_seqlen=12,
        mask_positions_P=torch.tensor([1, 4, 9, 13, 17]),
        mask_labels_P=torch.randint(5, 101, (5,), generator=generator),
        cls_positions_E=torch.tensor([0, 12]),
        nsp_labels_E=torch.tensor([0, 1]),
    )


def test_the_table_of_choices(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    choose = choose_kernels.__wrapped__
    installed: set[str] = set()
    monkeypatch.setattr("pretrain.kernels.find_spec", lambda name: object() if name in installed else None)
    assert choose("auto", "cpu") == choose("plain", "cuda") == choose("auto", "cuda") == Kernels("torch", "chunked")
    with pytest.raises(ValueError, match="triton is not installed"):
        choose("triton", "cuda")
    installed |= {"triton"}
    assert choose("auto", "cuda") == Kernels("compile", "chunked")
    assert choose("triton", "cuda") == Kernels("triton", "chunked")
    installed |= {"liger_kernel"}
    assert choose("auto", "cuda") == Kernels("compile", "liger")
    assert choose("auto", "cpu") == Kernels("torch", "chunked")
    with pytest.raises(ValueError, match=r"model.kernels=triton runs on CUDA"):
        choose("triton", "cpu")
    assert choose("compile", "cpu") == Kernels("compile", "chunked")


def test_the_start_of_a_run_names_the_choices():
    lines = describe_kernels(load_encoder_config(SMALL), torch.device("cpu"), torch.float32)
    assert lines[0].startswith("attention: padded") and lines[0].endswith("dropout 0.1")
    assert (
        lines[1]
        == "dropout + residual + norm, bias + GELU: torch's own kernels; masked-token head: linear + cross entropy in slices"
    )


def test_plain_sublayer_norm_is_the_formula_and_counts_as_a_norm():
    norm = SublayerNorm(48, eps=1e-5)
    x, residual, weight, bias = rows(True)
    with torch.no_grad():
        norm.weight.copy_(weight)
        norm.bias.copy_(bias)
    chosen = choose_kernels("plain", "cpu")
    assert torch.equal(norm(x, residual, 0.0, chosen), norm_of(x, residual, weight, bias))
    assert isinstance(norm, torch.nn.LayerNorm)
    torch.manual_seed(0)
    assert not torch.equal(norm(x, residual, 0.5, chosen), norm_of(x, residual, weight, bias))


def test_the_norm_between_sublayers_gives_the_sum_and_its_norm():
    norm = BetweenNorm(48, eps=1e-5)
    x, residual, weight, bias = rows(True)
    with torch.no_grad():
        norm.weight.copy_(weight)
        norm.bias.copy_(bias)
    chosen = choose_kernels("plain", "cpu")
    total, normed = norm(x, residual, 0.0, chosen)
    assert torch.equal(total, x + residual) and torch.equal(normed, norm_of(x, residual, weight, bias))
    total, normed = norm(x, residual, 0.5, chosen)
    assert not torch.equal(total, x + residual)
    assert torch.equal(normed, norm_of(torch.zeros_like(total), total, weight, bias))


@pytest.mark.parametrize(("tanh", "gated", "bias"), GELUS)
def test_plain_gelu_layer_is_the_formula_and_counts_as_a_linear_layer(tanh, gated, bias):
    layer = GeluLinear(48, 16, bias=bias, tanh=tanh, gated=gated)
    x = rows(False)[0]
    inner = F.linear(x, layer.weight, layer.bias)
    assert inner.shape[1] == (32 if gated else 16) and isinstance(layer, torch.nn.Linear)
    expected = F.gelu(inner[:, :16], approximate="tanh" if tanh else "none") * (inner[:, 16:] if gated else 1.0)
    found = layer(x, choose_kernels("plain", "cpu"))
    assert torch.equal(found, expected)
    # The same formula is what `compile` compiles.
    torch.testing.assert_close(_plain_bias_gelu(F.linear(x, layer.weight), layer.bias, tanh, gated), expected)


def test_what_is_compiled_is_the_formula():
    tensors = rows(True)
    assert torch.equal(_plain_norm(*tensors, 1e-5, 0.0), norm_of(*tensors))
    torch.manual_seed(1)
    total, dropped = _plain_sum_and_norm(*tensors, 1e-5, 0.5)
    torch.manual_seed(1)
    assert torch.equal(dropped, norm_of(F.dropout(tensors[0], 0.5), *tensors[1:]))
    assert torch.equal(dropped, norm_of(torch.zeros_like(total), total, *tensors[2:]))


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    """What this file finds as a script, in Triton's interpreter."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'clozeworks[cuda]'")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_triton_kernels_equal_plain_in_the_interpreter(interpreted):
    for norm in ("norm", "sum_and_norm"):
        assert interpreted[norm]["value"] < 2e-6 and interpreted[norm]["gradient"] < 5e-6
    assert interpreted["gelu"]["value"] < 2e-5 and interpreted["gelu"]["gradient"] < 2e-5  # values to 200
    for model in ("model", "modern_model"):
        assert interpreted[model]["loss"] < 1e-4 and interpreted[model]["correct"]
        assert interpreted[model]["gradient"] < 1e-5


@pytest.mark.slow
def test_triton_dropout_drops_the_share_and_the_backward_pass_draws_the_same_mask(interpreted):
    for found in (interpreted["dropout"], interpreted["pre_norm_dropout"]):
        assert found["dropped"] == pytest.approx(0.25, abs=0.03)  # of 3,072: four standard deviations
        assert found["value"] < 5e-6 and found["gradient"] < 5e-5  # weight and bias sum 64 rows
        assert found["same_seed"] and not found["two_draws"]


@pytest.mark.slow
def test_liger_head_equals_the_chunked_one_in_the_interpreter(interpreted):
    if "liger" not in interpreted:
        pytest.skip("liger-kernel is not installed: pip install 'clozeworks[cuda]'")
    assert interpreted["liger"]["loss"] < 1e-4 and interpreted["liger"]["correct"]
    assert interpreted["liger"]["gradient"] < 1e-4


@pytest.mark.slow
def test_triton_kernels_compile_for_a_gpu_that_is_not_here(tmp_path, monkeypatch):
    """The interpreter runs Python: that the kernels compile is seen here, down to the assembly of compute capability 9.0."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'clozeworks[cuda]'")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pretrain import triton_gelu, triton_norm

    half = dict.fromkeys(["x", "residual", "weight", "bias", "y", "total", "dy", "dtotal", "dx", "dresidual"], "*bf16")
    single = dict.fromkeys(["mean", "rstd", "dweight", "dbias"], "*fp32") | {"eps": "fp32", "rate": "fp32"}
    types = half | single | dict.fromkeys(["seed", "rows", "width"], "i32")
    gelus = [{"TANH": t, "GATED": g, "HAS_BIAS": b, "BLOCK": 1024} for t, g, b in ((0, 0, 1), (1, 1, 0))]
    cases = [(getattr(triton_gelu, name), options) for name in ("_forward", "_backward") for options in gelus]
    cases += [
        (triton_norm._forward, {"HAS_BIAS": True, "BLOCK": 1024}),
        (triton_norm._backward, {"BOTH": True, "BLOCK": 1024}),
    ]
    for kernel, options in cases:
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=options)
        assert "sm_90" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_compiled_kernels_equal_plain_on_a_gpu():
    for both, function in ((False, _plain_norm), (True, _plain_sum_and_norm)):
        found = compare_norm("cuda", torch.float32, _compiled(function), both)
        assert found["value"] < 1e-4 and found["gradient"] < 1e-4
    found = compare_gelu("cuda", torch.float32, _compiled(_plain_bias_gelu))
    assert found["value"] < 1e-3 and found["gradient"] < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_kernels_equal_plain_on_a_gpu(dtype):
    from pretrain.triton_gelu import bias_gelu
    from pretrain.triton_norm import dropout_add_and_norm, dropout_add_norm

    limit = 1e-4 if dtype == torch.float32 else 0.2
    for both, kernel in ((False, dropout_add_norm), (True, dropout_add_and_norm)):
        found = compare_norm("cuda", dtype, kernel, both)
        assert found["value"] < limit and found["gradient"] < limit
    found = compare_gelu("cuda", dtype, bias_gelu)
    assert found["value"] < 10 * limit and found["gradient"] < 10 * limit  # values to 200
    assert check_dropout("cuda", dropout_add_norm)["gradient"] < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("table", [{}, MODERN])
@pytest.mark.parametrize("kernels", ["plain", "auto", "compile", "triton"])
def test_models_on_a_gpu_equal_the_plain_one_on_the_cpu(kernels, table):
    if kernels == "triton" and find_spec("triton") is None:
        pytest.skip("triton is not installed")
    found = compare_models(kernels, table, "cuda")
    assert found["loss"] < 1e-2 and found["gradient"] < 1e-2


def compare_heads() -> dict[str, float]:
    """liger's head against ours, with padding rows in the table and a factor on the loss."""
    from pretrain.linear_cross_entropy import liger_cross_entropy, linear_cross_entropy

    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((9, 16), (104, 16), (104,))]
    labels = torch.randint(0, 101, (9,), generator=generator)
    with torch.no_grad():
        labels[:4] = (tensors[0] @ tensors[1].T + tensors[2])[:4, :101].argmax(1)
    ours, our_hits = linear_cross_entropy(*tensors, labels, 101, 4)
    wanted = torch.autograd.grad(ours * 0.5, tensors)
    theirs, their_hits = liger_cross_entropy(*tensors, labels, 101)
    found = torch.autograd.grad(theirs * 0.5, tensors)
    return {
        "loss": abs(float(ours.detach() - theirs.detach())),
        "correct": float(int(our_hits) == int(their_hits) >= 4),
        "gradient": largest_difference(found, wanted),
    }


if __name__ == "__main__":
    from pretrain.triton_gelu import bias_gelu
    from pretrain.triton_norm import dropout_add_and_norm, dropout_add_norm

    torch.manual_seed(0)
    report = {
        "norm": compare_norm("cpu", torch.float32, dropout_add_norm),
        "sum_and_norm": compare_norm("cpu", torch.float32, dropout_add_and_norm, both=True),
        "gelu": compare_gelu("cpu", torch.float32, bias_gelu),
        "dropout": check_dropout("cpu", dropout_add_norm),
        "pre_norm_dropout": check_dropout("cpu", lambda *arguments: dropout_add_and_norm(*arguments)[1]),
        "model": compare_models("triton", {}),
        "modern_model": compare_models("triton", MODERN),
    }
    if find_spec("liger_kernel") is not None:
        report["liger"] = compare_heads()
    print(json.dumps(report))
