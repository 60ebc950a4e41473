"""`deepspeed pretrain/run.py --config configs/demo.toml [--set optimizer.lr=1e-4] [--dry-run]`: pretrain an encoder.

The same command again continues the run in `run.dir` from its newest complete checkpoint. Exit codes: 0 complete, 2 wrong
usage or configuration, 70 numbers that are no longer finite, 71 a rank made no progress, 74 a checkpoint could not be
written, 75 stopped by a signal or the time budget with a checkpoint saved, anything else a crash. Signals, and what
DeepSpeed's launcher makes of them: pretrain/stops.py.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

_HERE = Path(__file__).resolve().parent
# A script's own folder comes first on sys.path; here that would make every module of ours a top-level name.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
if str(_HERE.parent) not in sys.path:
    sys.path.insert(0, str(_HERE.parent))

from cluster.world import World, WorldError, current_world
from data_pipeline.config import ConfigError, add_config_arguments
from pretrain import checkpoint
from pretrain.config import TrainConfig, load_config
from pretrain.deepspeed_config import deepspeed_config
from pretrain.phases import phases_of
from pretrain.run_folder import fixed_changes
from pretrain.run_tracking import send_rest
from pretrain.stops import EXIT_DONE, EXIT_FAULT, EXIT_NOT_SAVED, EXIT_USAGE, StopRequest, TrainingFault

_EXPECTED = (ConfigError, WorldError, checkpoint.CheckpointError, TrainingFault)
"""Errors with one message for the user; raised before the process group exists, or on all ranks together."""


def main(arguments: list[str] | None = None) -> int:
    """Parse, check everything that can be checked without a process group, train. Returns the exit code."""
    options = _parse(arguments)
    try:
        world = current_world()
        config = load_config(options.config, options.overrides)
        for phase in phases_of(config):
            deepspeed_config(phase.config, world.size)  # refuses sizes that do not divide
        done = _finished(config)
        if done and not options.dry_run:
            if world.rank == 0:
                print(f"complete: {checkpoint.step_of(done)} steps, {done}; nothing to do", flush=True)
                told = send_rest(config)
                if told:
                    print(told, flush=True)
            return EXIT_DONE
        return _run(config, world, dry_run=options.dry_run)
    except _EXPECTED as error:
        return _report(error)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="deepspeed pretrain/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="check configuration and data, print sizes, train nothing"
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # added by DeepSpeed's launcher
    return parser.parse_args(arguments)


def _run(config: TrainConfig, world: World, *, dry_run: bool) -> int:
    from pretrain.dry_run import describe_run
    from pretrain.run_data import RunData

    if dry_run:
        if world.rank == 0:
            print(describe_run(config, world), flush=True)
        return EXIT_DONE
    data = RunData(config)
    config = data.model_config()
    stop = StopRequest(budget_seconds=3600 * config.run.max_hours)
    stop.listen()
    from pretrain.engine import stop_ranks  # ten seconds of imports: only now
    from pretrain.trainer import train

    try:
        code = train(config, world, data, stop)
    except _EXPECTED as error:
        # all ranks are here; after any other error some may not be, and leaving the group could wait for them
        code = _report(error, everywhere=True)
    stop_ranks()
    return code


def _finished(config: TrainConfig) -> Path | None:
    """The checkpoint of the last step, or of the end of the time budget, where this run has one."""
    root, budget = Path(config.run.dir) / "checkpoints", config.schedule.budget_seconds
    folder = root / checkpoint.step_name(config.train.steps)
    if budget:
        folder = next(reversed(checkpoint.list_steps(root)), folder)
    try:
        checkpoint.verify(folder, hashes=False)
        state = checkpoint.read_state(folder)
    except checkpoint.CheckpointError:
        return None
    if not _is_of_this_run(state, config):
        return None
    return folder if state.step == config.train.steps or 0 < budget <= state.seconds_used else None


def _is_of_this_run(state: checkpoint.TrainerState, config: TrainConfig) -> bool:
    """Whether the folder's run wrote it, with the settings that make a run; where not, the start itself says why."""
    try:
        record = json.loads((Path(config.run.dir) / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    current, stored = config.as_tree(), state.config["model"]
    current["model"]["pad_id"] = stored["pad_id"]  # this and the vocabulary are filled in from the data
    current["model"]["vocab_size"] = config.model.vocab_size or stored["vocab_size"]
    return record.get("run_id") == state.run_id and not fixed_changes(state.config, current)


def _crash() -> NoReturn:
    """Say which rank failed and how, and end at once: the other ranks, or threads, may never come to an end."""
    text = f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()} failed:\n{traceback.format_exc()}"
    sys.stdout.flush()
    os.write(2, text.encode())  # one write: lines of several ranks do not mix
    os._exit(1)


def _report(error: Exception, *, everywhere: bool = False) -> int:
    """Say it once for all ranks where it was raised `everywhere`, else once a node. Returns the exit code."""
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        print(f"error: {error}", file=sys.stderr, flush=True)
    elif not everywhere and os.environ.get("LOCAL_RANK") == "0":  # its file or data may lack what rank 0's node has
        print(f"error: rank {rank} on {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
    if isinstance(error, checkpoint.SaveError):
        return EXIT_NOT_SAVED
    return EXIT_FAULT if isinstance(error, TrainingFault) else EXIT_USAGE


if __name__ == "__main__":
    try:
        exit_code = main()
    except Exception:  # noqa: BLE001 - shown with its traceback
        _crash()
    sys.exit(exit_code)
