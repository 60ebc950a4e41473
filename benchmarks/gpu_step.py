"""Training step on one GPU: BERT-base and -large at 128 and 512 tokens, bf16, through DeepSpeed ZeRO-1 as a run does it.

Prints real tokens (no padding) per second, memory and MFU, beside published figures. Batches are made up, full but for one
example in ten; their copy to the device is part of the step. FLOPs count matrix products only:

    MFU = 3 * (T * L * (2 * (4 D^2 + 2 D I) + 4 D S) + P * (2 D^2 + 2 D V)) / seconds / peak

with T tokens, L layers, D hidden, I intermediate, S mean length, P predictions, V vocabulary rows, and the peak of the data
sheet. Without a GPU `--quick` runs the same code on a CPU with bert-tiny; its numbers mean nothing.

    python benchmarks/gpu_step.py [--presets bert-base bert-large] [--lengths 128 512] [--tokens 32768] [--steps 30]
"""

from __future__ import annotations

import argparse
import gc
import time

import torch
from measure import machine, report
from train_step import VOCABULARY, make_batch

from cluster.world import World
from data_pipeline.records import Batch
from pretrain import engine
from pretrain.config import TrainConfig
from pretrain.encoder import BertForPreTraining
from pretrain.engine import TrainEngine
from pretrain.kernels import describe_kernels
from pretrain.model_config import load_encoder_config
from pretrain.parameter_groups import parameter_groups
from pretrain.telemetry import device_peak, memory_megabytes, training_flops

MFU_GOAL = 0.45
TOKENS_GOAL = 312_000
"""Real tokens per second of ModernBERT-base on an H100 (https://arxiv.org/abs/2412.13663), as published figures give them."""
PUBLISHED = (
    ("DLE, BERT-large, 128 tokens, A100-80GB", "74,200 tokens/s, 45% of 312 TFLOP/s"),
    ("DeepSpeed, BERT-large, 128 tokens, V100", "34,800 tokens/s, 52% of 125 TFLOP/s"),
    ("DeepSpeed, BERT-large, 512 tokens, V100", "26,600 tokens/s, 43% of 125 TFLOP/s"),
    ("MLPerf 4.0, BERT-large, 512 tokens packed, H100", "about 250,000 tokens/s, 49% of 989 TFLOP/s (runs FP8)"),
    ("MosaicML, BERT-base of Hugging Face, A100", "110,800 padded tokens/s, 24% of 312 TFLOP/s"),
    ("ModernBERT-base, H100", "about 312,000 tokens/s, at least 23% of 989 TFLOP/s"),
)


def make_engine(preset: str, length: int, examples: int, device: torch.device) -> TrainEngine:
    """A fresh model in bf16 with fp32 masters and AdamW, dropout as in the paper."""
    model = load_encoder_config({"preset": preset, "vocab_size": VOCABULARY, "pad_vocab_to": 64})
    tree = {
        "model": model.model_dump(),
        "data": {"dir": "made-up", "max_seq_length": length},
        "run": {"dir": "unused"},
        "train": {"steps": 1, "global_batch": examples, "micro_batch": examples},
        "optimizer": {"lr": 1e-5},
        "deepspeed": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    }
    config = TrainConfig.model_validate(tree)
    torch.manual_seed(0)
    bert = BertForPreTraining(config.model)
    return TrainEngine(bert, parameter_groups(bert, 0.01), config=config, world=World(), device=device)


def seconds_of_a_step(trainer: TrainEngine, batches: list[Batch], steps: int) -> float:
    """Mean over `steps`, after as many as the kernels need to be compiled for these batches."""
    wait = torch.cuda.synchronize if trainer.device.type == "cuda" else lambda: None
    begin = 0.0
    for number in range(3 * len(batches) + steps):
        if number == 3 * len(batches):
            wait()
            begin = time.perf_counter()
        trainer.step([batches[number % len(batches)]], number=number + 1, lr=1e-5)
    wait()
    return (time.perf_counter() - begin) / steps


def measure(preset: str, length: int, examples: int, steps: int, device: torch.device) -> tuple[float, float]:
    """Real tokens per second and MFU."""
    trainer = make_engine(preset, length, examples, device)
    config = trainer.config.model
    for line in describe_kernels(config, device, torch.bfloat16):
        print(f"  {line}")
    batches = [make_batch("pairs", examples, length, seed) for seed in range(3)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = seconds_of_a_step(trainer, batches, steps)
    tokens, predictions = (sum(counts) / len(batches) for counts in zip(*map(sizes, batches), strict=True))
    flops = training_flops(config, tokens=tokens, predictions=predictions, examples=examples)
    peak = device_peak(device, "bf16")
    rate, share = tokens / seconds, flops / seconds / peak.flops
    print(
        f"{preset}, {examples} examples to {length} tokens: {rate:,.0f} real tokens/s, {seconds * 1000:.1f} ms a step, "
        f"{memory_megabytes(device):,.0f} MB, MFU {share:.1%} = {flops / 1e12:.2f} TFLOP / {seconds:.4f} s / "
        f"{peak.flops / 1e12:.1f} TFLOP/s ({peak.source})"
    )
    return rate, share


def sizes(batch: Batch) -> tuple[int, int]:
    """Tokens and predictions."""
    return batch.tokens, len(batch.mask_labels_P)


def main() -> None:
    """Measure and print; one JSON line a size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="bert-tiny, few steps, also on a CPU")
    parser.add_argument("--presets", nargs="+", default=["bert-base", "bert-large"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--tokens", type=int, default=32768, help="of one step, padding included")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    device = engine.start_ranks(World())
    if options.quick:
        options.presets, options.lengths, options.tokens, options.steps = ["bert-tiny"], [32], 256, 2
    elif device.type != "cuda":
        print("no GPU here; nothing was measured (--quick runs the code on a CPU)")
        engine.stop_ranks()
        return
    print(f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else machine()}, torch {torch.__version__}")
    for preset in options.presets:
        for length in options.lengths:
            rate, share = measure(preset, length, max(1, options.tokens // length), options.steps, device)
            gc.collect()
            name = f"gpu_step.{preset}.{length}"
            report(f"{name}.mfu", share, "share of the peak", MFU_GOAL, 1.0)
            if preset == "bert-base":
                report(name, rate, "real tokens/s", TOKENS_GOAL, 1.0)
    print("published:")
    for system, figures in PUBLISHED:
        print(f"  {system}: {figures}")
    engine.stop_ranks()


if __name__ == "__main__":
    main()
