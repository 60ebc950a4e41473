"""The ranks of the LAMB test: train a small model under DeepSpeed and write the weights that came out.

Run by tests/test_pretrain_lamb_zero.py: `lamb_worker.py FOLDER`; forks two ranks and then one from a process that has imported
DeepSpeed. The model, its data and the options are here too, so that the test builds its reference from the same ones; importing
this file does not import DeepSpeed.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn

STEPS, HALF_WAY, HALF_PRECISION_STEPS = 50, 25, 5
BATCH = 8
CLIP = 0.05
OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "variant": {"bias_correction": False, "adapt_undecayed": False, "min_ratio": 0.02, "max_ratio": 0.3, "eps": 1e-5},
}


class Toy(nn.Module):
    """A network whose tensors are odd in size and whose norms take every special case."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(29, 7) * 0.3)  # more than half of its group
        self.hidden = nn.Linear(7, 11)
        self.norm = nn.LayerNorm(11)
        self.gate = nn.Parameter(torch.zeros(11, 3))  # |w| = 0 at first, |u| > 0
        self.unused = nn.Parameter(torch.zeros(5, 3))  # |w| = |u| = 0: zero gradient, decay of nothing
        self.unused_bias = nn.Parameter(torch.full((3,), 0.5))  # |w| > 0, |u| = 0: zero gradient, no decay
        self.output = nn.Linear(11, 3)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.hidden(self.embedding[ids].sum(1))))
        nothing = 0.0 * (self.unused.sum() + self.unused_bias.sum())
        predictions = self.output(hidden) + hidden @ self.gate + nothing
        return (predictions.to(targets.dtype) - targets).square().mean()


