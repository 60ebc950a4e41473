"""One rank of a job for the cluster tests: a real world of ranks that behaves as its first argument says.

`add`: sum over all ranks and end. `gloo`: the same through torch. `stop N`: work in steps until told to stop, save, leave with 75;
start N ends after three steps. `hang`: rank 1 raises at step 5 while the others hang and do not react to SIGTERM.
Every rank appends one JSON line to `<folder>/log.jsonl` for each fact.
"""

import json
import os
import signal
import sys
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from cluster.world import World, current_world


class Star:
    """Sums over all ranks through rank 0, over TCP; a lost peer raises EOFError. Starts 50 times faster than torch."""

    def __init__(self, world: World) -> None:
        address = (world.master_addr, world.master_port)
        self.peers: list[Connection] = []
        if world.rank == 0:
            with Listener(address, backlog=world.size, authkey=b"test") as listener:
                self.peers = [listener.accept() for _ in range(world.size - 1)]
            return
        until = time.monotonic() + 60
        while True:
            try:
                self.centre = Client(address, authkey=b"test")
                return
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def sum(self, value: float) -> float:
        if world.rank == 0:
            total = value + sum(peer.recv() for peer in self.peers)
            for peer in self.peers:
                peer.send(total)
            return total
        self.centre.send(value)
        return self.centre.recv()


class Gloo:
    """The same by torch."""

    def __init__(self, world: World) -> None:
        import torch

        self.torch = torch
        os.environ.update(world.environ())
        torch.distributed.init_process_group("gloo")

    def sum(self, value: float) -> float:
        tensor = self.torch.tensor([value])
        self.torch.distributed.all_reduce(tensor)
        return tensor.item()


def note(**facts: object) -> None:
    line = {
        "rank": world.rank,
        "restart": restart,
        "node": os.environ["SLURMD_NODENAME"],
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        **facts,
    }
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


mode, folder = sys.argv[1], Path(sys.argv[2])
restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
last_restart = int(sys.argv[3]) if mode == "stop" else 0
wanted: list[int] = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: wanted.append(1))
world = current_world()
ranks = Gloo(world) if mode == "gloo" else Star(world)
step_file = folder / "step"
first = int(step_file.read_text()) if step_file.exists() else 0
note(size=world.size, local_rank=world.local_rank, ranks_sum=ranks.sum(world.rank), first=first)
if mode in ("add", "gloo"):
    sys.exit(0)
for step in range(first, 100_000):
    if mode == "hang" and step == 5:
        note(failing=True)
        ranks.sum(0)
        if world.rank == 1:
            raise RuntimeError("a rank fails")
        while True:
            time.sleep(1)
    if ranks.sum(float(bool(wanted))):
        if world.rank == 0:
            step_file.write_text(str(step))
        ranks.sum(0)
        note(stopped_at=step)
        # ranks do not leave at the same moment
        time.sleep(0.7 * world.rank)
        sys.exit(75)
    if mode == "stop" and restart == last_restart and step == first + 3:
        break
    time.sleep(0.05)
note(done=True)
