"""Slurm's compressed lists: `n[1-2,07]` as host names, `2(x3),1` as numbers."""

from __future__ import annotations

import re

_PART = re.compile(r"([^\[\]]*)(?:\[([0-9,\-]+)\])?")


def expand_nodelist(text: str) -> list[str]:
    """Host names of a Slurm node list, in its order, as `scontrol show hostnames` prints them.

    `n[1-2,07]` -> n1 n2 n07; several bracket groups in one name multiply: `r[1-2]n[1-2]` -> r1n1 r1n2 r2n1 r2n2. Done
    here and not by `scontrol`, because every rank of a plain `srun` needs it at start.

    Raises:
        ValueError: the list is empty or its brackets do not fit.
    """
    names: list[str] = []
    for item in _split_outside_brackets(text):
        if "".join("".join(match.group(0)) for match in _PART.finditer(item)) != item or not item:
            raise ValueError(f"not a Slurm node list: {text!r}; expected names like n[1-2,07],login")
        prefixes = [""]
        for match in _PART.finditer(item):
            stem, ranges = match.groups()
            suffixes = [stem] if ranges is None else [stem + number for number in _expand_ranges(ranges, text)]
            prefixes = [prefix + suffix for prefix in prefixes for suffix in suffixes]
        names += prefixes
    return names


def expand_counts(text: str) -> list[int]:
    """Slurm's per-node counts: `2(x3),1` -> 2 2 2 1.

    Raises:
        ValueError: the text is not such a list.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise ValueError(f"not a list of Slurm counts: {text!r}; expected something like 2(x3),1")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def _split_outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", text)


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        first, dash, last = item.partition("-")
        if not first or (dash and not last) or (dash and int(last) < int(first)):
            raise ValueError(f"not a Slurm node list: {text!r}; the range {item!r} is wrong")
        # zero padding is part of the name: [08-10] is 08 09 10
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return numbers
