"""Training step of BERT on a CPU: ours on flat tokens against `transformers.BertForPreTraining` on padded batches.

Same weights, same examples, same masked positions, same optimizer (torch's fused AdamW), fp32, dropout as in the paper,
forward + backward + update. The peer is run as its users run it: ids, attention mask, segments and labels padded to the
longest row of the batch, -100 where nothing is predicted. The two alternate, and each keeps its best time for each of
three batches. Pairs come from shards of the embedded corpus; with `--made-up` their lengths are those that a corpus of
long documents gives: that corpus's are short, so that its batches to 512 tokens are a third padding. Lengths as MRPC has
them, and everything with `--quick`, are made up too.

    python benchmarks/train_step.py [--quick] [--preset bert-base] [--length 512] [--shape pairs|mrpc] [--made-up]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measure import ROOT, machine, peak_megabytes, report

from data_pipeline.loader import build_loader
from data_pipeline.records import Batch
from pretrain.encoder import BertForPreTraining
from pretrain.hf_config import to_hf_config
from pretrain.model_config import EncoderConfig, load_encoder_config
from pretrain.name_map import to_hf_tensors
from pretrain.parameter_groups import parameter_groups

VOCABULARY = 30522
GOALS = {("bert-mini", "pairs"): 3.0, ("bert-base", "pairs"): 1.2, ("bert-mini", "mrpc"): 2.0}


def lengths_of(shape: str, examples: int, longest: int, rng: np.random.Generator) -> np.ndarray:
    """Example lengths: `pairs` are full but for one in ten, as the data pipeline makes them; `mrpc` as that task's."""
    if shape == "pairs":
        short = rng.random(examples) < 0.1
        return np.where(short, rng.integers(5, longest + 1, examples), longest)
    # MRPC with the uncased vocabulary: mean 53, standard deviation 12, at most 103 tokens.
    return np.clip(rng.normal(53, 12, examples).round().astype(int), 16, min(longest, 103))


