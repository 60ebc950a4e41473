"""`python -m eval.nightly --runs DIR --tasks NAMES --data DIR --output DIR`: evaluate what is new, and say what got worse.

For each run with a new checkpoint: export, fine-tune and score, log to MLflow, register the export with its scores. Then one
page (index.html) and report.md: scores beside the night before, the best so far and the paper. Exit codes: 0 nothing got worse,
1 a score fell beyond the noise of seeds or something did not work, 2 wrong usage, 75 another one is at work. The same command
goes on where it was stopped. Scheduling: docs/cluster.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eval.nightly_page import write_pages
from eval.nights import Night, Verdict, add_night, judge, read_nights, scores_of
from eval.report import task_label
from eval.report_data import ReportError, as_number, find_runs, read_run
from eval.tasks import TaskError, select_tasks

EXIT_WORSE, EXIT_USAGE, EXIT_BUSY = 1, 2, 75


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.nightly", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", required=True, nargs="+", type=Path, help="run folders (runs/demo), or folders of runs"
    )
    parser.add_argument("--tasks", required=True, nargs="+", help="task names, or glue for all nine")
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("CLOZEWORKS_DATA"), help="folder with the tasks' files"
    )
    parser.add_argument("--output", required=True, type=Path, help="folder of the history, exports, results and pages")
    parser.add_argument("--seeds", type=int, default=3, help="the noise is known from two on (default 3)")
    parser.add_argument("--evaluation", default="", metavar="OPTIONS", help="more options of eval.run, in one word")
    parser.add_argument("--tracking-uri", default="", help="MLflow (default: the run's own store); none: do not log")
    parser.add_argument("--model-name", default="", help="of the registered model (default: the run's name)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    options = build_parser().parse_args(arguments)
    try:
        if options.data is None:
            raise TaskError("no data folder: pass --data or set CLOZEWORKS_DATA")
        select_tasks(options.tasks)
        folders = [folder for runs in options.runs for folder in find_runs(runs)]
        with _alone(options.output) as alone:
            if not alone:
                print(f"eval.nightly: another one is at work in {options.output}", file=sys.stderr)
                return EXIT_BUSY
            return _night(options, folders)
    except (TaskError, ReportError) as error:
        print(f"eval.nightly: {error}", file=sys.stderr)
        return EXIT_USAGE


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[bool]:
    """Whether no other process works in the folder; held until the end."""
    output.mkdir(parents=True, exist_ok=True)
    with open(output / ".lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def _night(options: argparse.Namespace, folders: Sequence[Path]) -> int:
    """Evaluate what is new, write the pages, return the exit code."""
    runs = [read_run(folder) for folder in folders]
    twice = [name for name, count in Counter(run.name for run in runs).items() if count > 1]
    if twice:
        raise TaskError(
            f"several runs are called {twice[0]!r}; their history would be mixed: evaluate one of them only"
        )
    earlier = read_nights(options.output)
    tonight: list[Night] = []
    for folder in folders:
        night = _evaluate(options, folder, earlier)
        if night is not None:
            add_night(options.output, night)
            tonight.append(night)
    verdicts = {night.run: judge(night, earlier) for night in tonight}
    alerts = alerts_of(tonight, verdicts)
    write_pages(options.output, [*earlier, *tonight], {night.run for night in tonight}, alerts, runs)
    for alert in alerts:
        print(f"eval.nightly: {alert}", file=sys.stderr)
    print(f"report: {options.output / 'index.html'}")
    return EXIT_WORSE if alerts else 0


def alerts_of(tonight: Sequence[Night], verdicts: dict[str, list[Verdict]]) -> list[str]:
    """What must be looked at: regressions, held-out losses that are not finite, and what did not work."""
    alerts = []
    for night in tonight:
        for verdict in verdicts[night.run]:
            if verdict.regression:
                score = verdict.score
                alerts.append(
                    f"{night.run} step {night.step}: {score.label} {score.split} {score.metric}: {verdict.regression}"
                )
        loss = as_number(night.held_out.get("mlm_loss"))
        if loss is not None and not math.isfinite(loss):
            alerts.append(f"{night.run} step {night.step}: the held-out MLM loss is {loss}")
        alerts += [f"{night.run} step {night.step}: {problem}" for problem in night.problems]
    return alerts


def _evaluate(options: argparse.Namespace, folder: Path, earlier: Sequence[Night]) -> Night | None:
    """One run's newest checkpoint; None where there is none or it was evaluated like this before."""
    from pretrain.checkpoint import WEIGHTS, CheckpointError, newest_complete, read_state

    newest = newest_complete(folder / "pretrain" / "checkpoints", report=lambda line: print(line, file=sys.stderr))
    if newest is None:
        print(f"{folder}: no complete checkpoint")
        return None
    try:
        state = read_state(newest)
        weights = json.loads((newest / "manifest.json").read_text(encoding="utf-8"))["files"][WEIGHTS]["sha256"]
    except (CheckpointError, OSError, KeyError, ValueError) as error:
        print(f"{newest}: {error}", file=sys.stderr)
        return None
    run = read_run(folder)
    tasks = [task.name for task in select_tasks(options.tasks)]
    evaluation = ["--seeds", str(options.seeds), *shlex.split(options.evaluation)]
    settings = hashlib.sha256(json.dumps([tasks, evaluation]).encode()).hexdigest()[:12]
    if any((past.run, past.weights, past.settings) == (run.name, weights, settings) for past in earlier):
        print(f"{run.name}: step {state.step} was evaluated before")
        return None
    problems: list[str] = []
    model = _export(newest, options.output / "exports" / run.name / newest.name, problems)
    output = options.output / "eval" / run.name / f"{newest.name}-{settings}"
    groups = _run_tasks(model or newest, tasks, evaluation, options.data, output, problems)
    held_out: dict[str, Any] = next((row for row in reversed(run.validation) if row["step"] <= state.step), {})
    night = Night(
        time=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        run=run.name,
        step=state.step,
        weights=weights,
        settings=settings,
        scores=scores_of(groups, task_label),
        held_out=held_out,
    )
    version = ""
    if options.tracking_uri != "none" and model is not None:
        version = _register(options, folder, run.description, night, model, problems)
    return dataclasses.replace(night, version=version, problems=tuple(problems))