def build_model() -> Toy:
    """The same weights every time."""
    torch.manual_seed(5)
    return Toy()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """A group with decay and one without, each of several tensors."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.02},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def rate(step: int) -> float:
    """The learning rate of a step, from 1: warm-up, then slow decay."""
    return 0.01 * min(1.0, step / 10) * (1 - step / 100)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step: ids (8, 4), targets (8, 3) float64, growing so that clipping sets in and lets go."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, 29, (BATCH, 4), generator=generator)
    return ids, torch.randn(BATCH, 3, generator=generator, dtype=torch.float64) * (0.1 + 0.5 * (step % 3))


def main(folder: Path) -> None:
    """Two ranks, then one, which continues a checkpoint of theirs."""
    import deepspeed
    import deepspeed.ops
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401 - both: what every rank would import anew

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for a minute
    for size in (2, 1):
        ranks = [os.fork() or be_rank(deepspeed, folder, rank, size) for rank in range(size)]
        codes = [os.waitpid(pid, 0)[1] for pid in ranks]
        if any(codes):
            sys.exit(f"a rank of {size} failed")


def be_rank(deepspeed: Any, folder: Path, rank: int, size: int) -> NoReturn:
    """A forked process: never returns."""
    code = 1
    try:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": 1}
        # An address is asked for and not used: the ranks meet through a file.
        os.environ.update({key: str(value) for key, value in world.items()}, MASTER_ADDR="127.0.0.1")
        all_cases(deepspeed, folder, rank, size)
        code = 0
    except BaseException:  # noqa: BLE001 - the test shows it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def all_cases(deepspeed: Any, folder: Path, rank: int, size: int) -> None:
    """All cases of one world size."""
    deepspeed.init_distributed(
        "gloo", verbose=False, init_method=f"file://{folder / f'rendezvous-{size}'}", rank=rank, world_size=size
    )
    runner = Runner(deepspeed, folder, rank, size)
    results: dict[str, Any] = {}
    for stage in (0, 1, 2):
        for name in OPTIONS:
            results[f"{name} stage {stage}"] = runner.train(stage, name, save=stage > 0 and name == "paper")
        results[f"bf16 stage {stage}"] = runner.train(stage, "paper", steps=HALF_PRECISION_STEPS, bf16=True)
    results["offload"] = runner.train(2, "paper", zero={"offload_optimizer": {"device": "cpu"}})
    for stage in (1, 2):
        results[f"resumed stage {stage}"] = runner.train(stage, "paper", resume=f"ranks-{size}-stage-{stage}")
    if size == 1:
        results["universal"] = runner.from_universal(saved="ranks-2-stage-1", stage=2)
        results["stage 3"] = runner.refusal()
    if rank == 0:
        torch.save(results, folder / f"results-{size}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class Runner:
    """Trains with DeepSpeed and collects full fp32 weights by name."""

    def __init__(self, deepspeed: Any, folder: Path, rank: int, size: int) -> None:
        self.deepspeed, self.folder, self.rank, self.size = deepspeed, folder, rank, size

    def engine(
        self,
        stage: int,
        options: dict[str, Any],
        *,
        bf16: bool = False,
        universal: bool = False,
        zero: dict[str, Any] | None = None,
    ) -> Any:
        from pretrain.lamb import Lamb

        model = build_model()
        optimizer = Lamb(groups_of(model), lr=0.0, **options)
        config = {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": BATCH // self.size,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage, **(zero or {})},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": bf16},
            "checkpoint": {"load_universal": universal},
            "steps_per_print": None,
        }
        if bf16 and stage == 1:  # gives yet another wrapper, which steps all groups at once
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        engine, *_ = self.deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        optimizer.forget()
        return engine

    def step(self, engine: Any, step: int, *, bf16: bool = False) -> None:
        for group in engine.optimizer.param_groups:
            group["lr"] = rate(step)
        ids, targets = batch(step)
        share = BATCH // self.size
        # In bf16 every rank takes the same examples, so that averaging over ranks rounds nothing.
        mine = slice(0, BATCH) if bf16 else slice(self.rank * share, (self.rank + 1) * share)
        engine.backward(engine(ids[mine], targets[mine].float()))
        engine.step()

    def train(
        self,
        stage: int,
        name: str,
        *,
        steps: int = STEPS,
        bf16: bool = False,
        save: bool = False,
        resume: str = "",
        zero: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Weights after steps 1 and `steps`, the tensors that lie on several ranks, and DeepSpeed's wrapper."""
        engine, weights = self.engine(stage, OPTIONS[name], bf16=bf16, zero=zero), {}
        if resume:
            engine.load_checkpoint(str(self.folder / "checkpoints"), tag=resume)
        for step in range(HALF_WAY + 1 if resume else 1, steps + 1):
            self.step(engine, step, bf16=bf16)
            if step in (1, steps):
                weights[step] = self.weights(engine, stage)
            if save and step == HALF_WAY:
                tag = f"ranks-{self.size}-stage-{stage}"
                engine.save_checkpoint(str(self.folder / "checkpoints"), tag=tag, save_latest=False)
        return {"weights": weights, "split": self.split(engine), "wrapper": type(engine.optimizer).__name__}

    def weights(self, engine: Any, stage: int) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        masters: dict[Any, torch.Tensor] = {}
        if hasattr(engine.optimizer, "fp32_groups"):  # half precision without ZeRO
            pairs = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
            masters = {low: high for lows, highs in pairs for low, high in zip(lows, highs, strict=True)}
        named = engine.module.named_parameters()
        full = {name: safe_get_full_fp32_param(p) if stage else masters.get(p, p) for name, p in named}
        return {name: tensor.detach().float().clone() for name, tensor in full.items()}

    def split(self, engine: Any) -> list[str]:
        """Names of the tensors of which several ranks hold a fragment."""
        mapped = {name for name, p in engine.module.named_parameters() if getattr(p, "_hp_mapping", None) is not None}
        everywhere: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(everywhere, mapped)
        return sorted(name for name in mapped if sum(name in held for held in everywhere) > 1)

    def from_universal(self, *, saved: str, stage: int) -> dict[str, Any]:
        """Go on from a checkpoint of another world size and stage, converted to DeepSpeed's universal form."""
        from deepspeed.checkpoint import ds_to_universal

        source, target = self.folder / "checkpoints" / saved, self.folder / "universal" / "step"
        arguments = SimpleNamespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        ds_to_universal.main(arguments)
        engine = self.engine(stage, OPTIONS["paper"], universal=True)
        engine.load_checkpoint(str(target.parent), tag=target.name)
        for step in range(HALF_WAY + 1, STEPS + 1):
            self.step(engine, step)
        return {"weights": {STEPS: self.weights(engine, stage)}}

    def refusal(self) -> str:
        """What LAMB says under ZeRO-3."""
        engine = self.engine(3, {})
        try:
            self.step(engine, 1)
        except RuntimeError as error:
            return str(error)
        return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
