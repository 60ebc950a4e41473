"""`python -m eval.ablations [--table NAME ...] --plan | --run | --slurm | --show`: the BERT paper's ablations.

Pretrains and fine-tunes what the rows of configs/ablations/tables.toml need, and sets the scores beside the paper's. What is
finished is not repeated: the same command goes on. Afterwards `python -m eval.report --runs ROOT --output DIR` shows the
tables above the curves of all runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from cluster.slurm import SlurmError, submit_script
from data_pipeline.artefacts import write_text
from data_pipeline.config import ConfigError
from eval.ablation_rows import FOLDER, Row, Setup, Step, Table, load_tables, steps
from eval.ablation_table import as_json, as_markdown, render
from eval.job_array import quoted
from eval.report_data import TABLES
from eval.tasks import TaskError, select_tasks

MARKDOWN = "ablations.md"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.ablations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--plan", action="store_true", help="print the commands, those that are done as comments")
    action.add_argument("--run", action="store_true", help="run them one after another, then show the tables")
    action.add_argument("--slurm", action="store_true", help="queue one job for the data and one for each pretraining")
    action.add_argument("--show", action="store_true", help="write and print the tables from what lies on disk")
    parser.add_argument("--table", nargs="+", default=[], help="objectives, size, masking (default: all)")
    parser.add_argument("--rows", nargs="+", default=[], metavar="RUN", help="only rows of these runs, see tables.toml")
    parser.add_argument("--size", choices=("small", "base"), default="small", help="configs/ablations/SIZE.toml")
    parser.add_argument("--config", type=Path, help="in place of the size's configuration")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="TABLE.KEY=VALUE")
    parser.add_argument("--root", type=Path, help="folder of all runs (default: runs/ablations/SIZE)")
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("CLOZEWORKS_DATA"), help="folder with the tasks' files"
    )
    parser.add_argument("--tasks", nargs="+", default=[], help="instead of the tasks of the paper's columns")
    parser.add_argument("--seeds", type=int, default=5, help="of fine-tuning (default 5, as in table 6)")
    parser.add_argument(
        "--evaluation",
        metavar="OPTIONS",
        help='more options of eval.run, in one word: "--epochs 1" (default: "--max-length 128 --stride 64" for the small size)',
    )
    parser.add_argument("--ranks", type=int, default=0, help="of pretraining (default: one for each GPU, else one)")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="=--OPTION=VALUE", help="with --slurm; repeatable"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command: 0 done, 1 a command failed, 2 wrong usage, 75 stopped by a signal."""
    options = build_parser().parse_args(arguments)
    try:
        tables = _select(options)
        setup = _setup(options)
        if options.show:
            return _show(setup, load_tables())
        todo = [(row, step, _is_done(setup, row, step)) for row, step in steps(setup, tables)]
        if options.plan:
            for _, step, done in todo:
                print(f"# {step.what}{': done' if done else ''}\n{'# ' if done else ''}{shlex.join(step.command)}")
            return 0
        if options.slurm:
            return _queue(setup, todo, options.sbatch)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        failed = _run(setup, todo)
        _show(setup, load_tables())
        return int(bool(failed))
    except (ConfigError, TaskError, SlurmError) as error:
        print(f"eval.ablations: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("eval.ablations: stopped; the same command goes on", file=sys.stderr)
        return 75


def _select(options: argparse.Namespace) -> list[Table]:
    tables = {table.name: table for table in load_tables()}
    unknown = [name for name in options.table if name not in tables]
    runs = {row.run for table in tables.values() for row in table.rows}
    if unknown:
        raise ConfigError(f"--table {unknown[0]}: no such table; known: {', '.join(tables)}")
    if set(options.rows) - runs:
        raise ConfigError(f"--rows {min(set(options.rows) - runs)}: no such run; known: {', '.join(sorted(runs))}")
    chosen = [tables[name] for name in options.table] or list(tables.values())
    if not options.rows:
        return chosen
    return [
        table.model_copy(update={"rows": tuple(row for row in table.rows if row.run in options.rows)})
        for table in chosen
    ]


def _setup(options: argparse.Namespace) -> Setup:
    if options.data is None and not options.show:
        raise ConfigError("no data folder: pass --data or set CLOZEWORKS_DATA")
    if options.seeds < 1:
        raise ConfigError(f"--seeds is too small: {options.seeds}")
    evaluation = options.evaluation
    if evaluation is None:  # the small models have 128 positions
        evaluation = "--max-length 128 --stride 64" if options.size == "small" else ""
    tasks = [task.name for task in select_tasks(options.tasks)] if options.tasks else []
    ranks = [f"--num_gpus={options.ranks}"] if options.ranks else []
    if not ranks and not options.show:
        import torch

        ranks = [] if torch.cuda.is_available() else ["--num_gpus=1"]
    return Setup(
        size=options.size,
        config=options.config or FOLDER / f"{options.size}.toml",
        root=options.root or Path("runs", "ablations", options.size),
        data=Path(options.data or "."),
        overrides=tuple(options.overrides),
        tasks=tuple(tasks),
        evaluation=("--seeds", str(options.seeds), *shlex.split(evaluation)),
        launcher=(str(Path(sys.executable).with_name("deepspeed")), *ranks),
    )


def _is_done(setup: Setup, row: Row, step: Step) -> bool:
    """Whether a command has nothing left to do. A finished evaluation says so itself, run by run, and is quick."""
    return step.kind != "evaluation" and step.what != "shared data" and pretraining_is_complete(setup, row)


def pretraining_is_complete(setup: Setup, row: Row) -> bool:
    """Whether the row's last step is saved, with the settings that are asked for now.

    Raises:
        ConfigError: the row's configuration cannot be used.
    """
    from pretrain.checkpoint import newest_complete, read_state
    from pretrain.config import load_config
    from pretrain.run_folder import changed_keys

    config = load_config(setup.config, setup.run_settings(row))
    newest = newest_complete(Path(config.run.dir) / "checkpoints", report=lambda line: None)
    if newest is None:
        return False
    state = read_state(newest)
    # Taken from the data when the run began.
    filled = ("model.vocab_size", "model.pad_id")
    changes = [line for line in changed_keys(state.config, config.as_tree()) if not line.startswith(filled)]
    return not changes and state.step >= config.train.steps


def _run(setup: Setup, todo: Sequence[tuple[Row, Step, bool]]) -> list[str]:
    """Run what is left; a run whose data or pretraining failed is not evaluated, the others go on."""
    failed: list[str] = []
    broken: set[str] = set()
    needed = {row.run for row, step, done in todo if step.kind == "pretraining" and not done}
    for row, step, done in todo:
        if done or row.run in broken or (step.what == "shared data" and not needed):
            continue
        print(f"{time.strftime('%H:%M:%S')} {step.what}", flush=True)
        code = call(step.command)
        if code:
            print(
                f"eval.ablations: {step.what} ended with exit code {code}: {shlex.join(step.command)}", file=sys.stderr
            )
            failed.append(step.what)
            broken.add(row.run)
            if step.what == "shared data":
                break
    return failed


def call(command: Sequence[str]) -> int:
    """Run a command in a process group of its own and return its exit code.

    Where this process is interrupted (Ctrl-C, SIGTERM), the whole group is told to end: DeepSpeed's launcher would leave its
    ranks behind. They save a checkpoint first, which is waited for.
    """
    asked: list[int] = []
    # A signal between the start of the process and the `try` would leave it behind: hold it back until then.
    before = {number: signal.signal(number, lambda n, _: asked.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    process = subprocess.Popen(command, start_new_session=True)
    try:
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        signal.signal(signal.SIGTERM, _interrupt)
        if asked:
            raise KeyboardInterrupt
        return process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            until = time.monotonic() + 60
            while time.monotonic() < until:  # ranks that outlive their launcher
                os.killpg(process.pid, 0)
                time.sleep(0.2)
        raise
    finally:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _queue(setup: Setup, todo: Sequence[tuple[Row, Step, bool]], directives: Sequence[str]) -> int:
    """One job for the shared data, then one for each pretraining with its evaluations."""
    jobs: dict[str, list[Step]] = {}
    for row, step, done in todo:
        if not done:
            jobs.setdefault("data" if step.what == "shared data" else row.run, []).append(step)
    first = 0
    for name, chain in jobs.items():
        path = setup.root / "jobs" / f"{name}.sh"
        write_text(path, job_script(f"ablation-{name}", chain, directives, setup.root / "jobs"))
        after = [f"--dependency=afterok:{first}", "--kill-on-invalid-dep=yes"] if first else []
        job_id = submit_script(path, options=after)
        first = job_id if name == "data" else first
        print(f"{job_id} {name}: {', '.join(step.what for step in chain)}")
    return 0


def job_script(name: str, chain: Sequence[Step], directives: Sequence[str], logs: Path) -> str:
    """A job that runs a chain on one node; queued again after a failure it goes on where it was."""
    log = str(logs.absolute()).replace("%", "%%")
    options = [f"--job-name={name}", f"--output={log}/{name}-%j.log", "--requeue", "--open-mode=append", *directives]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {quoted(option)}" for option in options),
            "set -e",
            f"cd {shlex.quote(str(Path.cwd()))}",
            *(shlex.join(step.command) for step in chain),
            "",
        ]
    )


def _show(setup: Setup, tables: Sequence[Table]) -> int:
    rendered = render(tables, setup.root)
    text = as_markdown(rendered)
    write_text(setup.root / MARKDOWN, text)
    write_text(setup.root / TABLES, as_json(rendered))
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