def _export(checkpoint: Path, output: Path, problems: list[str]) -> Path | None:
    """The Hugging Face folder; None where the architecture has none, and the checkpoint itself is evaluated."""
    from pretrain.export import main as export

    code = export(["--checkpoint", str(checkpoint), "--output", str(output)])
    if code:
        problems.append("could not be exported and is not registered; the checkpoint itself was evaluated")
        return None
    return output


def _run_tasks(
    model: Path, tasks: Sequence[str], evaluation: Sequence[str], data: Path, output: Path, problems: list[str]
) -> list[dict[str, Any]]:
    """Groups of results.json; a task that cannot be run is a problem and not the end of the others."""
    from eval.run import main as run

    for task in tasks:
        command = ["--model", str(model), "--data", str(data), "--output", str(output), "--tasks", task, *evaluation]
        if run(command):
            problems.append(f"{task} could not be evaluated (see the log)")
    path = output / "results.json"
    return json.loads(path.read_text(encoding="utf-8"))["results"] if path.is_file() else []


def _register(
    options: argparse.Namespace,
    folder: Path,
    description: dict[str, Any],
    night: Night,
    model: Path,
    problems: list[str],
) -> str:
    """The version; a store that is away is a problem, and the scores are on disk."""
    from pretrain.model_registry import register_export
    from pretrain.tracking import default_uri

    uri = options.tracking_uri or description.get("mlflow_uri") or os.environ.get("MLFLOW_TRACKING_URI", "")
    metrics = {f"eval/{s.label}/{s.split}/{s.metric}": s.mean for s in night.scores if s.mean is not None}
    words = {
        f"{s.label}.{s.split}.{s.metric}": f"{s.mean}" + ("" if s.sd is None else f" sd {s.sd:.4f}") + f" n {s.n}"
        for s in night.scores
    }
    try:
        return register_export(
            uri or default_uri(folder / "pretrain"),
            name=options.model_name or night.run,
            folder=model,
            weights=night.weights,
            step=night.step,
            metrics=metrics,
            tags=words | {"perplexity": str(night.held_out.get("perplexity"))},
            run_id=str(description.get("mlflow_run_id", "")),
        ).version
    except Exception as error:  # noqa: BLE001 - whatever a store does, the scores are kept
        problems.append(f"MLflow: {type(error).__name__}: {str(error).splitlines()[0]}; not registered")
        return ""


if __name__ == "__main__":
    raise SystemExit(main())
