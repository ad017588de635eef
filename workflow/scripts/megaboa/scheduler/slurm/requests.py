"""What a job asks for: the resources of Snakemake's executor plugin for SLURM, and further options of sbatch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from megaboa.paths import RunFolder
from megaboa.scheduler.answers import Size, Where
from megaboa.scheduler.slurm import queue

_TASKS = re.compile(r"--(?:ntasks-per-node|gpus-per-node|tasks-per-node)[= ](?:\w+:)*(\d+)")


def resources(
    size: Callable[[Any], Size] | None = None,
    where: Callable[[Any], Where] | None = None,
    options: str | Callable[[Any], str] | None = None,
) -> dict[str, Any]:
    """With `mpi` the plugin leaves srun to the job, which starts the ranks itself; then it wants at least two tasks
    per node. Tasks only size the allocation: they are as many as ranks, or two for one rank. Without `mpi` the job
    would be a step itself, in which no ranks can be started.
    """
    found: dict[str, Any] = {}
    if size:
        found |= {
            "mpi": "srun",
            "nodes": lambda wildcards: size(wildcards).nodes,
            "tasks_per_node": lambda wildcards: _tasks(size(wildcards)),
            "cpus_per_task": lambda wildcards: -(-size(wildcards).cores // _tasks(size(wildcards))),
        }
    if where:
        found |= {
            "slurm_partition": lambda wildcards: where(wildcards).partition,
            "slurm_account": lambda wildcards: where(wildcards).account,
        }
    return found | ({} if options is None else {"slurm_extra": options})


def options(own: str = "", gpus: int = 0, returns: bool = False, after: RunFolder | None = None, rule: str = "") -> str:
    # The plugin's own `gpu` resource would also set tasks per GPU.
    found = [f"--gpus-per-node={gpus}"] if gpus else []
    found += queue.dependency(rule, after) if after else []
    found += ["--open-mode=append"] if returns else []  # it writes to the same log again
    return " ".join([*found, own]).strip()


def tasks_per_node(options: str) -> int | None:
    asked = _TASKS.search(options)
    return int(asked[1]) if asked else None


def where(profile: Mapping[str, str]) -> Where:
    return Where(profile.get("gpu_partition"), profile.get("slurm_account"))


def _tasks(size: Size) -> int:
    return max(2, size.ranks)
