"""Processors that each rank is bound to, if one task starts all ranks of a node. Standard library only.

The binding is like a scheduler's: a rank's threads and memory stay on one socket, near its GPU if the driver knows its
processors. `python -m megaboa.run.cores` asks the driver, in a separate process, because a driver that hangs or crashes
must not affect the training.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path

from megaboa.run import gpus
from megaboa.run.nvml import Nvml, NvmlError

TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"
SCRIPTS = Path(__file__).parents[2]
DRIVER_SECONDS = 15.0

type Place = tuple[int, int, int]  # socket, core, processor


def of_ranks(ranks: int, given: int, environment: Mapping[str, str]) -> list[set[int]]:
    """Processors for each rank of this node.

    `given`: the number of processors that the job has here. Empty if the task may run on another number of processors,
    because some may be another job's; also for a single rank, or with fewer processors than ranks.
    """
    allowed = os.sched_getaffinity(0)
    if ranks == 1 or len(allowed) != given or len(allowed) < ranks:
        return []
    return shares(allowed, ranks, _asked(environment), place)


def shares(
    allowed: Collection[int], ranks: int, near: Sequence[set[int]], place: Callable[[int], Place]
) -> list[set[int]]:
    """Shares of neighbouring processors, as equal as possible, in whole cores if there are enough; each rank gets the
    share nearest to its GPU out of those that are left."""
    ordered = sorted(allowed, key=place)
    cores = [list(some) for _, some in groupby(ordered, key=lambda one: place(one)[:2])]
    units = cores if len(cores) >= ranks else [[one] for one in ordered]
    bounds = [len(units) * rank // ranks for rank in range(ranks + 1)]
    parts = [set().union(*units[begin:end]) for begin, end in pairwise(bounds)]
    if len(near) != ranks:
        return parts
    return [_taken(parts, some, place) for some in near]


def _taken(parts: list[set[int]], near: set[int], place: Callable[[int], Place]) -> set[int]:
    """Take the share from the list that is nearest: with common processors, or else on the same socket."""

    def nearness(part: set[int]) -> tuple[int, bool]:
        sockets = [{place(one)[0] for one in some} for some in (part, near)]
        return len(part & near), bool(sockets[0] & sockets[1])

    best = max(parts, key=nearness)
    parts.remove(best)
    return best


def place(processor: int) -> Place:
    """Sort key that puts threads of a core, and cores of a socket, next to each other."""
    try:
        socket, core = (
            int(Path(TOPOLOGY.format(processor, name)).read_text()) for name in ("physical_package_id", "core_id")
        )
        return socket, core, processor
    except (OSError, ValueError):
        return 0, processor, processor


def near_gpus(shown: str | None) -> list[set[int]]:
    """Processors near each GPU that CUDA shows, in CUDA's order. `shown`: CUDA_VISIBLE_DEVICES."""
    there = Nvml().gpus()
    if shown is None:
        return [gpu.processors for gpu in there]
    names: list[gpus.Gpu] = [{"index": str(gpu.index), "uuid": gpu.uuid} for gpu in there]
    return [there[names.index(gpu)].processors for name in shown.split(",") for gpu in gpus.visible(names, name)]


def _asked(environment: Mapping[str, str]) -> list[set[int]]:
    """The result of `near_gpus` from a separate process; empty if that fails."""
    words = [sys.executable, "-m", "megaboa.run.cores"]
    inside = {**environment, "PYTHONPATH": str(SCRIPTS)}
    try:
        done = subprocess.run(words, env=inside, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=True)
        return [set(some) for some in json.loads(done.stdout)]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


if __name__ == "__main__":
    try:
        print(json.dumps([sorted(some) for some in near_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))]))
    except NvmlError as error:
        sys.exit(str(error))
