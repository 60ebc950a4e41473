"""`python -m cluster.plan`: memory, step time, days and GPU-hours of a pretraining run, before it is queued.

Formulas on plain numbers; nothing is measured and no other package is read. Sources: parameters by counting; memory of the
training state from ZeRO (https://arxiv.org/abs/1910.02054, section 3); activations from https://arxiv.org/abs/2205.05198
(equation 2); time from the model's floating point operations and the share of the device's peak that is reached (MFU).
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

GIB = 2**30


class PlanError(ValueError):
    """A plan that cannot be made; the message names the option or key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU as its data sheet says, and what BERT training has been seen to reach on it."""

    tflops: float
    """Dense matrix products in fp16 or bf16, 1e12 operations a second, without sparsity."""
    memory_gib: float
    mfu: float
    """Share of the peak that published BERT-large runs at length 128 reached (0 to 1)."""


DEVICES = {
    "titan-v": Device(tflops=110, memory_gib=12, mfu=0.30),  # 24hBERT, https://arxiv.org/abs/2104.07705
    "v100-32gb": Device(tflops=125, memory_gib=32, mfu=0.43),  # NVIDIA DLE: 224 sequences/s
    "a100-80gb": Device(tflops=312, memory_gib=80, mfu=0.45),  # NVIDIA DLE: 580 sequences/s
    "h100": Device(tflops=989, memory_gib=80, mfu=0.35),  # between ModernBERT (0.31) and MLPerf (0.49, FP8)
    "h200": Device(tflops=989, memory_gib=141, mfu=0.35),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """An encoder of the BERT family with its pre-training heads; names and defaults as in the `[model]` table."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    intermediate: int = 3072
    vocab_size: int = 30522
    pad_vocab_to: int = 8
    max_positions: int = 512
    embedding_size: int = 0
    """Width of a factorised word embedding; 0: the hidden size."""
    share_layers: bool = False
    gated: bool = False
    biases: bool = True
    norm: str = "post"
    positions: str = "learned"
    position_offset: int = 0
    type_vocab: int = 2
    sentence_objective: str = "nsp"
    pooler: bool | None = None
    local_window: int = 0
    global_every: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes below 1.

        Raises:
            PlanError: names the key.
        """
        for name in ("layers", "hidden", "heads", "intermediate", "vocab_size", "pad_vocab_to", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise PlanError(f"model.{name} is {value!r}, expected a number of at least 1")

    @property
    def embedding_width(self) -> int:
        """Width of the word embedding and of the MLM head's output."""
        return self.embedding_size or self.hidden

    @property
    def padded_vocab(self) -> int:
        """Rows of the word embedding."""
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to

    @property
    def layer_matrices(self) -> int:
        """Weights of one layer that every token is multiplied with: query, key, value, output, feed-forward."""
        return 4 * self.hidden**2 + (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All of them, with embeddings, pooler, MLM head (decoder tied) and sentence head."""
        hidden, width, paired = self.hidden, self.embedding_width, self.sentence_objective != "none"
        tables = self.padded_vocab + self.type_vocab
        tables += (self.max_positions + self.position_offset) * (self.positions == "learned")
        embeddings = tables * width + self._norm(width) + ((width + 1) * hidden if self.embedding_size else 0)
        biases = (5 * hidden + (2 if self.gated else 1) * self.intermediate) if self.biases else 0
        layer = self.layer_matrices + biases + 2 * self._norm(hidden)
        layers = layer * (1 if self.share_layers else self.layers)  # with pre-norm the first norm stands at the end
        pooler = hidden**2 + hidden if (paired if self.pooler is None else self.pooler) else 0
        head = hidden * width + (width if self.biases else 0) + self._norm(width) + self.padded_vocab
        return embeddings + layers + pooler + head + ((2 * hidden + 2) if paired else 0)

    def _norm(self, width: int) -> int:
        """Weights of a layer norm."""
        return (2 if self.biases else 1) * width

    def flops_per_token(self, length: int, predicted: float) -> float:
        """Forward and backward, two operations a multiplication; backward is twice the forward.

        Args:
            length: tokens of an example; attention costs grow with it, in local layers only up to their window.
            predicted: share of tokens that the MLM head runs on.
        """
        local = min(length, self.local_window)
        spans = [local if self.local_window and layer % self.global_every else length for layer in range(self.layers)]
        width = self.embedding_width
        head = predicted * 2 * (self.hidden * width + width * self.padded_vocab)
        return 3 * (2 * self.layers * self.layer_matrices + 4 * self.hidden * sum(spans) + head)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """How much is trained, and on what."""

    gpus: int
    steps: int
    global_batch: int
    """Examples of an optimizer step over all ranks."""
    micro_batch: int
    length: int = 128
    """Real tokens of an average example: padding is not computed here."""
    predicted: float = 0.15
    zero_stage: int = 1
    mfu: float
    tflops: float
    network_gbytes: float = 25.0
    """Bandwidth of a GPU to the others in 1e9 bytes a second: 25 is a 200 Gb/s card each, an NVLink node has 200 and more."""
    checkpointing: bool = False
    """Recompute activations in the backward pass."""

    def __post_init__(self) -> None:
        """Refuse what cannot run.

        Raises:
            PlanError: a number out of range, or a batch that the ranks cannot share.
        """
        for name in ("gpus", "steps", "global_batch", "micro_batch", "length", "tflops", "network_gbytes"):
            if getattr(self, name) <= 0:
                raise PlanError(f"{name} is {getattr(self, name)}, expected more than 0")
        if not 0 < self.mfu <= 1:
            raise PlanError(f"mfu is {self.mfu}, expected a share above 0, up to 1")
        if self.zero_stage not in (0, 1, 2, 3):
            raise PlanError(f"zero_stage is {self.zero_stage}, expected 0, 1, 2 or 3")
        if self.global_batch % (self.micro_batch * self.gpus):
            raise PlanError(
                f"global_batch {self.global_batch} is no multiple of micro_batch {self.micro_batch} x {self.gpus} GPUs"
            )


def state_bytes(parameters: int, ranks: int, stage: int) -> float:
    """Training state of one GPU with Adam or LAMB in mixed precision: 16 bytes a parameter, of which ZeRO divides some.

    2 for the half-precision weight, 2 for its gradient, 12 for the fp32 weight and the two moments. Stage 1 divides the 12,
    stage 2 also the gradient, stage 3 everything by the number of ranks.
    """
    whole = {0: 16, 1: 4, 2: 2, 3: 0}[stage]
    return parameters * (whole + (16 - whole) / ranks)


def activation_bytes(shape: Shape, tokens: int, *, checkpointing: bool, predicted: float = 0.15) -> float:
    """Half-precision activations kept for the backward pass of one micro-batch of `tokens`.

    A token and layer keep 18 bytes a unit of width and 4 a unit of the feed-forward's (8 where it is gated), 34 a unit of
    width where that is four times as wide; the attention matrix is not among them: fused attention never stores it. With
    recomputation 2 a unit of width, and all of one layer's. The MLM head adds its logits in half and full precision.
    """
    layer = 18 * shape.hidden + (8 if shape.gated else 4) * shape.intermediate
    kept = 2 * shape.hidden * shape.layers + layer if checkpointing else layer * shape.layers
    return tokens * (kept + predicted * 6 * shape.vocab_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to expect. Times in seconds, memory in GiB a GPU."""

    parameters: int
    memory_gib: dict[int, float]
    """ZeRO stage -> state and activations, without the allocator's waste and CUDA's own (leave 2 GiB or so)."""
    compute_seconds: float
    """Of one optimizer step."""
    network_seconds: float
    """Of one optimizer step, what is not hidden behind the backward pass."""
    tokens_per_second: float
    total_seconds: float
    gpu_hours: float

    @property
    def step_seconds(self) -> float:
        """One optimizer step."""
        return self.compute_seconds + self.network_seconds


def plan(shape: Shape, run: Run) -> Plan:
    """Put the formulas together."""
    micro_steps = run.global_batch // (run.micro_batch * run.gpus)
    micro_tokens = run.micro_batch * run.length
    flops = shape.flops_per_token(run.length, run.predicted) * (4 / 3 if run.checkpointing else 1)
    micro_seconds = micro_tokens * flops / (run.tflops * 1e12 * run.mfu)
    network = network_seconds(shape.parameters, run, micro_steps=micro_steps, micro_seconds=micro_seconds)
    compute = micro_steps * micro_seconds
    total = run.steps * (compute + network)
    activations = activation_bytes(shape, micro_tokens, checkpointing=run.checkpointing, predicted=run.predicted)
    return Plan(
        parameters=shape.parameters,
        memory_gib={stage: (state_bytes(shape.parameters, run.gpus, stage) + activations) / GIB for stage in range(4)},
        compute_seconds=compute,
        network_seconds=network,
        tokens_per_second=run.global_batch * run.length / (compute + network),
        total_seconds=total,
        gpu_hours=total * run.gpus / 3600,
    )


def network_seconds(parameters: int, run: Run, *, micro_steps: int, micro_seconds: float) -> float:
    """Exposed communication of an optimizer step.

    Stages 0 to 2 send each half-precision gradient once and receive it once (reduce-scatter and all-gather: twice the
    parameters, ZeRO section 7), at the end of the step. Stage 3 gathers the weights in every forward and backward pass
    as well. What fits behind the backward pass (two thirds of a micro-step) costs nothing.
    """
    if run.gpus == 1:
        return 0.0
    volume = 2 * parameters * (run.gpus - 1) / run.gpus
    passes = 2 if run.zero_stage < 3 else 1 + 2 * micro_steps
    hidden = micro_seconds * (2 / 3 if run.zero_stage < 3 else micro_steps)
    return max(0.0, passes * volume / (run.network_gbytes * 1e9) - hidden)


def describe(shape: Shape, run: Run, device: Device) -> str:
    """The plan as a table of lines."""
    found = plan(shape, run)
    fits = {stage: "" if size < device.memory_gib - 2 else "  does not fit" for stage, size in found.memory_gib.items()}
    accumulation = run.global_batch // (run.micro_batch * run.gpus)
    each = found.tokens_per_second / run.gpus
    tokens = run.steps * run.global_batch * run.length / 1e9
    step = f"computing {found.compute_seconds:.3f}, waiting for the network {found.network_seconds:.3f}"
    lines = [
        f"parameters       {found.parameters:,}",
        f"global batch     {run.global_batch} = {run.micro_batch} x {accumulation} x {run.gpus} GPUs",
        *(
            f"memory, ZeRO {stage}   {size:6.1f} GiB of {device.memory_gib:g}{fits[stage]}"
            for stage, size in found.memory_gib.items()
        ),
        f"step             {found.step_seconds:.3f} s: {step} (ZeRO {run.zero_stage})",
        f"tokens/s         {found.tokens_per_second:,.0f} ({each:,.0f} a GPU, MFU {run.mfu:.0%})",
        f"whole run        {found.total_seconds / 86400:.2f} days, {found.gpu_hours:,.0f} GPU-hours, {tokens:,.1f} billion tokens",
    ]
    return "\n".join(lines)


def shape_of(tree: Mapping[str, Any], presets: Path) -> Shape:
    """The sizes in a configuration's `[model]`, `[tokenizer]` and `[data]` tables; other keys do not change the plan.

    Raises:
        PlanError: an unknown preset, or a BiLSTM, which these formulas do not describe.
    """
    table = dict(tree.get("model", {}))
    if preset := table.get("preset"):
        file = presets / f"{preset}.toml"
        if not file.is_file():
            raise PlanError(f"model.preset {preset!r}: no {file}")
        table = {**tomllib.loads(file.read_text(encoding="utf-8")), **table}
    if table.get("bilstm"):
        raise PlanError("model.bilstm is set: the planner knows no BiLSTM")
    if not table.get("vocab_size"):
        table["vocab_size"] = tree.get("tokenizer", {}).get("vocab_size", 30522)
    return Shape(**{field.name: table[field.name] for field in fields(Shape) if field.name in table})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster.plan", description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="TOML file: model, steps, batches, ZeRO stage")
    parser.add_argument("--device", choices=sorted(DEVICES), required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument(
        "--length",
        type=int,
        nargs="+",
        default=[],
        help="real tokens of an average example (default: max_seq_length); where phases differ, one for each of them",
    )
    parser.add_argument(
        "--mfu", type=float, default=0, help="share of the peak reached (default: seen in published runs)"
    )
    parser.add_argument("--network-gbytes", type=float, default=25, help="1e9 bytes a second and GPU (default: 25)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0, or 2 with one message."""
    options = _parser().parse_args(arguments)
    device = DEVICES[options.device]
    try:
        try:
            tree = tomllib.loads(options.config.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise PlanError(f"{options.config}: cannot read the configuration: {error}") from error
        missing = [key for key in ("steps", "global_batch", "micro_batch") if key not in tree.get("train", {})]
        if missing:
            raise PlanError(f"{options.config}: key train.{missing[0]} is missing")
        shape = shape_of(tree, options.config.parent / "models")
        runs = runs_of(tree, options, device)
    except PlanError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    for number, run in enumerate(runs, start=1):
        if len(runs) > 1:
            print(f"phase {number}: length {run.length}")
        print(describe(shape, run, device))
    if len(runs) > 1:
        plans = [plan(shape, run) for run in runs]
        days, hours = sum(found.total_seconds for found in plans) / 86400, sum(found.gpu_hours for found in plans)
        print(f"all phases       {days:.2f} days, {hours:,.0f} GPU-hours")
    return 0


def runs_of(tree: Mapping[str, Any], options: argparse.Namespace, device: Device) -> list[Run]:
    """What is trained, a part for each of `[[phases]]`, one where there are none.

    Raises:
        PlanError: a number out of range, or lengths for another number of phases.
    """
    phases = tree.get("phases") or [{}]
    lengths = options.length or [tree.get("data", {}).get("max_seq_length", 128)]
    if len(lengths) not in (1, len(phases)):
        raise PlanError(f"--length has {len(lengths)} numbers for {len(phases)} phases")
    if len(lengths) == 1 and len({phase.get("data_dir", "") for phase in phases}) > 1:
        print(f"plan: every phase is planned at length {lengths[0]}; give --length a number for each", file=sys.stderr)
    return [
        Run(
            gpus=options.nodes * options.gpus_per_node,
            steps=phase.get("steps") or tree["train"]["steps"],
            global_batch=phase.get("global_batch") or tree["train"]["global_batch"],
            micro_batch=phase.get("micro_batch") or tree["train"]["micro_batch"],
            length=length,
            zero_stage=tree.get("deepspeed", {}).get("zero_optimization", {}).get("stage", 0),
            mfu=options.mfu or device.mfu,
            tflops=device.tflops,
            network_gbytes=options.network_gbytes,
            checkpointing=bool(tree.get("model", {}).get("activation_checkpointing", False)),
        )
        for phase, length in zip(phases, lengths * (len(phases) if len(lengths) == 1 else 1), strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
