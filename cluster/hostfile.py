"""DeepSpeed's host file, from what Slurm really allotted to each node.

The job script runs one small task a node that prints `node index, node name, CUDA_VISIBLE_DEVICES`, and pipes the lines in
here. Asking the nodes themselves is right for unequal nodes and for shared ones, where no job-wide variable is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping


class HostFileError(ValueError):
    """An allocation that no host file can be made of."""


def devices_of(visible: str) -> list[str]:
    """The devices of a CUDA_VISIBLE_DEVICES value: indices, or the UUIDs of GPUs and MIG slices."""
    devices = [device.strip() for device in visible.split(",") if device.strip()]
    # Slurm sets NoDevFiles for a step that got none of the job's devices; -1 hides all that follow
    return [] if devices[:1] in (["NoDevFiles"], ["-1"]) else devices


def host_file(slots: Mapping[str, int]) -> str:
    """DeepSpeed's format: one `name slots=N` line a node, in rank order.

    Raises:
        HostFileError: no node, or a node without a slot.
    """
    if not slots:
        raise HostFileError("no node answered: the allocation is empty")
    for node, count in slots.items():
        if count < 1:
            raise HostFileError(
                f"node {node} was allotted no device (CUDA_VISIBLE_DEVICES is empty there): ask for --gpus-per-node, or "
                "give --ranks-per-node for ranks on CPUs"
            )
    return "".join(f"{node} slots={count}\n" for node, count in slots.items())


def slots_of(answers: Iterable[str], *, nodes: int, gpus_per_node: int = 0, ranks_per_node: int = 0) -> dict[str, int]:
    """Slots a node, in the order of the node index, from the lines `index name devices`.

    `ranks_per_node` sets the number outright (ranks on CPUs). `gpus_per_node` caps it where a whole node was given with
    more devices than asked for. With neither, every allotted device is one slot.

    Raises:
        HostFileError: a line of another form, a node that is missing or named twice, or fewer devices than asked for.
    """
    found: dict[int, tuple[str, str]] = {}
    for line in answers:
        index, _, rest = line.strip().partition(" ")
        name, _, visible = rest.partition(" ")
        if not index.isdecimal() or not name or int(index) in found:
            raise HostFileError(f"cannot read {line.strip()!r}; expected one line `index name devices` a node")
        found[int(index)] = (name, visible)
    if sorted(found) != list(range(nodes)):
        raise HostFileError(f"{len(found)} of {nodes} nodes answered: {', '.join(name for name, _ in found.values())}")
    slots: dict[str, int] = {}
    for _, (name, visible) in sorted(found.items()):
        count = len(devices_of(visible))
        if 0 < count < gpus_per_node:
            raise HostFileError(f"node {name} was allotted {count} devices ({visible}), expected {gpus_per_node}")
        slots[name] = ranks_per_node or (min(count, gpus_per_node) if gpus_per_node else count)
    return slots


def main() -> int:
    """Read the nodes' answers from standard input, print the host file."""
    parser = argparse.ArgumentParser(prog="python -m cluster.hostfile", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--ranks-per-node", type=int, default=0)
    options = parser.parse_args()
    try:
        slots = slots_of(
            sys.stdin, nodes=options.nodes, gpus_per_node=options.gpus_per_node, ranks_per_node=options.ranks_per_node
        )
        sys.stdout.write(host_file(slots))
    except HostFileError as error:
        print(f"host file: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
