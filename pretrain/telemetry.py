"""Speed in numbers that mean the same everywhere: real tokens, useful FLOPs, the share of the peak."""

from __future__ import annotations

import functools
import resource
import time
from dataclasses import dataclass

import torch

from pretrain.model_config import EncoderConfig

# Dense tensor-core peaks in FLOP/s from NVIDIA's data sheets, without sparsity: (16-bit, fp32 as TF32 on tensor cores).
_PEAKS = {"H200": (989e12, 495e12), "H100": (989e12, 495e12), "A100": (312e12, 156e12), "V100": (125e12, 15.7e12)}


@dataclass(frozen=True, slots=True)
class Peak:
    """The most FLOP/s that one rank could do, and where the number is from."""

    flops: float
    source: str


@functools.cache
def device_peak(device: torch.device, precision: str) -> Peak:
    """The data sheet's value for a known GPU, else the best of a few matrix products timed here."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key, (half, full) in _PEAKS.items():
            if key in name:
                return Peak(full if precision == "fp32" else half, f"NVIDIA data sheet, {key}, {precision}")
    size = 1024
    left = torch.rand(size, size, device=device)
    best = 0.0
    for _ in range(4):
        begin = time.perf_counter()
        float((left @ left)[0, 0])
        best = max(best, 2 * size**3 / (time.perf_counter() - begin))
    return Peak(best, f"fp32 matrix product of {size} measured on this {device.type} at start")


def training_flops(model: EncoderConfig, *, tokens: float, predictions: float, examples: float) -> float:
    """FLOPs that forward and backward need: matrix products only, backward counted as twice forward.

    Per token and layer 2 FLOPs a weight: attention 4 h^2, feed-forward 2 h i (3 h i gated); attention scores and
    values 4 h s with s the mean length, in local layers at most their window; per prediction the head's h^2 and h V. As in https://arxiv.org/abs/2204.02311,
    appendix B, recomputed activations are not counted.
    """
    hidden = model.hidden
    length = tokens / max(examples, 1)
    weights = 4 * hidden**2 + (3 if model.gated else 2) * hidden * model.intermediate
    spans = sum(length if model.is_global(layer) else min(length, model.local_window) for layer in range(model.layers))
    per_token = model.layers * 2 * weights + 4 * hidden * spans
    per_prediction = 2 * hidden * model.embedding_width + 2 * model.embedding_width * model.padded_vocab_size
    return 3 * (tokens * per_token + predictions * per_prediction)


def memory_megabytes(device: torch.device) -> float:
    """The most memory this rank has held: on the GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # Linux counts in KiB
