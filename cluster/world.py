"""The world of ranks, read from the environment in one place.

Three ways to start ranks are understood: a launcher that sets RANK, WORLD_SIZE and LOCAL_RANK (`deepspeed`, `torchrun`), plain
`srun`, one task a rank, and no launcher at all: one process. What is refused is the quiet mistake: a launcher that started
fewer processes than the allocation holds, which would train a smaller world than asked for and report success.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.nodelist import expand_counts, expand_nodelist

FIRST_PORT = 10_000
PORTS = 20_000
"""Ports [10000, 30000): below Linux's ephemeral range (32768 and up), so no outgoing connection holds one by chance."""


class WorldError(RuntimeError):
    """The variables that a launcher left do not describe one consistent world of ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Where this process stands among all ranks."""

    rank: int = 0
    size: int = 1
    """Ranks in all, `rank` in [0, size)."""
    local_rank: int = 0
    """Position on this node, in [0, local_size): the index of this rank's device."""
    local_size: int = 1
    node_rank: int = 0
    nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """Port of rank 0's rendezvous; 0 where one process is the whole world and any free port will do."""

    def __post_init__(self) -> None:
        """Refuse what cannot be a world.

        Raises:
            WorldError: a rank outside its size, or sizes that do not fit each other.
        """
        for name, value, size in (
            ("RANK", self.rank, self.size),
            ("LOCAL_RANK", self.local_rank, self.local_size),
            ("the node's rank", self.node_rank, self.nodes),
        ):
            if not 0 <= value < size:
                raise WorldError(f"{name} is {value}, expected a number from 0 to {size - 1}")
        if self.local_size > self.size or self.nodes > self.size:
            raise WorldError(
                f"{self.local_size} ranks on this node and {self.nodes} nodes do not fit a world of {self.size} ranks"
            )
        if self.size > 1 and not 0 < self.master_port < 65536:
            raise WorldError(f"MASTER_PORT is {self.master_port}, expected a port from 1 to 65535")

    def environ(self) -> dict[str, str]:
        """The variables that `torch.distributed` reads, for processes that no launcher gave them to."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_SIZE": str(self.local_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def current_world(*, expected_size: int | None = None, environ: Mapping[str, str] | None = None) -> World:
    """This process's place, from `environ` (default: `os.environ`).

    Raises:
        WorldError: some of a launcher's variables are missing or contradict each other; one process was started inside
            an allocation of several nodes or tasks; the size is not `expected_size`.
    """
    env = os.environ if environ is None else environ
    if any(env.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        world = _from_launcher(env)
    elif env.get("SLURM_STEP_ID", "").isdigit():
        world = _from_srun(env)
    else:
        _refuse_lone_process(env)
        world = World()
    if expected_size is not None and world.size != expected_size:
        raise WorldError(
            f"expected a world of {expected_size} ranks, the launcher started {world.size}; "
            "check the number of nodes and of devices or ranks a node"
        )
    return world


def port_of_job(job_id: int, step_id: int = 0) -> int:
    """A port that two jobs on one node rarely share and that all nodes of a job agree on without talking."""
    return FIRST_PORT + (job_id + 997 * step_id) % PORTS


def _from_launcher(env: Mapping[str, str]) -> World:
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    missing = [name for name in needed if not env.get(name)]
    if missing:
        present = ", ".join(f"{name}={env[name]}" for name in needed if env.get(name))
        raise WorldError(
            f"{present} is set, but not {', '.join(missing)}: start all ranks with `deepspeed`, `torchrun` or "
            "`srun`, or unset what an earlier command left"
        )
    size = _number(env, "WORLD_SIZE")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing and size > 1:
        raise WorldError(f"a world of {size} ranks needs {' and '.join(missing)}, which the launcher did not set")
    # deepspeed sets LOCAL_SIZE, torchrun LOCAL_WORLD_SIZE; with neither, an own wrapper: one task a rank
    local_size = _number(env, "LOCAL_SIZE", "LOCAL_WORLD_SIZE", default=_slurm_tasks_here(env) or size)
    world = World(
        rank=_number(env, "RANK"),
        size=size,
        local_rank=_number(env, "LOCAL_RANK"),
        local_size=local_size,
        node_rank=_number(env, "CROSS_RANK", "GROUP_RANK", default=_number(env, "SLURM_NODEID", default=0)),
        nodes=_number(env, "CROSS_SIZE", "GROUP_WORLD_SIZE", default=-(-size // local_size)),
        master_addr=env.get("MASTER_ADDR") or "127.0.0.1",
        master_port=_number(env, "MASTER_PORT", default=0),
    )
    _compare_with_allocation(world, env)
    return world


def _compare_with_allocation(world: World, env: Mapping[str, str]) -> None:
    """Refuse a launcher that did not use the whole Slurm step (or, started outside a step, the whole job)."""
    if not env.get("SLURM_JOB_ID"):
        return
    in_step = env.get("SLURM_STEP_ID", "").isdigit()
    where = "step" if in_step else "job"
    nodes = _number(env, "SLURM_STEP_NUM_NODES" if in_step else "SLURM_JOB_NUM_NODES", "SLURM_NNODES", default=1)
    if world.size < nodes or world.nodes < nodes:
        raise WorldError(
            f"the launcher started {world.size} process(es) on {world.nodes} node(s), but the Slurm {where} "
            f"{env['SLURM_JOB_ID']} holds {nodes} nodes: start one launcher a node under `srun` (as `python -m "
            "cluster.submit` does), with a host file that names every node"
        )
    tasks = _number(env, "SLURM_STEP_NUM_TASKS", default=1) if in_step else 1
    if in_step and tasks not in (nodes, world.size):
        raise WorldError(
            f"the Slurm step runs {tasks} tasks on {nodes} node(s), but the launcher in this one made a world of "
            f"{world.size}: expected one launcher a node (--ntasks-per-node=1) or one task a rank"
        )


def _from_srun(env: Mapping[str, str]) -> World:
    needed = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NODELIST")
    missing = [name for name in (*needed, "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID") if not env.get(name)]
    if missing:
        raise WorldError(f"inside Slurm step {env['SLURM_STEP_ID']}, but {', '.join(missing)} is not set")
    size, node_rank = _number(env, "SLURM_STEP_NUM_TASKS"), _number(env, "SLURM_NODEID")
    allotted = _number(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES", default=1)
    if size == 1 and allotted > 1:
        raise WorldError(
            f"`srun` started one task in an allocation of {allotted} nodes: give it --nodes and --ntasks-per-node"
        )
    try:
        hosts = expand_nodelist(env["SLURM_STEP_NODELIST"])
        tasks = expand_counts(env["SLURM_STEP_TASKS_PER_NODE"])
    except ValueError as error:
        raise WorldError(f"inside Slurm step {env['SLURM_STEP_ID']}: {error}") from error
    if len(tasks) != len(hosts) or sum(tasks) != size or node_rank >= len(tasks):
        raise WorldError(
            f"Slurm's step variables contradict each other: {size} tasks, nodes {env['SLURM_STEP_NODELIST']}, tasks a "
            f"node {env['SLURM_STEP_TASKS_PER_NODE']}, this node {node_rank}"
        )
    port = port_of_job(_number(env, "SLURM_JOB_ID"), _number(env, "SLURM_STEP_ID"))
    return World(
        rank=_number(env, "SLURM_PROCID"),
        size=size,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_size=tasks[node_rank],
        node_rank=node_rank,
        nodes=len(hosts),
        master_addr=env.get("MASTER_ADDR") or hosts[0],
        master_port=_number(env, "MASTER_PORT", default=port),
    )


def _refuse_lone_process(env: Mapping[str, str]) -> None:
    """One process is right outside Slurm and in an allocation of one task, and a mistake in a larger one."""
    if not env.get("SLURM_JOB_ID"):
        return
    nodes = _number(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES", default=1)
    tasks = _number(env, "SLURM_NTASKS", default=1)
    if nodes > 1 or tasks > 1:
        raise WorldError(
            f"one process, no launcher, inside Slurm job {env['SLURM_JOB_ID']} of {nodes} node(s) and {tasks} task(s): "
            "start it with `srun`, or submit with `python -m cluster.submit`"
        )


def _slurm_tasks_here(env: Mapping[str, str]) -> int:
    try:
        return expand_counts(env["SLURM_STEP_TASKS_PER_NODE"])[int(env["SLURM_NODEID"])]
    except (KeyError, ValueError, IndexError):
        return 0


def _number(env: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """The first of these variables that is set, as a number."""
    for name in names:
        text = env.get(name)
        if text:
            if not text.isdecimal():
                raise WorldError(f"{name}={text!r} is not a number")
            return int(text)
    if default is None:
        raise WorldError(f"{' or '.join(names)} is not set")
    return default