def make_batch(shape: str, examples: int, longest: int, seed: int) -> Batch:
    """A batch with 15 % of each example predicted, 80 % of these masked (id 103)."""
    rng = np.random.default_rng(seed)
    lengths = lengths_of(shape, examples, longest, rng)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    labels = rng.integers(1000, VOCABULARY, starts[-1])
    picked = [
        start + np.sort(rng.permutation(np.arange(1, length - 1))[: max(1, round(0.15 * length))])
        for start, length in zip(starts[:-1], lengths, strict=True)
    ]
    masked = np.concatenate(picked)
    inputs = labels.copy()
    inputs[masked[rng.random(len(masked)) < 0.8]] = 103
    inputs[starts[:-1]], inputs[starts[1:] - 1] = 101, 102
    positions = np.concatenate([np.arange(length) for length in lengths])
    segments = np.concatenate([(np.arange(length) >= length // 2).astype(int) for length in lengths])
    tensor = torch.from_numpy
    return Batch(
        input_ids_T=tensor(inputs),
        segment_ids_T=tensor(segments),
        position_ids_T=tensor(positions),
        cu_seqlens=tensor(starts.astype(np.int32)),
        max_seqlen=int(lengths.max()),
        mask_positions_P=tensor(masked),
        mask_labels_P=tensor(labels[masked]),
        cls_positions_E=tensor(starts[:-1]),
        nsp_labels_E=tensor(rng.integers(0, 2, examples)),
    )


def padded(batch: Batch) -> dict[str, torch.Tensor]:
    """The same batch as `transformers` takes it."""
    starts = batch.cu_seqlens.long()
    real = torch.arange(batch.max_seqlen) < (starts[1:] - starts[:-1])[:, None]
    rows = {"input_ids": batch.input_ids_T, "token_type_ids": batch.segment_ids_T}
    result = {name: torch.zeros(real.shape, dtype=torch.int64) for name in rows}
    for name, values in rows.items():
        result[name][real] = values
    labels_T = torch.full_like(batch.input_ids_T, -100)
    labels_T[batch.mask_positions_P] = batch.mask_labels_P
    result["labels"] = torch.full(real.shape, -100)
    result["labels"][real] = labels_T
    return {**result, "attention_mask": real.long(), "next_sentence_label": batch.nsp_labels_E}


def our_step(config: EncoderConfig, batches: list[Batch]) -> tuple[BertForPreTraining, Callable[[int], float]]:
    """The model and one training step of ours, returning the loss."""
    torch.manual_seed(0)
    model = BertForPreTraining(config).train()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=1e-4, fused=True)

    def step(number: int) -> float:
        losses = model(batches[number % len(batches)])
        loss = losses.mlm_loss_sum / losses.mlm_count + losses.nsp_loss_sum / losses.nsp_count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return model, step


def peer_step(config: EncoderConfig, batches: list[Batch]) -> Callable[[int], float]:
    """One training step of `transformers` from the same start."""
    import transformers

    torch.manual_seed(0)
    start = BertForPreTraining(config)
    content = to_hf_config(config)
    model = transformers.BertForPreTraining(transformers.BertConfig(**content))
    model.load_state_dict(to_hf_tensors(start.state_dict(), config), strict=False)
    model.train()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=1e-4, fused=True)
    rows = [padded(batch) for batch in batches]

    def step(number: int) -> float:
        loss = model(**rows[number % len(rows)]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def product_shapes(config: EncoderConfig, batch: Batch) -> list[tuple[int, int, int, int]]:
    """(times, rows, inner, columns) of the weight products of one forward pass: layers, head transform, vocabulary."""
    width, inner, tokens, predictions = config.hidden, config.intermediate, batch.tokens, len(batch.mask_labels_P)
    layer = [(tokens, width, 3 * width), (tokens, width, width), (tokens, width, inner), (tokens, inner, width)]
    head = [(1, predictions, width, width), (1, predictions, width, config.padded_vocab_size)]
    return [(config.layers, *shape) for shape in layer] + head


class ProductClock:
    """Best time of each product of a step alone: forward, gradient of the input, gradient of the weight."""

    def __init__(self, config: EncoderConfig, batch: Batch, now: Callable[[], float]) -> None:
        self._now = now
        self._cases = []
        for times, rows, inner, columns in product_shapes(config, batch):
            x, weight, out = torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(rows, columns)
            pairs = ((x, weight.t()), (out, weight), (out.t(), x))
            self._cases += [[times, 2 * rows * inner * columns, left, right, float("inf")] for left, right in pairs]

    def measure(self) -> None:
        """One round over all products."""
        for case in self._cases:
            begin = self._now()
            torch.mm(case[2], case[3])
            case[4] = min(case[4], self._now() - begin)

    def peak(self) -> float:
        """FLOP/s over all products of a step."""
        return sum(case[0] * case[1] for case in self._cases) / sum(case[0] * case[4] for case in self._cases)


def step_flops(config: EncoderConfig, batch: Batch) -> float:
    """Products of forward and backward (3 x forward): 2 FLOP a weight and token, 4*L*D a token in attention."""
    width, inner = config.hidden, config.intermediate
    lengths = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).double()
    layer = 2 * batch.tokens * (4 * width * width + 2 * width * inner) + 4 * width * float((lengths**2).sum())
    head = 2 * len(batch.mask_labels_P) * (width * width + width * config.vocab_size)
    return 3 * (config.layers * layer + head)


def shard_batches(length: int, examples: int, folder: Path) -> list[Batch]:
    """Three batches from shards of the embedded corpus with examples up to `length`, built at the first call."""
    if not (folder / "train" / "index.json").is_file():
        settings = {"data.dir": folder, "data.max_seq_length": length, "corpus.max_megabytes": 3}
        overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        config = ["--config", str(ROOT / "configs" / "demo.toml"), *overrides]
        subprocess.run([sys.executable, "-m", "data_pipeline.build", *config], check=True, cwd=ROOT, stdout=sys.stderr)
    with build_loader(folder / "train", global_batch=examples, micro_batch=examples) as loader:
        return [next(loader)[0] for _ in range(3)]


def memory_of(arguments: list[str], side: str) -> float:
    """Peak resident memory of a process that runs a few steps of one side alone."""
    command = [sys.executable, __file__, *arguments, "--memory-of", side]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    """Measure and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, small batch")
    parser.add_argument("--preset", default="", help="default: bert-mini; bert-tiny with --quick")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--examples", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--shape", choices=["pairs", "mrpc"], default="pairs")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: on a shared machine, with 1 thread"
    )
    parser.add_argument(
        "--data", type=Path, help="data folder for pairs; default: runs/bench/data-LENGTH, built if absent"
    )
    parser.add_argument("--made-up", action="store_true", help="full pairs but for one in ten, no shards")
    parser.add_argument("--memory-of", choices=["ours", "peer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.preset = options.preset or ("bert-tiny" if options.quick else "bert-mini")
    examples = options.examples or (8 if options.quick else 32)
    steps = options.steps or (3 if options.quick else 12)
    config = load_encoder_config({"preset": options.preset, "vocab_size": VOCABULARY})
    made = options.quick or options.made_up or options.shape == "mrpc"
    if made:
        batches = [make_batch(options.shape, examples, options.length, seed) for seed in range(3)]
    else:
        batches = shard_batches(options.length, examples, options.data or ROOT / f"runs/bench/data-{options.length}")
    if options.memory_of:
        step = our_step(config, batches)[1] if options.memory_of == "ours" else peer_step(config, batches)
        for number in range(3):
            step(number)
        print(peak_megabytes())
        return
    sides = {"ours": our_step(config, batches)[1], "peer": peer_step(config, batches)}
    now = time.process_time if options.clock == "cpu" else time.perf_counter
    clock = ProductClock(config, batches[0], now)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(steps + 1):
        clock.measure()
        for name, step in sides.items():
            begin = now()
            step(0 if number == 0 else number - 1)
            if number:
                times[name].append(now() - begin)
    rates = {}
    for name, taken in times.items():
        best = [min(taken[first :: len(batches)]) for first in range(len(batches)) if taken[first :: len(batches)]]
        rates[name] = sum(batch.tokens for batch in batches[: len(best)]) / sum(best)
    speed = step_flops(config, batches[0]) / min(times["ours"][:: len(batches)])
    source = "made-up batches" if made else "batches from shards"
    real = np.mean([batch.tokens / batch.examples for batch in batches])
    print(
        f"{options.preset}, {examples} examples to {options.length} tokens ({real:.0f} on average), {source}; "
        f"{machine()}, {torch.get_num_threads()} threads, {options.clock} time"
    )
    memory = {}
    if not options.quick:
        arguments = ["--preset", options.preset, "--length", str(options.length), "--shape", options.shape]
        arguments += ["--made-up"] if options.made_up else []
        memory = {name: memory_of([*arguments, "--examples", str(examples)], name) for name in sides}
    for name in sides:
        peak = f"peak memory {memory[name]:,.0f} MB" if memory else "peak memory: in the full form only"
        print(f"  {name}: {rates[name]:,.0f} real tokens/s, {peak}")
    print(
        f"  {speed / 1e9:.0f} GFLOP/s in matrix products of the step, {clock.peak() / 1e9:.0f} in the same products alone: "
        f"{speed / clock.peak():.0%} of the peak"
    )
    goal = GOALS.get((options.preset, options.shape), 1.2)
    name = f"train_step.{options.preset}.{options.shape}{options.length}{'.made_up' if options.made_up else ''}"
    report(name, rates["ours"], "real tokens/s", rates["peer"], goal)


if __name__ == "__main__":
    main()
