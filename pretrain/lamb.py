"""LAMB, also where ZeRO has flattened and cut the parameters.

Algorithm 2 of https://arxiv.org/abs/1904.00962 with phi(z) = z. For each parameter w with gradient g at step t:

    m = b1 m + (1 - b1) g                v = b2 v + (1 - b2) g^2
    r = m_hat / (sqrt(v_hat) + eps)      m_hat = m / (1 - b1^t), v_hat = v / (1 - b2^t)
    u = r + weight_decay w
    w = w - lr |w| / |u| u

The trust ratio |w| / |u| belongs to a whole parameter. Under ZeRO 1 and 2 a rank holds one flat partition per group, so
each rank sums the squares of its fragments, one all-reduce of 2 x (N + 1) numbers adds them up, and every fragment is
scaled by its parameter's ratio. DeepSpeed 0.19.8 calls `step` once per parameter group
(runtime/zero/stage_1_and_2.py, `_optimizer_step`), so with two groups there are two such all-reduces in a step.

Sums of squares are float64: on the CPU torch's float32 norm of an embedding of 23 million elements was measured to be
wrong by 1.3e-3, and the error would change with the cut.

Legend: `N` parameters of the optimizer, `K` pieces (fragments and padding; without ZeRO, whole tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pretrain.flat_partition import FlatPartition, find_partition, is_partitioned

_BLOCK = 1024
"""Elements whose squares float32 adds up well; the sums of blocks are added in float64."""


@dataclass(kw_only=True, slots=True)
class _GroupStep:
    """What one group does in one step.

    Attributes:
        weights: K views of weights.
        updates: K views of u, in the same order.
        squares: (2, K) float64: sums of squares of weights and of updates, on this rank and later over all ranks.
        partition: None where the pieces are whole tensors.
    """

    group: dict[str, Any]
    weights: list[torch.Tensor]
    updates: list[torch.Tensor]
    squares: torch.Tensor
    partition: FlatPartition | None

    def apply(self) -> None:
        """w = w - lr x trust ratio x u."""
        scales = (trust_ratios(self.squares, self.group) * -self.group["lr"]).to(self.weights[0].dtype)
        torch._foreach_addcmul_(self.weights, self.updates, list(scales.unbind()))


def square_sums(pieces: list[torch.Tensor]) -> torch.Tensor:
    """(K,) float64: the sum of squares of each piece."""
    if pieces[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(pieces, 2, dtype=torch.float64)).square()
    return torch.stack([_square_sum(piece.reshape(-1)) for piece in pieces])


def _square_sum(flat: torch.Tensor) -> torch.Tensor:
    """On the CPU a norm in float64 takes 17 times as long as float32 blocks, longer than the rest of the step."""
    whole = flat.numel() // _BLOCK * _BLOCK if flat.dtype == torch.float32 else 0
    tail = torch.linalg.vector_norm(flat[whole:], dtype=torch.float64).square()
    if not whole:
        return tail
    return torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1).double().square().sum() + tail


def trust_ratios(squares: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """|w| / |u|, clamped where the group says so; 1 where either norm is zero.

    Args:
        squares: (2, K) float64, sums of squares of weights and of updates.
        group: optimizer group with `weight_decay`, `adapt_undecayed`, `min_ratio` and `max_ratio`.

    Returns:
        (K,) float64.
    """
    weights, updates = squares.sqrt()
    ones = torch.ones_like(weights)
    if not (group["weight_decay"] or group["adapt_undecayed"]):
        return ones
    ratios = weights / updates
    if group["min_ratio"] is not None or group["max_ratio"] is not None:
        ratios = ratios.clamp(min=group["min_ratio"], max=group["max_ratio"])
    return torch.where((weights > 0) & (updates > 0), ratios, ones)


class Lamb(torch.optim.Optimizer):
    """LAMB with a trust ratio per parameter for ZeRO 0, 1 and 2; refused under ZeRO-3.

    Build it over the model's own parameters and hand it to `deepspeed.initialize` with
    `"zero_allow_untested_optimizer": true`; it finds out at the first step whether its groups hold whole tensors or flat
    partitions. The state per tensor is `step`, `exp_avg` and `exp_avg_sq`, as torch's AdamW has it, so DeepSpeed's
    checkpoints and its conversion to a universal checkpoint carry it.

    DeepSpeed's wrapper for bf16 and fp16 without ZeRO takes one step with zero gradients while it is built
    (runtime/fp16/unfused_optimizer.py, `initialize_optimizer_states`), at which weight decay alone moves the weights by a
    share `lr`: build it with `lr=0` there, and call `forget` afterwards.

    Args:
        params: parameters, or groups of them with their own options.
        lr: learning rate.
        betas: decay of both moments.
        eps: added to the root of the second moment.
        weight_decay: lambda of the paper.
        bias_correction: False leaves out the division by 1 - beta^t, as recipes with a long warm-up do.
        adapt_undecayed: False uses the ratio 1 in groups without weight decay, as apex's FusedLAMB does by default.
        min_ratio: smallest trust ratio; None: no bound. DeepSpeed's FusedLamb has 0.01.
        max_ratio: largest trust ratio; None: no bound. DeepSpeed's FusedLamb has 10; its BERT recipe 0.3.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        adapt_undecayed: bool = True,
        min_ratio: float | None = None,
        max_ratio: float | None = None,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"expected lr, eps and weight_decay of at least 0 and betas in [0, 1), "
                f"got lr={lr}, eps={eps}, weight_decay={weight_decay}, betas={betas}"
            )
        if (min_ratio or 0) < 0 or (max_ratio is not None and max_ratio < (min_ratio or 0)):
            raise ValueError(f"expected 0 <= min_ratio <= max_ratio, got {min_ratio} and {max_ratio}")
        self._parameters: list[torch.Tensor] = []
        self._partitions: dict[torch.Tensor, FlatPartition | None] = {}
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "adapt_undecayed": adapt_undecayed,
            "min_ratio": min_ratio,
            "max_ratio": max_ratio,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and remember its parameters: DeepSpeed later replaces them by its own tensors."""
        super().add_param_group(param_group)
        self._parameters.extend(self.param_groups[-1]["params"])

    def forget(self) -> None:
        """Drop moments and step counts, as if no step had been taken."""
        self.state.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of the tensors that have a gradient.

        Under ZeRO a collective: every rank of the data-parallel group calls it with the same groups.

        Raises:
            RuntimeError: the tensors are neither the model's own, nor copies of them, nor ZeRO 1 or 2 partitions.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        steps = [self._begin(group) for group in self.param_groups if any(p.grad is not None for p in group["params"])]
        partitioned = [step for step in steps if step.partition is not None]
        if partitioned:
            self._sum_over_ranks(partitioned)
        for step in steps:
            step.apply()
        return loss

    def _begin(self, group: dict[str, Any]) -> _GroupStep:
        """Advance the moments and find the updates and this rank's sums of squares."""
        tensors = [p for p in group["params"] if p.grad is not None]
        weights, updates = tensors, self._updates(group, tensors)
        partition = self._partition(tensors)
        if partition is not None:
            weights, updates = partition.pieces(tensors[0]), partition.pieces(updates[0])
        squares = torch.stack([square_sums(weights), square_sums(updates)])
        return _GroupStep(group=group, weights=weights, updates=updates, squares=squares, partition=partition)

    def _updates(self, group: dict[str, Any], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """u of each tensor, new tensors of the same shapes; advances m, v and the step counts."""
        for p in tensors:
            state = self.state[p]
            if "exp_avg" not in state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        states = [self.state[p] for p in tensors]
        counts, means, squares = ([state[key] for state in states] for key in ("step", "exp_avg", "exp_avg_sq"))
        gradients = [p.grad for p in tensors if p.grad is not None]
        (beta1, beta2), eps = group["betas"], group["eps"]
        torch._foreach_add_(counts, 1.0)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        if group["bias_correction"]:
            taken = [float(count) for count in counts]  # step counts stay on the CPU: no wait for the device
            torch._foreach_div_(roots, [(1 - beta2**t) ** 0.5 for t in taken])
            torch._foreach_add_(roots, eps)
            torch._foreach_mul_(roots, [1 - beta1**t for t in taken])
        else:
            torch._foreach_add_(roots, eps)
        updates = torch._foreach_div(means, roots)
        if group["weight_decay"]:
            torch._foreach_add_(updates, tensors, alpha=group["weight_decay"])
        return list(updates)

    def _partition(self, tensors: list[torch.Tensor]) -> FlatPartition | None:
        """The layout of a group's flat partition; None where its tensors are whole."""
        first = tensors[0]
        if first not in self._partitions:
            if not any(first is parameter for parameter in self._parameters) and is_partitioned(self._parameters):
                self._partitions[first] = find_partition(first, self._parameters)
            else:
                self._check_whole(tensors)
                self._partitions[first] = None
        return self._partitions[first]

    def _check_whole(self, tensors: list[torch.Tensor]) -> None:
        """Without ZeRO the tensors are the model's own or fp32 copies of them, never anything flattened."""
        known = {parameter.shape for parameter in self._parameters}
        strange = [tuple(tensor.shape) for tensor in tensors if tensor.shape not in known]
        if strange:
            raise RuntimeError(
                f"LAMB got a tensor of shape {strange[0]} that is none of the model's parameters, and nothing says which "
                f"parameters it holds: it supports whole tensors and DeepSpeed's ZeRO stages 1 and 2"
            )

    def _sum_over_ranks(self, steps: list[_GroupStep]) -> None:
        """Replace each fragment's sums of squares by those of its whole parameter, in one all-reduce."""
        # NCCL reduces on the parameters' device; with optimizer offload the partitions lie on the CPU.
        holder: Any = next(p for p in self._parameters if hasattr(p, "_dp_group"))
        device = steps[0].squares.device
        totals = torch.zeros(2, len(self._parameters) + 1, dtype=torch.float64, device=device)
        for step in steps:
            assert step.partition is not None
            totals.index_add_(1, step.partition.owners, step.squares)
        if dist.get_world_size(holder._dp_group) > 1:
            totals = totals.to(holder.device)
            dist.all_reduce(totals, group=holder._dp_group)
            totals = totals.to(device)
        for step in steps:
            assert step.partition is not None
            step.squares = totals[:, step.partition.owners]
