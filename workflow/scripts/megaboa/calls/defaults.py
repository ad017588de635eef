"""What a call leaves open: account, partitions and cores are looked up."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import Any

from megaboa.calls import say
from megaboa.plan import places
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.registry import cluster


def profile_resources(default_resources: Any) -> dict[str, str]:
    """A profile's default-resources by name.

    Account and partitions set to `auto` are looked up, and set for all rules. If the scheduler leaves a choice to the
    user, the call ends.
    """
    found = {name: _unquoted(str(getattr(value, "raw", value))) for name, value in (default_resources or {}).items()}
    if open_names := [name for name in cluster().names if found.get(name) == places.AUTO]:
        taken = places_of(open_names, {name: value for name, value in found.items() if name not in open_names})
        listed = ", ".join(f"{name} {value}" for name, value in taken.items())
        say(f"{listed}: for `{places.AUTO}` in the profile")
        # Quoted, because Snakemake evaluates values as Python expressions, here and in jobs.
        words = [f"{name}={value!r}" for name, value in taken.items()]
        default_resources.update(type(default_resources).parse(words, allow_expressions=True))
        found |= taken
    return found


def partition(profile: dict[str, str]) -> str | None:
    """The partition for training; None without a cluster."""
    return cluster().where(profile).partition


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def places_of(names: Collection[str], known: dict[str, str]) -> dict[str, str]:
    """Account and partitions that the profile leaves open. `known`: the profile's other values."""
    try:
        choice = places.choose(names, known)
    except UnreachableError as error:
        sys.exit(
            f"the profile's default-resources: {' and '.join(names)} can't be found, as {cluster().name} can't be "
            f"asked here ({error}). Call this on a login node, or put a line for each into {places.shown()}"
        )
    if choice.left:
        listed = "\n".join(f"  {line}" for line in choice.left)
        choice.missing.append(
            f"{cluster().name} leaves you a choice. Put a line for each name into {places.shown()}, or export "
            f"{', '.join(choice.variables)}; `megaboa site` shows the "
            f"cluster:\n{listed}"
        )
    if choice.missing:
        sys.exit("the profile's default-resources: " + "\n".join(choice.missing))
    return choice.taken


def use_this_machine(settings: Any, limits: Any) -> None:
    """Use all cores of this machine if a call names neither cores nor a number of jobs, so `snakemake data` needs no
    --cores. Training jobs run one at a time, because each would take the machine's first GPUs."""
    if settings.nodes is not None:
        return
    if settings.cores is None:
        settings.cores = limits["_cores"] = len(os.sched_getaffinity(0))
    if "gpu_machine" not in limits:
        limits["gpu_machine"] = 1
