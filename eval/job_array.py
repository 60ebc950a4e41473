"""`python -m eval.job_array [--time ...] [--dry-run] -- EVAL.RUN OPTIONS`: an evaluation as one Slurm job array.

Each element takes its part of the runs (tasks x settings x seeds); finished runs are not repeated, so that the same command
goes on after a failure. Options after `--` are those of `eval.run`; folders must be seen by all nodes.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.slurm import SlurmError, submit_script
from data_pipeline.artefacts import write_text
from eval.run import build_parser, make_plan
from eval.tasks import TaskError, select_tasks

NAME = "eval-array.sh"


def array_script(arguments: Sequence[str], elements: int, directives: Sequence[str], log_folder: Path) -> str:
    """The job script: one element runs one part.

    Args:
        arguments: of `eval.run`.
        elements: size of the array.
        directives: further sbatch options.
        log_folder: where each element's log goes.
    """
    log = str(log_folder.absolute() / "eval").replace("%", "%%") + "-%A-%a.log"
    options = [
        "--job-name=eval",
        f"--array=0-{elements - 1}",
        "--ntasks=1",
        f"--output={log}",
        "--requeue",
        *directives,
    ]
    command = shlex.join([str(Path(sys.executable).absolute()), "-m", "eval.run", *arguments])
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {quoted(option)}" for option in options),
            f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
            f'exec {command} --part "$SLURM_ARRAY_TASK_ID/{elements}"',
            "",
        ]
    )


def quoted(option: str) -> str:
    """sbatch splits the line at blanks, as a shell would."""
    name, equals, value = option.partition("=")
    return f'{name}{equals}"{value}"' if " " in option else option


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m eval.job_array", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=0, help="size of the array (default: one for each run)")
    parser.add_argument("--time", default="", help="time limit of an element")
    parser.add_argument("--partition", default="")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of an element (0: none)")
    parser.add_argument("--cpus", type=int, default=1, help="cores of an element (default 1)")
    parser.add_argument("--dry-run", action="store_true", help="print the job script and submit nothing")
    options = parser.parse_args(arguments[:split])
    run_arguments = arguments[split + 1 :]
    try:
        run_options = build_parser().parse_args(run_arguments)
        tasks = select_tasks(run_options.tasks)
        runs = len(tasks) if run_options.evaluate_only else len(make_plan(run_options).runs(tasks))
        elements = min(options.elements or runs, runs)
        if elements < 1:
            raise TaskError(f"--elements is too small: {options.elements}")
        directives = [f"--cpus-per-task={options.cpus}"]
        directives += [f"--gpus-per-task={options.gpus}"] if options.gpus else []
        directives += [f"--{name}={getattr(options, name)}" for name in ("time", "partition") if getattr(options, name)]
        script = array_script(run_arguments, elements, directives, run_options.output)
        if options.dry_run:
            print(script, end="")
            return 0
        path = run_options.output / NAME
        write_text(path, script)
        print(submit_script(path))
    except (TaskError, SlurmError) as error:
        print(f"eval.job_array: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
