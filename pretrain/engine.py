"""DeepSpeed: one optimizer step that equals one joint batch. The only file that imports it.

Legend: `P` predictions, `E` examples, `W` ranks, `A` accumulation steps.

The loss of a step is sum(MLM cross entropies) / P + sum(NSP cross entropies) / E over all micro-batches and ranks.
DeepSpeed (0.19.8) divides each loss by A in `backward` and averages gradients over W ranks. Each local sum is therefore
weighted by W A / P, so that

    1/W * sum over ranks and micro-batches of grad(1/A * (W A / P) * local sum) = grad(global sum / P).

Its `scale_wrt_gas=False` is not used: where no other factor is applied to the loss (ZeRO 0 in fp32), the hook that the
engine puts on the module's output divides by A all the same.

What the host waits for in a step on CUDA: whether the step was applied. DeepSpeed reads its overflow flag to decide that, the
next learning rate follows from it, and neither can wait. The stop flag was copied before the forward pass and has long
arrived; gradient norm and sums stay on the device until a line of metrics is written.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import math
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from cluster.world import World
from data_pipeline.records import Batch
from pretrain.config import TrainConfig
from pretrain.deepspeed_config import deepspeed_config, precision, zero_stage
from pretrain.held_files import HeldFiles
from pretrain.host_copy import HostCopies, HostCopy
from pretrain.optimizer import build_optimizer
from pretrain.stopwatch import Stopwatch

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
import deepspeed
import deepspeed.ops
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import logger as deepspeed_logger
from deepspeed.utils import safe_get_full_fp32_param

SUMS = (
    "mlm_loss",
    "nsp_loss",
    "extra_loss",
    "mlm_correct",
    "nsp_correct",
    "predictions",
    "pairs",
    "tokens",
    "examples",
)
"""What a step's and an evaluation's sums hold, in this order. `extra_loss`: what an objective adds to the first two;
`pairs`: examples with a sentence objective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        applied: False where a gradient was not finite and the weights stayed as they were.
        norm: global L2 norm before clipping, perhaps still on the device; inf where it was not finite.
        sums: (9,) float64 on the device, this rank's part of `SUMS`; the three losses already divided by the global
            counts, so that their sum over ranks is the optimised loss.
        stop: some rank asked for a stop before this step.
        busy: some rank's `busy` was true before this step.
        seconds_used: of training, before this step, by rank 0's clock.
        forward: this rank's forward passes: what it does without waiting for others, except under ZeRO-3.
    """

    applied: bool
    norm: torch.Tensor | float
    sums: torch.Tensor
    stop: bool
    seconds_used: float
    forward: Stopwatch
    busy: bool = False

    @property
    def grad_norm(self) -> float:
        """The norm on the host; waits for the device."""
        return float(self.norm)


class _Objective(nn.Module):
    """The model with its loss inside `forward`: DeepSpeed hooks into tensors that a module returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted loss and (5,) float64: both loss sums, 0, both numbers of correct answers.

        `weights`: (3,) factors of sums over predictions, pairs and tokens; the last is for objectives that use it.
        """
        # Not self.model(batch): ZeRO-3's hook on a module searches its output with vars(), which a slotted dataclass
        # does not have. Parameters used outside their own module's call are gathered as this module's.
        out = self.model.forward(batch)
        loss = out.mlm_loss_sum.float() * weights[0] + out.nsp_loss_sum.float() * weights[1]
        none = torch.zeros_like(loss)
        parts = (out.mlm_loss_sum, out.nsp_loss_sum, none, out.mlm_correct, out.nsp_correct)
        return loss, torch.stack([part.detach().double() for part in parts])


def start_ranks(world: World, *, threads: int = 0) -> torch.device:
    """Join the process group and return this rank's device.

    Args:
        world: this rank's place.
        threads: CPU threads of this rank; 0: `OMP_NUM_THREADS` if set, else an equal share of this machine's cores.
    """
    deepspeed_logger.setLevel(os.environ.get("DS_LOG_LEVEL", "warning").upper())
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's use of torch
    if threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // world.local_size))
    os.environ.update(world.environ())
    if not world.master_port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    # Its C++ all-reduce through shared memory would be compiled for a minute at the first start, and where a compile is
    # killed its lock file hangs every later start. Gloo does the same sums.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    if torch.cuda.is_available():
        torch.cuda.set_device(world.local_rank)
        return torch.device("cuda", world.local_rank)
    return torch.device("cpu")


def stop_ranks() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def to_universal(source: Path, target: Path) -> None:
    """Write DeepSpeed's universal form of its checkpoint `source`: one file a parameter and moment, cut by no rank.

    One process calls this. Its converter works in folders of one level below another: `target`'s parent must exist.
    """
    options = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,  # more would fork a process that holds communication threads
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        ds_to_universal.main(options)


def seed_of(*numbers: int) -> int:
    """A 63-bit seed that is a pure function of its arguments."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


