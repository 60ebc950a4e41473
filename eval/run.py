"""`python -m eval.run --model DIR --tasks NAMES --data DIR --output DIR`: fine-tune a checkpoint on tasks and score it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.plan import Plan, parse_grid, parse_part
from eval.tasks import TASKS, Task, TaskError, select_tasks

_OVERRIDES = ("epochs", "batch_size", "learning_rate", "max_length", "stride")


def _task_lines() -> str:
    lines = ["tasks and the files they expect below --data (or its folder glue/), .gz accepted:"]
    for task in TASKS.values():
        files = ", ".join(
            split.file for name, split in task.splits.items() if name == "train" or name in task.dev_splits
        )
        train = f"; train of {task.train_task}" if task.train_task else ""
        labels = f", {task.labels_file}" if task.labels_file else ""
        lines.append(f"  {task.name:<11} {task.folder}/{{{files}{labels}}}{train}")
        lines.append(f"  {'':<11} {task.about}; {', '.join(task.metrics)}")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """The command line; its help lists every task."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.run",
        description=__doc__,
        epilog=_task_lines(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, type=Path, help="Hugging Face folder (pretrain.export writes one)")
    parser.add_argument("--tasks", required=True, nargs="+", help="task names, or glue for all nine")
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("CLOZEWORKS_DATA"),
        help="folder with the official files (default: $CLOZEWORKS_DATA)",
    )
    parser.add_argument("--output", required=True, type=Path, help="folder for results; finished ones are kept")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each task, with seeds 0, 1, ... (default 1)")
    parser.add_argument("--first-seed", type=int, default=0, help="count seeds from here (default 0)")
    parser.add_argument("--max-train-examples", type=int, default=0, help="train on this many only; 0: all")
    parser.add_argument("--epochs", type=int, help="instead of the task's recipe")
    parser.add_argument("--batch-size", type=int, help="instead of the task's recipe")
    parser.add_argument("--learning-rate", type=float, help="instead of the task's recipe")
    parser.add_argument("--max-length", type=int, help="tokens per example, instead of the task's recipe")
    parser.add_argument("--stride", type=int, help="tokens that two windows of a SQuAD context share (default 128)")
    parser.add_argument(
        "--grid",
        nargs="*",
        metavar="KEY=V,V",
        help="try settings of the recipe in all combinations; without any: the learning rates that the task's row names. "
        "The best on dev is marked as such",
    )
    parser.add_argument(
        "--start-task", default="", help="fine-tune on this task first (MNLI) and start the others from there"
    )
    parser.add_argument(
        "--predictions", action="store_true", help="write prediction files too: GLUE's test sets, SQuAD's answers"
    )
    parser.add_argument(
        "--evaluate-only", action="store_true", help="the model is fine-tuned already: score its own classifier"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that share the runs (default 1)")
    parser.add_argument("--part", default="0/1", metavar="K/N", help="take part K of N of the runs, for a job array")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto takes a GPU where there is one")
    parser.add_argument("--dry-run", action="store_true", help="read the data, say what would run, train nothing")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = build_parser().parse_args(arguments)
    from data_pipeline.config import ConfigError
    from eval.readers import ReadError

    try:
        return _run(options, arguments)
    except (TaskError, ReadError, ConfigError) as error:
        print(f"eval.run: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from eval.suite import run_suite

    tasks, plan = select_tasks(options.tasks), make_plan(options)
    if options.workers < 1:
        raise TaskError(f"--workers is too small: {options.workers}")
    if options.dry_run:
        _describe(tasks, plan, options.model)
        return 0
    from eval.source import ModelSource

    if options.workers > 1:
        code = _share(arguments, options.workers)
        if code:
            return code
    print(f"results: {run_suite(ModelSource(options.model), tasks, plan, evaluate_only=options.evaluate_only)}")
    return 0


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan that the command line asks for.

    Raises:
        TaskError: no data folder, or a number out of range.
    """
    if options.data is None:
        raise TaskError("no data folder: pass --data or set CLOZEWORKS_DATA")
    for name in ("seeds", "first_seed", "max_train_examples"):
        if getattr(options, name) < (1 if name == "seeds" else 0):
            raise TaskError(f"--{name.replace('_', '-')} is too small: {getattr(options, name)}")
    overrides: dict[str, Any] = {
        name: getattr(options, name) for name in _OVERRIDES if getattr(options, name) is not None
    }
    part, parts = parse_part(options.part)
    return Plan(
        data=Path(options.data),
        output=options.output,
        seeds=options.seeds,
        first_seed=options.first_seed,
        max_train_examples=options.max_train_examples,
        overrides=overrides,
        grid=parse_grid(options.grid),
        start_task=options.start_task,
        predictions=options.predictions,
        part=part,
        parts=parts,
        device=options.device,
    )


def _share(arguments: Sequence[str], workers: int) -> int:
    """Run the command in several processes, each a part; the cores are shared out. The first failure's exit code."""
    cores = str(max(1, len(os.sched_getaffinity(0)) // workers))
    environment = os.environ | {"OMP_NUM_THREADS": cores}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "eval.run", *arguments, "--workers", "1", "--part", f"{part}/{workers}"],
            env=environment,
        )
        for part in range(workers)
    ]
    return next((code for code in [process.wait() for process in processes] if code), 0)


def _describe(tasks: Sequence[Task], plan: Plan, model: Path) -> None:
    from eval.task_data import read_task

    print(f"model {model}, data {plan.data}, output {plan.output}; nothing is trained")
    total = 0.0
    for task in tasks:
        data, recipe = read_task(task, plan.data, plan.max_train_examples), plan.recipe(task)
        scored = ", ".join(f"{name} {len(examples)}" for name, examples in data.scored.items())
        steps = -(-len(data.train) // recipe.batch_size) * recipe.epochs
        settings = len(plan.recipes(task))
        times = f"{settings} settings x " if settings > 1 else ""
        # A step of a span or tagging task counts windows or rows, which are not known before tokenizing.
        about = "at least " if task.head == "span" else "at most " if task.head == "tagging" else ""
        line = (
            f"{task.name}: train on {len(data.train)}, score {scored}; batch {recipe.batch_size}, "
            f"rate {recipe.learning_rate:g}, {recipe.epochs} epochs, {about}{steps} steps x {times}{plan.seeds} seeds, "
            f"up to {recipe.max_length} tokens"
        )
        if (model / "config.json").is_file():
            from eval.estimate import estimate_seconds, in_words
            from eval.source import ModelSource
            from eval.suite import resolve_device

            one = estimate_seconds(ModelSource(model), data, recipe, resolve_device(plan.device))
            total += one * settings * plan.seeds
            line += f"; about {in_words(one)} a run"
        print(line)
    if total:
        print(f"about {in_words(total)} in all on this machine in one process")


if __name__ == "__main__":
    raise SystemExit(main())
