"""`python -m eval.run --model DIR --tasks NAMES --data DIR --output DIR`: fine-tune a checkpoint on tasks and score it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.plan import Plan, parse_grid, parse_part
from eval.tasks import TASKS, Task, TaskError, select_tasks

if TYPE_CHECKING:
    from eval.source import ModelSource

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
    parser.add_argument("--model", required=True, type=Path, help="Hugging Face folder, run folder or checkpoint")
    parser.add_argument("--tasks", required=True, nargs="+", help="task names, or glue for all nine")
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("CLOZEWORKS_DATA"),
        help="folder with the official files (default: $CLOZEWORKS_DATA)",
    )
    parser.add_argument(
        "--download", action="store_true", help="fetch files that --data lacks through the datasets library first"
    )
    parser.add_argument("--output", required=True, type=Path, help="folder for results; finished ones are kept")
    _add_experiment_arguments(parser)
    parser.add_argument(
        "--predictions", action="store_true", help="write prediction files too: GLUE's test sets, SQuAD's answers"
    )
    parser.add_argument(
        "--save-models",
        action="store_true",
        help="write each fine-tuned model as a Hugging Face folder beside its result",
    )
    parser.add_argument(
        "--evaluate-only", action="store_true", help="the model is fine-tuned already: score its own classifier"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="processes that share the runs, each with one GPU where there are some (default 1)",
    )
    parser.add_argument("--part", default="0/1", metavar="K/N", help="take part K of N of the runs, for a job array")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto takes a GPU where there is one")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: matrix products in bfloat16 (default fp32)"
    )
    parser.add_argument("--dry-run", action="store_true", help="read the data, say what would run, train nothing")
    return parser


def _add_experiment_arguments(parser: argparse.ArgumentParser) -> None:
    """What decides the scores, beside model and tasks."""
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
        "--bilstm", type=int, default=0, help="layers of a new BiLSTM on top of the encoder (default 0)"
    )
    parser.add_argument("--tokenizer", type=Path, help="tokenizer folder of a checkpoint (default: that of its run)")


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
    if options.download:
        from eval.download import fetch

        for name in dict.fromkeys(name for task in tasks for name in (task.name, task.train_task) if name):
            fetch(TASKS[name], plan.data)
    if options.dry_run:
        _describe(tasks, plan, options)
        return 0
    if options.workers > 1:
        code = _share(arguments, options.workers)
        if code:
            return code
    print(f"results: {run_suite(_source(options), tasks, plan, evaluate_only=options.evaluate_only)}")
    return 0


def _source(options: argparse.Namespace) -> ModelSource:
    from eval.source import ModelSource

    return ModelSource(options.model, tokenizer=options.tokenizer, bilstm=options.bilstm)


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
        save_models=options.save_models,
        precision=options.precision,
        part=part,
        parts=parts,
        device=options.device,
    )


def _share(arguments: Sequence[str], workers: int) -> int:
    """Run the command in several processes, each a part. The first failure's exit code."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "eval.run", *arguments, "--workers", "1", "--part", f"{part}/{workers}"],
            env=os.environ | worker_environment(part, workers, visible_gpus()),
        )
        for part in range(workers)
    ]
    return next((code for code in [process.wait() for process in processes] if code), 0)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip() not in ("", "-1")]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def worker_environment(part: int, workers: int, gpus: Sequence[str]) -> dict[str, str]:
    """What a worker's environment adds: its share of the cores and, where there are GPUs, one of them in turn."""
    cores = max(1, len(os.sched_getaffinity(0)) // workers)
    return {"OMP_NUM_THREADS": str(cores)} | ({"CUDA_VISIBLE_DEVICES": gpus[part % len(gpus)]} if gpus else {})


def _describe(tasks: Sequence[Task], plan: Plan, options: argparse.Namespace) -> None:
    from eval.estimate import estimate_run, in_words
    from eval.suite import resolve_device
    from eval.task_data import read_task

    print(f"model {options.model}, data {plan.data}, output {plan.output}; nothing is trained")
    there = (options.model / "config.json").is_file() or (options.model / "run.json").is_file()
    source = _source(options) if there or options.model.name.startswith("step-") else None
    total = 0.0
    for task in tasks:
        data, recipe = read_task(task, plan.data, plan.max_train_examples), plan.recipe(task)
        scored = ", ".join(f"{name} {len(examples)}" for name, examples in data.scored.items())
        settings = len(plan.recipes(task))
        times = f"{settings} settings x " if settings > 1 else ""
        estimate = None if source is None else estimate_run(source, data, recipe, resolve_device(plan.device))
        units = len(data.train) if estimate is None else estimate.units
        steps = -(-units // recipe.batch_size) * recipe.epochs
        # A step of a span or tagging task counts windows or rows, which only tokenizing tells: all of it or a sample.
        about = {"span": "at least ", "tagging": "at most "}.get(task.head, "") if estimate is None else ""
        about = "about " if estimate is not None and not estimate.exact else about
        line = (
            f"{task.name}: train on {len(data.train)}, score {scored}; batch {recipe.batch_size}, "
            f"rate {recipe.learning_rate:g}, {recipe.epochs} epochs, {about}{steps} steps x {times}{plan.seeds} seeds, "
            f"up to {recipe.max_length} tokens"
        )
        if estimate is not None:
            total += estimate.seconds * settings * plan.seeds
            line += f"; about {in_words(estimate.seconds)} a run"
        print(line)
    if total:
        print(f"about {in_words(total)} in all on this machine in one process")


if __name__ == "__main__":
    raise SystemExit(main())
