"""The world of ranks: what the launchers leave in the environment, and the quiet mistakes that are refused."""

from __future__ import annotations

import pytest

from cluster.nodelist import expand_counts, expand_nodelist
from cluster.world import World, WorldError, current_world, port_of_job

DEEPSPEED = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "12345",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "12345",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
STEP_OF_TWO_LAUNCHERS = SRUN | {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
BATCH = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}


def test_no_launcher_is_one_process() -> None:
    assert current_world(environ={}) == World(rank=0, size=1, local_rank=0, local_size=1, nodes=1)
    # one task on one node is no mistake
    assert current_world(environ={"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1"}).size == 1


@pytest.mark.parametrize(
    "environ", [DEEPSPEED, TORCHRUN, DEEPSPEED | STEP_OF_TWO_LAUNCHERS], ids=["ds", "torchrun", "ds+slurm"]
)
def test_launchers_agree(environ: dict[str, str]) -> None:
    assert current_world(environ=environ, expected_size=4) == World(
        rank=3, size=4, local_rank=1, local_size=2, node_rank=1, nodes=2, master_addr="node1", master_port=12345
    )


def test_plain_srun_with_unequal_nodes() -> None:
    world = current_world(environ=SRUN)
    assert world == World(
        rank=5,
        size=6,
        local_rank=1,
        local_size=2,
        node_rank=1,
        nodes=2,
        master_addr="n1",
        master_port=port_of_job(77),
    )
    assert world.environ()["MASTER_ADDR"] == "n1" and world.environ()["WORLD_SIZE"] == "6"
    assert current_world(environ=SRUN | {"MASTER_ADDR": "ib1", "MASTER_PORT": "999"}).master_addr == "ib1"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "RANK=0 is set, but not WORLD_SIZE, LOCAL_RANK"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE=8 is set, but not RANK, LOCAL_RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "MASTER_ADDR and MASTER_PORT"),
        (DEEPSPEED | {"RANK": "4"}, "RANK is 4, expected a number from 0 to 3"),
        (DEEPSPEED | {"RANK": "-1"}, "RANK='-1' is not a number"),
        (DEEPSPEED | {"LOCAL_RANK": "2"}, "LOCAL_RANK is 2"),
        (DEEPSPEED | {"LOCAL_SIZE": "5"}, "do not fit a world of 4"),
        (DEEPSPEED | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4,1"}, "contradict each other"),
        (SRUN | {"SLURM_STEP_NODELIST": "n[1-"}, "not a Slurm node list"),
        ({key: value for key, value in SRUN.items() if key != "SLURM_PROCID"}, "SLURM_PROCID is not set"),
    ],
)
def test_partial_and_inconsistent_variables_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError) as caught:
        current_world(environ=environ)
    assert message in str(caught.value)


LOCAL_ONLY = DEEPSPEED | {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_SIZE": "1",
    "CROSS_RANK": "0",
    "CROSS_SIZE": "1",
}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        # `python train.py` in the batch script
        (BATCH, "one process, no launcher, inside Slurm job 77 of 2 node(s) and 2 task(s)"),
        ({"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "4"}, "of 1 node(s) and 4 task(s)"),
        # `deepspeed train.py` in the batch script without a host file: exit code 0 and half the machine unused
        (LOCAL_ONLY | BATCH, "started 1 process(es) on 1 node(s), but the Slurm job 77 holds 2 nodes"),
        (LOCAL_ONLY | BATCH | {"WORLD_SIZE": "8", "LOCAL_SIZE": "8"}, "started 8 process(es) on 1 node(s)"),
        # the same under `srun --ntasks-per-node=1`: two worlds of one each
        (LOCAL_ONLY | STEP_OF_TWO_LAUNCHERS, "but the Slurm step 77 holds 2 nodes"),
        # `srun -n 4 deepspeed` on one node: four worlds on the same devices
        (
            DEEPSPEED
            | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "CROSS_SIZE": "1", "CROSS_RANK": "0"}
            | {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1"},
            "runs 4 tasks on 1 node(s), but the launcher in this one made a world of 2",
        ),
        # `srun -n 1` in an allocation of two nodes
        (
            SRUN
            | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "1"}
            | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"},
            "one task in an allocation of 2 nodes",
        ),
    ],
)
def test_a_launcher_that_uses_part_of_the_allocation_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError) as caught:
        current_world(environ=environ)
    assert message in str(caught.value)


def test_expected_size() -> None:
    with pytest.raises(WorldError, match="expected a world of 8 ranks, the launcher started 4"):
        current_world(environ=DEEPSPEED, expected_size=8)
    with pytest.raises(WorldError, match="expected a world of 2 ranks"):
        current_world(environ={}, expected_size=2)


def test_nodelist() -> None:
    assert expand_nodelist("n[1-2]") == ["n1", "n2"]
    assert expand_nodelist("a,n[1-2,07-09],b3") == ["a", "n1", "n2", "n07", "n08", "n09", "b3"]
    assert expand_nodelist("r[1-2]n[3-4]x") == ["r1n3x", "r1n4x", "r2n3x", "r2n4x"]
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    for wrong in ("", "n[1-", "n1,,n2", "n[2-1]", "n[1-]"):
        with pytest.raises(ValueError, match="not a Slurm node list"):
            expand_nodelist(wrong)
    with pytest.raises(ValueError, match="not a list of Slurm counts"):
        expand_counts("2(x)")


def test_ports_stay_below_the_ephemeral_range() -> None:
    ports = {port_of_job(job, step) for job in (1, 19_999, 20_000, 4_000_000) for step in (0, 1, 2)}
    assert len(ports) > 8 and min(ports) >= 10_000 and max(ports) < 30_000
