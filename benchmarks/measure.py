"""What every benchmark shares: its command line, the machine in words, and the closing JSON line."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def quick_argument(description: str) -> argparse.Namespace:
    """Parse `--quick` (small sizes, same code path)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes: proves that the script runs")
    return parser.parse_args()


def machine() -> str:
    """Processor and number of cores this process may use."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def peak_megabytes() -> float:
    """Peak resident memory of this process. Not ru_maxrss: a child inherits its parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def report(
    name: str,
    value: float,
    unit: str,
    peer: float,
    goal: float | None = None,
    *,
    needed: float | None = None,
    higher_is_better: bool = True,
) -> None:
    """Print the closing JSON line: ratio is value/peer, `met` compares it with the goal.

    Where the goal is a value and no ratio it is given as `needed`, and shown in the line beside the ratio that it is.
    """
    if needed is not None:
        goal = round(needed / peer, 4)
    assert goal is not None
    ratio = value / peer if peer else float("nan")
    met = ratio >= goal if higher_is_better else ratio <= goal
    line = {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "peer": round(peer, 4),
        "ratio": round(ratio, 4),
        "goal": goal,
        **({} if needed is None else {"needed": needed}),
        "met": met if needed is None else value >= needed,
        "machine": machine(),
    }
    print(json.dumps(line))
