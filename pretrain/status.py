"""`python -m pretrain.status RUN_DIR`: where a run stands, whether it lives or is dead, read from its folder alone."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain import checkpoint
from pretrain.tracking import unsent_bytes

_QUIET_STEPS = 10
"""A run that has written nothing for so many of its logging intervals, and at least a minute, is called silent."""


class StatusError(ValueError):
    """The folder holds no run; the message names it."""


def describe(run_dir: Path, *, now: float | None = None) -> str:
    """A few lines about a run.

    Args:
        run_dir: the folder, or the one above it that holds `pretrain/`.
        now: seconds since 1970; None: the clock's.

    Raises:
        StatusError: no run.json there, or an unreadable one.
    """
    folder = run_dir if (run_dir / "run.json").is_file() else run_dir / "pretrain"
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        config = record["config"]
        total = config["train"]["steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StatusError(f"{run_dir}: no run here ({error}); name the folder that holds run.json") from error
    lines = _records(folder / "metrics.jsonl")
    train = [line for line in lines if line.get("kind") == "train"]
    held_out = [line for line in lines if line.get("kind") == "validation"]
    checkpoints = checkpoint.list_steps(folder / "checkpoints")
    now = time.time() if now is None else now
    rows = [
        ("run", f"{record['name']}, {record.get('parameters', 0):,} parameters, {len(record.get('starts', []))} starts")
    ]
    heard = max(
        (float(line["time"]) for line in (lines[-1:] + record.get("starts", [])[-1:]) if "time" in line), default=now
    )
    rows.append(("state", _state(train, checkpoints, total, config["train"]["log_every"], now - heard)))
    if train:
        rows += _progress(train[-1], total)
        rows += _machine(next((line["system"] for line in reversed(train) if "system" in line), {}))
    if held_out:
        last = held_out[-1]
        rows.append(
            ("held-out", f"step {last['step']:,}: MLM loss {_number(last['mlm_loss'])}, best {_best(held_out)}")
        )
    if record.get("unigram_loss") is not None:
        rows.append(("baseline", f"MLM loss {_number(record['unigram_loss'])} of guessing by frequency"))
    rows.append(("saved", ", ".join(str(checkpoint.step_of(path)) for path in checkpoints) or "nothing yet"))
    rows.append(("tracking", _tracking(folder, record)))
    if record.get("changes"):
        rows.append(("changed", "; ".join(record["changes"])))
    return "\n".join(f"{name:<10}{text}" for name, text in rows)


def _records(path: Path) -> list[dict[str, Any]]:
    """Whole lines of metrics.jsonl; a last one that is being written is left out."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _state(
    train: Sequence[dict[str, Any]], checkpoints: Sequence[Path], total: int, log_every: int, quiet: float
) -> str:
    """What the run does; `quiet`: seconds since its last line of metrics or its last start."""
    saved = checkpoint.step_of(checkpoints[-1]) if checkpoints else None
    if saved == total:
        return "complete"
    if not train:
        return f"no step yet, started {_duration(quiet)} ago"
    last = train[-1]
    if saved == last["step"] and last.get("budget_seconds_left", 1) <= 0:
        return "complete: the time budget is used up"
    if quiet > max(_QUIET_STEPS * log_every * float(last["step_seconds"]), 60.0):
        return f"silent for {_duration(quiet)}: stopped or dead; the same command goes on from the newest checkpoint"
    return f"running, last sign {_duration(quiet)} ago"


def _progress(last: dict[str, Any], total: int) -> list[tuple[str, str]]:
    left = (total - last["step"]) * float(last["step_seconds"])
    if "budget_seconds_left" in last:
        left = min(left, last["budget_seconds_left"])
    rows = [
        ("step", f"{last['step']:,} of {total:,} ({last['step'] / total:.1%}), {_duration(left)} left"),
        (
            "loss",
            f"{_number(last['loss'])}, MLM accuracy {_number(last['mlm_accuracy'])}, gradient {_number(last['grad_norm'])}",
        ),
        ("rate", f"{last['lr']:.3e}"),
        ("speed", _speed(last)),
    ]
    if last.get("straggler_rank") is not None:
        ratio = f"{last['straggler_ratio']:.2f} times the median rank's own time (data, forward pass)"
        rows.append(("slowest", f"rank {last['straggler_rank']}, {ratio}"))
    if last["skipped_steps"]:
        rows.append(("skipped", f"{last['skipped_steps']:,} steps with a gradient that was not finite"))
    return rows


def _speed(last: dict[str, Any]) -> str:
    return (
        f"{last['tokens_per_second']:,.0f} tokens/s, {float(last['step_seconds']) * 1000:.0f} ms a step{_spread(last)}, "
        f"MFU {last['mfu']:.1%}, waiting for data {last['data_wait_share']:.1%}, {last['memory_mb']:,.0f} MB"
    )


def _machine(system: dict[str, float]) -> list[tuple[str, str]]:
    """Rank 0's machine when it was last looked at; GPUs by their busiest and fullest."""
    parts = []
    for label, names in {
        "CPU": ["cpu_utilization_percentage"],
        "memory": ["system_memory_usage_percentage"],
        "disk": ["disk_usage_percentage"],
        "GPU": [name for name in system if name.startswith("gpu_") and name.endswith("_utilization_percentage")],
        "GPU memory": [
            name for name in system if name.startswith("gpu_") and name.endswith("_memory_usage_percentage")
        ],
    }.items():
        found = [system[name] for name in names if name in system]
        if found:
            parts.append(f"{label} {max(found):.0f}%")
    return [("machine", ", ".join(parts))] if parts else []


def _spread(last: dict[str, Any]) -> str:
    """Percentiles of the step's time in the last interval."""
    found = [
        f"{key} {last[name] * 1000:.0f}" for key in ("p50", "p95", "max") if (name := f"step_seconds_{key}") in last
    ]
    return f" ({', '.join(found)})" if found else ""


def _best(held_out: Sequence[dict[str, Any]]) -> str:
    numbers = [(line["mlm_loss"], line["step"]) for line in held_out if isinstance(line["mlm_loss"], float)]
    if not numbers:
        return "none that is finite"
    loss, step = min(numbers)
    return f"{loss:.4f} at step {step:,}"


def _tracking(folder: Path, record: dict[str, Any]) -> str:
    if not record["config"].get("tracking", {}).get("enabled", False):
        return "off"
    behind = unsent_bytes(folder)
    where = f"{record.get('mlflow_uri', 'no store reached yet')} {record.get('mlflow_run_id', '')}".strip()
    return f"{where}, {behind:,} bytes of metrics.jsonl not sent yet" if behind else f"{where}, all sent"


def _number(value: float | str | None) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours}:{minutes:02d}:{seconds:02d}" if days else f"{hours}:{minutes:02d}:{seconds:02d}"


def main(arguments: list[str] | None = None) -> int:
    """Print the status; 2 where there is no run."""
    parser = argparse.ArgumentParser(prog="python -m pretrain.status", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="run folder, e.g. runs/demo/pretrain")
    options = parser.parse_args(arguments)
    try:
        print(describe(options.run_dir))
    except StatusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
