"""Which processors each rank is bound to where one task starts all ranks of a node. Standard library only.

As a scheduler binds tasks: a rank's threads and their memory stay on one socket, next to its GPU where the driver says
which processors those are.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from megaboa.run import gpu_sampler
from megaboa.run.nvml import Nvml, NvmlError

TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"

type Place = tuple[int, ...]


def of_ranks(ranks: int, given: int, environment: Mapping[str, str]) -> list[set[int]]:
    """For each rank of this node; none where the task may run on others than the `given` number of processors that the
    job has here: then those may be another job's."""
    allowed = os.sched_getaffinity(0)
    if ranks == 1 or len(allowed) != given or len(allowed) < ranks:
        return []
    return shares(allowed, ranks, near_gpus(ranks, environment.get("CUDA_VISIBLE_DEVICES")), place)


def shares(
    allowed: Collection[int], ranks: int, near: Sequence[set[int]], place: Callable[[int], Place]
) -> list[set[int]]:
    """Of equal size, of neighbours, and each near the rank's GPU where there are enough for all that are near it."""
    members: dict[frozenset[int], list[int]] = defaultdict(list)
    for rank, some in enumerate(near):
        members[frozenset(some & set(allowed))].append(rank)
    enough = all(len(some) >= len(those) for some, those in members.items())
    apart = sum(map(len, members)) == len(frozenset[int]().union(*members))
    if len(near) != ranks or not enough or not apart:
        members = {frozenset(allowed): list(range(ranks))}
    found: list[set[int]] = [set() for _ in range(ranks)]
    for some, those in members.items():
        ordered = sorted(some, key=place)
        for number, rank in enumerate(those):
            begin, end = (len(ordered) * part // len(those) for part in (number, number + 1))
            found[rank] = set(ordered[begin:end])
    return found


def place(processor: int) -> Place:
    """Threads of a core are neighbours, and cores of a socket."""
    try:
        names = ("physical_package_id", "core_id")
        return (*(int(Path(TOPOLOGY.format(processor, name)).read_text()) for name in names), processor)
    except (OSError, ValueError):
        return (0, processor, processor)


def near_gpus(ranks: int, shown: str | None) -> list[set[int]]:
    """Processors near the GPU of each rank; empty where the driver can't be asked."""
    try:
        found = [gpu.processors for gpu in gpu_sampler.ours(Nvml().gpus(), ranks, shown)]
    except NvmlError:
        return []
    return [some for some in found if some]
