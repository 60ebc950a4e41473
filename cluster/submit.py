"""`python -m cluster.submit pretrain --config F --nodes N`: render the job script, keep it in the run folder, queue it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.job import JobError, Resources, render
from cluster.slurm import SlurmError
from cluster.submission import pretrain_job, submit


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster.submit", description=__doc__)
    commands = parser.add_subparsers(dest="kind", required=True)
    pretrain = commands.add_parser("pretrain", help="pretraining, one DeepSpeed launcher a node")
    pretrain.add_argument("--config", required=True, type=Path, help="TOML file, see configs/")
    pretrain.add_argument("--set", dest="overrides", action="append", default=[], metavar="TABLE.KEY=VALUE")
    pretrain.add_argument("--nodes", required=True, type=int)
    pretrain.add_argument(
        "--gpus-per-node", type=int, default=0, help="devices and ranks a node; without: all that Slurm allots"
    )
    pretrain.add_argument("--ranks-per-node", type=int, default=0, help="ranks a node without devices (CPU)")
    pretrain.add_argument(
        "--cpus-per-node", type=int, default=0, help="cores a node on shared nodes; without: whole nodes (--exclusive)"
    )
    pretrain.add_argument("--partition", default="")
    pretrain.add_argument("--account", default="")
    pretrain.add_argument("--time", default="", help="time limit; the ranks save before it and the job is queued again")
    pretrain.add_argument("--warn-seconds", type=int, default=180, help="seconds before the limit (default: 180)")
    pretrain.add_argument("--job-name", default="")
    pretrain.add_argument(
        "--extra-sbatch", action="append", default=[], metavar="=--OPTION=VALUE", help="any sbatch option; repeatable"
    )
    pretrain.add_argument("--dry-run", action="store_true", help="print the job script and submit nothing")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0, or 2 with one message."""
    options = _parser().parse_args(arguments)
    try:
        job = pretrain_job(
            options.config,
            Resources(
                nodes=options.nodes,
                gpus_per_node=options.gpus_per_node,
                ranks_per_node=options.ranks_per_node,
                cpus_per_node=options.cpus_per_node,
                partition=options.partition,
                account=options.account,
                time_limit=options.time,
                warn_seconds=options.warn_seconds,
                extra=tuple(options.extra_sbatch),
            ),
            overrides=options.overrides,
            name=options.job_name,
        )
        if options.dry_run:
            print(render(job), end="")
            return 0
        job_id = submit(job)
    except (JobError, SlurmError) as error:
        print(f"submit: {error}", file=sys.stderr)
        return 2
    print(job_id)
    print(f"log: {job.cluster_folder / f'{job.name}-{job_id}.log'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