class TrainEngine:
    """A DeepSpeed engine that takes whole optimizer steps.

    Args:
        model: `forward(batch)` gives `PretrainingLosses`.
        groups: optimizer groups over `model`'s parameters.
        config: the merged configuration.
        world: this rank's place; the process group has been joined.
        device: from `start_ranks`.
        objective: another loss around `model`, which is its attribute `model`; called as `_Objective` is.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[dict[str, Any]],
        *,
        config: TrainConfig,
        world: World,
        device: Any,
        objective: nn.Module | None = None,
    ) -> None:
        self.config, self.world, self.device = config, world, torch.device(device)
        self.stage, self.precision = zero_stage(config), precision(config)
        optimizer = build_optimizer(groups, config.optimizer)
        self._engine, *_ = deepspeed.initialize(
            model=_Objective(model) if objective is None else objective,
            optimizer=optimizer,
            config=deepspeed_config(config, world.size),
            dist_init_required=False,
        )
        if self.stage == 0:
            optimizer.state.clear()  # of the step at rate 0, see `build_optimizer`: the first real step is number 1
        self._count_at_the_floor()
        self._files = HeldFiles(self._engine)
        # Without ZeRO and without loss scaling DeepSpeed runs the optimizer bare and never looks at the gradient.
        self._plain = self.stage == 0 and self.precision == "fp32"

    def _count_at_the_floor(self) -> None:
        """An overflow at the lowest loss scale is a skipped step like any other, where DeepSpeed's ZeRO would raise."""
        scaler: Any = getattr(self._engine.optimizer, "loss_scaler", None)
        if hasattr(scaler, "raise_error_at_min_scale"):
            scaler.raise_error_at_min_scale = False

    def release(self) -> None:
        """Give the device's memory back: another engine follows in this process. Every rank calls this; no call follows."""
        self._engine.destroy()  # its hooks hold the model in cycles that no collector sees
        del self._engine, self._files
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def accumulation(self) -> int:
        """Micro-steps of one optimizer step."""
        return self._engine.gradient_accumulation_steps()

    @property
    def loss_scale(self) -> float:
        """The factor that keeps fp16 gradients in range; 1 in other precisions."""
        if self.precision != "fp16":
            return 1.0
        optimizer: Any = self._engine.optimizer
        return float(optimizer.loss_scale_config.cur_scale if self.stage == 0 else optimizer.cur_scale)

    def rates(self) -> list[float]:
        """The learning rate in each of the optimizer's own parameter groups."""
        return [group["lr"] for group in self._engine.optimizer.param_groups]

    def step(
        self,
        micro_batches: Sequence[Batch],
        *,
        number: int,
        lr: float,
        stop: bool = False,
        busy: bool = False,
        seconds_used: float = 0.0,
    ) -> StepResult:
        """One optimizer step over this rank's micro-batches.

        Args:
            micro_batches: exactly `accumulation` of them.
            number: the step, from 1; with the seed, the rank and the micro-step it fixes the dropout.
            lr: the rate of this step.
            stop: this rank asks all ranks to stop after this step.
            busy: this rank is still writing a checkpoint.
            seconds_used: of training so far; rank 0's value counts.

        Raises:
            ValueError: another number of micro-batches.
        """
        if len(micro_batches) != self.accumulation:
            raise ValueError(f"expected {self.accumulation} micro-batches a step, got {len(micro_batches)}")
        local = np.sum([self._counts(batch) for batch in micro_batches], axis=0)
        shared = self._send([*local[:3], float(stop), float(busy), 0.0 if self.world.rank else seconds_used])
        dist.all_reduce(shared)
        asked = HostCopy(shared[3:])
        counts = shared[:3].clamp(min=1)
        weights = (self.world.size * self.accumulation / counts).float()
        self._set_rate(lr)
        self._engine.train()
        sums = torch.zeros(5, dtype=torch.float64, device=self.device)
        applied, forward = True, Stopwatch(self.device)
        norm: torch.Tensor | float = 0.0
        # Without ZeRO DeepSpeed (0.19.8) divides fp16 gradients by the loss scale, but never multiplies the loss by it.
        scale = self.loss_scale if self.stage == 0 else 1.0
        for micro, batch in enumerate(micro_batches):
            torch.manual_seed(seed_of(self.config.seed, number, self.world.rank, micro))
            with forward:
                loss, parts = self._engine(batch.to(self.device, non_blocking=True), weights)
            self._engine.backward(loss * scale)
            sums += parts
            if micro + 1 < len(micro_batches):
                self._engine.step()
            else:
                applied, norm = self._update()
                norm = norm / scale
        sums[:2] /= counts[:2]
        sums[2] /= self.world.size * self.accumulation  # the objective has divided it by its count
        stops, busy_ranks, used = asked.read()
        flags = {"applied": applied, "stop": stops > 0, "busy": busy_ranks > 0}
        sums = torch.cat([sums, self._send(local)])
        return StepResult(norm=norm, sums=sums, seconds_used=used, forward=forward, **flags)

    def _send(self, values: Sequence[float] | np.ndarray) -> torch.Tensor:
        """Numbers as float64 on the device, without waiting for it."""
        tensor = torch.as_tensor(values, dtype=torch.float64)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _update(self) -> tuple[bool, torch.Tensor | float]:
        """Clip and step at the end of accumulation; whether it was applied, and the norm before clipping."""
        engine = self._engine
        if self._plain:
            gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
            total = torch.nn.utils.get_total_norm(gradients)
            if not torch.isfinite(total):
                engine.zero_grad()
                engine.micro_steps += 1  # all that engine.step() would do for the next accumulation to begin
                return False, math.inf
            engine.step()
            return True, total
        engine.step()
        applied = not bool(getattr(engine.optimizer, "overflow", False))
        norm = engine.get_global_grad_norm() if applied else math.inf
        return applied, 0.0 if norm is None else norm

    def _set_rate(self, lr: float) -> None:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """(9,) float64: `SUMS` of one batch on this rank, losses as plain sums, without dropout."""
        self._engine.eval()
        _, sums = self._engine(batch.to(self.device), torch.ones(3, device=self.device))
        return torch.cat([sums, torch.tensor(self._counts(batch), dtype=torch.float64, device=self.device)])

    def _counts(self, batch: Batch) -> tuple[int, int, int, int]:
        """Predictions, pairs, tokens and examples of a batch that is still on the CPU.

        A model without a sentence head answers no pair, whatever labels the data have.
        """
        paired = self.config.model.sentence_objective != "none"
        pairs = int((batch.nsp_labels_E >= 0).sum()) if paired else 0
        return len(batch.mask_labels_P), pairs, batch.tokens, batch.examples

    def save(self, folder: Path, tag: str, copies: HostCopies | None = None) -> Callable[[], None]:
        """Write DeepSpeed's own files below `folder/tag`, which exists; every rank calls this.

        Args:
            folder, tag: where.
            copies: copy what would be written, and write nothing yet.

        Returns:
            What is left to do: a function without collectives that writes the rest and raises what went wrong. No rank
            stays behind in one of DeepSpeed's collectives because another one's disk is full.
        """
        self._files.copies = copies
        self._engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
        return self._files.take()

    def load(self, folder: Path, tag: str, *, universal: bool = False) -> None:
        """Load what `save` wrote with the same number of ranks and the same ZeRO stage; every rank calls this.

        Args:
            folder: a checkpoint.
            tag: the folder in it.
            universal: it was made by `to_universal`; ranks and stage may differ, see `pretrain/snapshot.py`.

        Raises:
            RuntimeError: DeepSpeed found no checkpoint there.
        """
        groups = self._engine.optimizer.param_groups
        decays = [group["weight_decay"] for group in groups]
        self._engine._config.load_universal_checkpoint = universal
        path, _ = self._engine.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=False)
        self._engine._config.load_universal_checkpoint = False
        self._count_at_the_floor()  # ZeRO takes the checkpoint's loss scaler for its own
        if path is None:
            raise RuntimeError(f"{folder / tag}: DeepSpeed found no checkpoint to load")
        if universal:
            self._separate_groups(decays)

    def _separate_groups(self, decays: Sequence[float]) -> None:
        """ZeRO-3's universal loader (0.19.8) gives every group the settings of the first, and all one step counter."""
        for group, decay in zip(self._engine.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        optimizer = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
        for state in optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    def full_weights(self, copies: HostCopies | None = None) -> dict[str, torch.Tensor]:
        """Every parameter and persistent buffer in fp32 on the CPU, named as in the model; every rank calls this.

        A collective: tensors that ZeRO has cut are put together from all ranks. A tied tensor appears once. Only rank
        0's result is filled; on the others it is empty.

        Args:
            copies: lay them there, beside what `save` has copied. On CUDA they come to be only with `HostCopies.arrive`.
        """
        weights: dict[str, torch.Tensor] = {}
        module, masters = self._engine.module, _unpartitioned_masters(self._engine.optimizer)
        # In fp32 ZeRO 1 and 2 leave every rank the masters themselves, gathered after the update.
        assembled = self.stage == 3 or (self.stage > 0 and self.precision != "fp32")
        persistent = module.state_dict().keys()
        buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in persistent]
        for name, own in [*module.named_parameters(), *buffers]:
            full = masters.get(own)
            if full is None and assembled and isinstance(own, nn.Parameter):
                full = safe_get_full_fp32_param(own)
            tensor = own if full is None else full.view(_shape(own))
            if self.world.rank == 0:
                whole = tensor.detach().float()
                lasting = full is None and whole.dtype == own.dtype
                host = copies.of(whole, lasting=lasting) if copies else whole.cpu().clone()
                weights[name.removeprefix("model.")] = host
        return weights


def _shape(parameter: nn.Parameter) -> torch.Size:
    """The whole tensor's shape, also where ZeRO-3 has left only a piece here."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _unpartitioned_masters(optimizer: Any) -> dict[Any, torch.Tensor]:
    """fp32 masters of half-precision parameters without ZeRO: two parallel lists in DeepSpeed's FP16_UnfusedOptimizer."""
    low, high = getattr(optimizer, "fp16_groups", None), getattr(optimizer, "fp32_groups", None)
    if not low or not high or type(optimizer).__name__ != "FP16_UnfusedOptimizer":
        return {}
    return {p: master for ps, masters in zip(low, high, strict=True) for p, master in zip(ps, masters, strict=True)}
