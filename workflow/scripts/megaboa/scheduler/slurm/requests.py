"""Requests of a job: the resources of Snakemake's executor plugin for SLURM, and further options of sbatch."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from megaboa.errors import InputError
from megaboa.paths import RunFolder
from megaboa.scheduler.answers import Size, Where
from megaboa.scheduler.slurm import queue
from megaboa.scheduler.slurm.partitions import GPU_OPTIONS

NO_PROFILE: Mapping[str, str] = {}
# Options that the executor sets itself and refuses among further ones, with the keys to use instead.
_SET = {
    "resources.constraint": ("-C", "--constraint"),
    "resources.qos": ("-q", "--qos"),
    "resources.partition": ("-p", "--partition"),
    "resources.account": ("-A", "--account"),
    "resources.runtime": ("-t", "--time"),
    "resources.nodes": ("-N", "--nodes"),
    "resources.gpus_per_node": ("-n", "--ntasks", "--ntasks-per-gpu", "--gpus"),
    "resources.cpus_per_rank": ("-c", "--cpus-per-task", "--cpus-per-gpu"),
    "resources.mem_mb_per_rank": ("--mem", "--mem-per-cpu"),
    "gpu_option of the profile": ("--gres",),
}
_FIXED = frozenset(
    {"-J", "--job-name", "-o", "--output", "-e", "--error", "-D", "--workdir", "--parsable", "--export", "--comment"}
    | {"-M", "--clusters"}
)
_CLUSTERS = ("cluster", "clusters", "slurm_cluster")  # names that the executor knows for it
_KEYS = {option: key for key, options in _SET.items() for option in options}
_TASKS = re.compile(r"--(?:ntasks-per-node|gpus-per-node|tasks-per-node)[= ](?:\w+:)*(\d+)")


def resources(
    size: Callable[[Any], Size] | None = None,
    where: Callable[[Any], Where] | None = None,
    options: Callable[[Any], str] | None = None,
    gpus: Callable[[Any], int] | None = None,
    profile: Mapping[str, str] = NO_PROFILE,
) -> dict[str, Any]:
    """Resources of a job. With `mpi`, the plugin leaves srun to the job, which starts the ranks itself.

    The plugin then wants at least two tasks per node. Tasks only size the allocation: one for each rank, or two for a
    single rank. Without `mpi` the job would be a step itself, in which no ranks can be started.
    """
    option = _checked(profile.get("gpu_option", GPU_OPTIONS[0]))
    one_task_per_gpu = gpus is not None and option == "gpus-per-task"

    def cores_per_task(wildcards: Any) -> int:
        asked = size(wildcards)
        return -(-asked.cores // (asked.ranks if one_task_per_gpu else _tasks(asked)))

    def all_options(wildcards: Any) -> str:
        own = options(wildcards) if options else ""
        return " ".join(filter(None, [_gpus(gpus(wildcards), option) if gpus else "", own]))

    found: dict[str, Any] = {}
    if size:
        found |= {
            "mpi": "srun",
            "nodes": lambda wildcards: size(wildcards).nodes,
            "tasks_per_node": lambda wildcards: _tasks(size(wildcards)),
            "cpus_per_task": cores_per_task,
        }
    if where:
        found |= {
            "slurm_partition": lambda wildcards: where(wildcards).partition,
            "slurm_account": lambda wildcards: where(wildcards).account,
            "constraint": lambda wildcards: where(wildcards).constraint,
            "qos": lambda wildcards: where(wildcards).qos,
        }
    if gpus and option == "gres":  # the plugin refuses it among further options
        found["gres"] = lambda wildcards: f"gpu:{gpus(wildcards)}"
    return found | ({"slurm_extra": all_options} if options or gpus else {})


def options(
    own: str = "", returns: bool = False, after: RunFolder | None = None, rule: str = "", outlives: bool = False
) -> str:
    """Further options for a job, `own` ones of the user last. Snakemake's plugin puts them into a shell's command as
    they are, so their words are quoted: no part of them is executed where jobs are submitted."""
    found = queue.dependency(rule, after) if after else []
    found += ["--open-mode=append"] if returns else []  # a requeued job appends to the same log
    found += ["--no-kill"] if outlives else []
    return shlex.join([*found, *shlex.split(own)])


def _gpus(number: int, option: str) -> str:
    """Options for GPUs; not the plugin's own `gpu` resource, which would also set tasks per GPU."""
    if option == "gpus-per-task":
        return "--gpus-per-task=1" + (" --ntasks-per-node=1" if number == 1 else "")
    return {"gres": "", "exclusive": "--exclusive"}.get(option, f"--{option}={number}")


def _checked(option: str) -> str:
    if option not in GPU_OPTIONS:
        raise InputError(f"the profile's default-resources: gpu_option is {option!r}: take {', '.join(GPU_OPTIONS)}")
    return option


def tasks_per_node(options: str) -> int | None:
    asked = _TASKS.search(options)
    return int(asked[1]) if asked else None


def options_problem(options: str) -> str | None:
    try:
        words = shlex.split(options)
    except ValueError as error:
        return f"can't be read: {error}"
    for word in words:
        option = word.partition("=")[0] if word.startswith("--") else word[:2]
        if option in _KEYS:
            return f"{option} is set by the workflow: remove it, and set {_KEYS[option]}"
        if option in _FIXED:
            return f"{option} is set by the workflow: remove it"
    return None


def settings_problem(settings: Any, jobs: Iterable[tuple[str, Collection[str]]]) -> str | None:
    """Job arrays of jobs that start ranks: with `mpi` the plugin doesn't look up which job a task of an array is.

    A rule's only job is submitted without an array.
    """
    asked = getattr(settings, "array_jobs", None)
    chosen = {name.strip() for name in (asked or "").replace(";", ",").split(",")} - {""}
    counts = Counter(name for name, resources in jobs if "mpi" in resources and chosen & {name, "all"})
    ours = [name for name, count in counts.items() if count > 1]
    if not ours:
        return None
    rest = "name the other rules instead of `all`" if "all" in chosen else "leave them out"
    return (
        f"slurm-array-jobs is {asked!r}, and jobs of {', '.join(sorted(ours))} start ranks: in a job array of "
        f"Snakemake's plugin each of them would be for the first run, so {rest}"
    )


def where(profile: Mapping[str, str]) -> Where:
    names = ("gpu_partition", "slurm_account", "constraint", "qos")
    another = next(filter(None, map(profile.get, _CLUSTERS)), None)
    return Where(*(profile.get(name) for name in names), cluster=another)


def _tasks(size: Size) -> int:
    return max(2, size.ranks)
