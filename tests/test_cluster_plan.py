"""The planner against the real model, ZeRO's paper and published runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.plan import DEVICES, Plan, PlanError, Run, Shape, activation_bytes, main, plan, shape_of, state_bytes
from pretrain.encoder import BertForPreTraining
from pretrain.model_config import load_encoder_config
from pretrain.telemetry import training_flops

ROOT = Path(__file__).parent.parent
LARGE = Shape(layers=24, hidden=1024, heads=16, intermediate=4096, pad_vocab_to=1)
BASE = Shape(pad_vocab_to=1)
PRESETS = ROOT / "configs" / "models"


def planned(shape: Shape, device: str, *, gpus: int, sequences: int, mfu: float = 0, **more: float) -> Plan:
    """A run of so many sequences, in steps of 64 a GPU."""
    batch = 64 * gpus
    numbers = {"length": 128, "network_gbytes": 25.0} | more
    run = Run(
        gpus=gpus,
        steps=round(sequences / batch),
        global_batch=batch,
        micro_batch=64,
        mfu=mfu or DEVICES[device].mfu,
        tflops=DEVICES[device].tflops,
        **numbers,  # type: ignore[arg-type]
    )
    return plan(shape, run)


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.toml")))
@pytest.mark.parametrize(
    "changes", [{}, {"norm": "pre", "biases": False, "gated": True, "positions": "rotary", "layers": 3}]
)
def test_parameters_equal_the_real_model(name: str, changes: dict[str, object]) -> None:
    """BERT, RoBERTa, ALBERT (factorised, shared), DistilBERT and ModernBERT (gated, no biases), as they are and mixed."""
    table = {"preset": name, "vocab_size": 30522, **changes}
    config = load_encoder_config(table)
    if config.bilstm:
        pytest.skip("the planner knows no BiLSTM")
    with torch.device("meta"):
        model = BertForPreTraining(config)
    assert shape_of({"model": table}, PRESETS).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["bert-tiny", "albert-base", "modern-base", "distilbert-base"])
def test_operations_equal_those_that_a_run_reports(name: str) -> None:
    table = {"preset": name, "vocab_size": 30522}
    for length in (64, 512):
        reported = training_flops(load_encoder_config(table), tokens=length * 10, predictions=length, examples=10)
        assert shape_of({"model": table}, PRESETS).flops_per_token(length, 0.1) * length * 10 == pytest.approx(reported)


def test_activations_of_gated_and_shared_layers_by_hand() -> None:
    modern = shape_of({"model": {"preset": "modern-base"}}, PRESETS)
    assert activation_bytes(modern, 1, checkpointing=False, predicted=0.0) == 22 * (18 * 768 + 8 * 1152)
    albert = shape_of(
        {"model": {"preset": "albert-base"}}, PRESETS
    )  # weights are shared, what passes through them is not
    assert activation_bytes(albert, 1, checkpointing=False, predicted=0.0) == 12 * 34 * 768


def test_parameters_equal_the_published_checkpoints() -> None:
    # BertForPreTraining of bert-base-uncased and bert-large-uncased
    assert (BASE.parameters, LARGE.parameters) == (110_106_428, 336_226_108)


def test_state_equals_the_example_of_zeros_paper() -> None:
    """Figure 1 of https://arxiv.org/abs/1910.02054: 7.5 billion parameters on 64 GPUs."""
    billions = [state_bytes(7_500_000_000, 64, stage) / 1e9 for stage in range(4)]
    assert [round(size, 1) for size in billions] == [120.0, 31.4, 16.6, 1.9]


def test_operations_equal_published_speed() -> None:
    """DeepSpeed's V100 kernels: 272 sequences/s of 128 tokens are 64 TFLOPS, 52 of 512 are 53."""
    assert 272 * 128 * LARGE.flops_per_token(128, 0.15) / 1e12 == pytest.approx(64, rel=0.04)
    assert 52 * 512 * LARGE.flops_per_token(512, 0.15) / 1e12 == pytest.approx(53, rel=0.04)


