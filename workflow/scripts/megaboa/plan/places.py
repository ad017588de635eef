"""Account and partitions of a call's jobs, where the profile leaves them open."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from megaboa.errors import InputError
from megaboa.scheduler.answers import Choice
from megaboa.scheduler.registry import cluster

AUTO = "auto"  # what a profile says of a name that is to be found
PROFILES = Path(__file__).parents[4] / "profiles"


def site_file() -> Path:
    """What the user has said once for this clone: a line for each name. Git ignores it.

    A workflow that has this one as a module has profiles of its own, next to its Snakefile.
    """
    own = Path("profiles", cluster().profile)
    return (own if own.is_dir() else PROFILES / own.name) / "site.yaml"


def shown() -> str:
    return os.path.relpath(site_file())


def said() -> dict[str, str]:
    """By the site's file."""
    if not site_file().exists():
        return {}
    try:
        found = yaml.safe_load(site_file().read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, OSError) as error:
        raise InputError(f"{shown()} can't be read: {error}") from None
    if not isinstance(found, dict) or not set(found) <= set(cluster().names):
        raise InputError(f"{shown()} takes a line for each of {', '.join(cluster().names)}, and nothing else")
    for name, value in found.items():
        if value is not None and not isinstance(value, str):
            raise InputError(f'{shown()}: {name}: {value!r} is not a name: put it in quotes (`{name}: "..."`)')
    return {name: value for name, value in found.items() if value not in (None, "", AUTO)}


def choose(names: Collection[str], known: Mapping[str, str]) -> Choice:
    """For the names that are open: the site's file, then the scheduler. `known`: what the profile says."""
    found = {name: value for name, value in said().items() if name in names}
    left = [name for name in names if name not in found]
    if not left:
        return Choice(found, [], [])
    choice = cluster().find(left, {**known, **found})
    return replace(choice, taken=found | choice.taken)
