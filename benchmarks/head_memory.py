"""Peak activation memory of the masked-token head: slices against the full matrix of logits, forward and backward.

Each side runs in a process of its own and reports how far its peak resident memory rises over what weights, inputs and
gradients take. Vocabulary and width of BERT-base; the peer is `linear` and `cross_entropy` of torch.

    python benchmarks/head_memory.py [--quick]
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch
import torch.nn.functional as F
from measure import peak_megabytes, report

from pretrain.linear_cross_entropy import linear_cross_entropy

VOCABULARY, WIDTH = 30522, 768


def rise(side: str, predictions: int) -> float:
    """Megabytes that one forward and backward pass of a side adds to the peak."""
    hidden = torch.randn(predictions, WIDTH, requires_grad=True)
    table, bias = torch.randn(VOCABULARY, WIDTH, requires_grad=True), torch.zeros(VOCABULARY, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (predictions,))
    for tensor in (hidden, table, bias):
        tensor.grad = torch.ones_like(tensor)
    torch.mm(hidden[:8].detach(), table.detach().t()[:, :64])  # loads the library of products
    before = peak_megabytes()
    if side == "ours":
        loss, _ = linear_cross_entropy(hidden, table, bias, labels, VOCABULARY, 256)
    else:
        loss = F.cross_entropy(F.linear(hidden, table, bias), labels, reduction="sum")
    loss.backward()
    return peak_megabytes() - before


def main() -> None:
    """Measure and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,048 predictions instead of 4,096")
    parser.add_argument("--side", choices=["ours", "peer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    predictions = 2048 if options.quick else 4096
    if options.side:
        print(rise(options.side, predictions))
        return
    found = {}
    for side in ("ours", "peer"):
        command = [sys.executable, __file__, "--side", side, *(["--quick"] if options.quick else [])]
        found[side] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    print(f"{predictions:,} predictions of {VOCABULARY:,} entries, width {WIDTH}, fp32")
    print(f"  slices of 256: {found['ours']:,.0f} MB over weights, inputs and gradients")
    print(
        f"  full logits:   {found['peer']:,.0f} MB; the logits alone are {predictions * VOCABULARY * 4 / 2**20:,.0f} MB"
    )
    report("head_memory", found["ours"], "MB", found["peer"], 0.5, higher_is_better=False)


if __name__ == "__main__":
    main()