@pytest.mark.parametrize(
    ("shape", "device", "gpus", "sequences", "more", "hours", "tolerance"),
    [
        # NVIDIA DLE, BERT-large phase 1: 65,536 x 7,038 at 138,294 sequences/s on 256 A100
        (LARGE, "a100-80gb", 256, 65_536 * 7_038, {}, 65_536 * 7_038 / 138_294 / 3600, 0.10),
        # the same software on one V100-32GB: 224 sequences/s
        (LARGE, "v100-32gb", 1, 1_000_000, {}, 1_000_000 / 224 / 3600, 0.05),
        # 24hBERT: 256 million sequences of BERT-large in 2.74 days on 8 Titan-V
        (LARGE, "titan-v", 8, 256_000_000, {}, 2.74 * 24, 0.05),
        # MosaicBERT's baseline: BERT-base, 286.72 million sequences in 11.5 hours on 8 A100 at 24 % of the peak; its MLM head runs on every token
        (BASE, "a100-80gb", 8, 286_720_000, {"mfu": 0.24, "predicted": 1.0}, 11.5, 0.05),
    ],
)
def test_time_of_published_runs(
    shape: Shape, device: str, gpus: int, sequences: int, more: dict[str, float], hours: float, tolerance: float
) -> None:
    found = planned(shape, device, gpus=gpus, sequences=sequences, **more)
    assert found.total_seconds / 3600 == pytest.approx(hours, rel=tolerance)
    assert found.gpu_hours == pytest.approx(found.total_seconds * gpus / 3600)


def test_network() -> None:
    fast = planned(LARGE, "a100-80gb", gpus=256, sequences=10_000_000)
    slow = planned(LARGE, "a100-80gb", gpus=256, sequences=10_000_000, network_gbytes=1.25)
    assert fast.network_seconds == 0.0
    # 10 Gb/s: 4 bytes a parameter, less what the backward pass of 64 sequences hides
    expected = 4 * LARGE.parameters * 255 / 256 / 1.25e9 - 2 / 3 * slow.compute_seconds
    assert slow.network_seconds == pytest.approx(expected) and expected > 0.9
    stage_3 = planned(LARGE, "a100-80gb", gpus=256, sequences=10_000_000, network_gbytes=1.25, zero_stage=3)
    assert stage_3.network_seconds > slow.network_seconds
    assert planned(LARGE, "a100-80gb", gpus=1, sequences=10_000, network_gbytes=0.001).network_seconds == 0.0


def test_memory_by_hand() -> None:
    """BERT-large, 64 x 128 tokens: 34 x 1024 x 24 + 0.15 x 6 x 30522 bytes a token, and 16 bytes a parameter."""
    memory = planned(LARGE, "v100-32gb", gpus=1024, sequences=65_536_000).memory_gib
    activations = 8192 * (34 * 1024 * 24 + 0.15 * 6 * 30522) / 2**30
    assert memory[0] == pytest.approx(activations + 16 * 336_226_108 / 2**30)
    assert memory[0] > memory[1] > memory[2] > memory[3] > activations
    saved = planned(LARGE, "v100-32gb", gpus=1024, sequences=65_536_000, checkpointing=True)
    assert saved.memory_gib[1] < memory[1] / 2
    assert saved.compute_seconds == pytest.approx(
        4 / 3 * planned(LARGE, "v100-32gb", gpus=1024, sequences=65_536_000).compute_seconds
    )


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text("[train]\nsteps = 1000\nglobal_batch = 64\nmicro_batch = 32\n")
    words = ["--config", str(tmp_path / "good.toml"), "--device", "a100-80gb", "--gpus-per-node", "2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "global batch     64 = 32 x 1 x 2 GPUs" in out and "GPU-hours" in out and "memory, ZeRO 3" in out
    assert main([*words[:-1], "3"]) == 2
    assert capsys.readouterr().err == "plan: global_batch 64 is no multiple of micro_batch 32 x 3 GPUs\n"
    (tmp_path / "c.toml").write_text("[train]\nsteps = 1\nglobal_batch = 8\n")
    assert main(["--config", str(tmp_path / "c.toml"), "--device", "h100"]) == 2
    assert "key train.micro_batch is missing" in capsys.readouterr().err
    phases = (
        "[[phases]]\nsteps = 900_000\n[[phases]]\nsteps = 100_000\ndata_dir = 'd'\nglobal_batch = 32\nmicro_batch = 4\n"
    )
    (tmp_path / "two.toml").write_text((tmp_path / "good.toml").read_text() + phases)
    words[1] = str(tmp_path / "two.toml")
    assert main([*words, "--length", "128", "512"]) == 0
    out = capsys.readouterr().out
    assert "phase 2: length 512" in out and "32 = 4 x 4 x 2 GPUs" in out and "all phases" in out
    billions = [float(part.split()[-3]) for part in out.splitlines() if "billion tokens" in part]
    assert billions == [7.4, 1.6]
    assert main(words) == 0 and "every phase is planned at length 128" in capsys.readouterr().err
    assert main([*words, "--length", "1", "2", "3"]) == 2
    assert "3 numbers for 2 phases" in capsys.readouterr().err
    with pytest.raises(PlanError, match="knows no BiLSTM"):
        shape_of({"model": {"bilstm": 2}}, PRESETS)
