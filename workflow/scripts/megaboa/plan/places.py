"""Account and partitions of a call's jobs, if the profile leaves them open."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from megaboa.errors import InputError
from megaboa.scheduler.answers import Choice
from megaboa.scheduler.registry import cluster

AUTO = "auto"  # value in a profile for names that are looked up
PROFILES = Path(__file__).parents[4] / "profiles"


def site_file() -> Path:
    """The site's file, with the user's choices for this clone: a line for each name. It is ignored by git.

    A workflow that uses this one as a module has its own profiles, next to its Snakefile.
    """
    own = Path("profiles", cluster().profile)
    return (own if own.is_dir() else PROFILES / own.name) / "site.yaml"


def shown() -> str:
    return os.path.relpath(site_file())


def said() -> dict[str, str]:
    """The values in the site's file."""
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
    """Values for the open names, from the site's file or else from the scheduler.

    `known`: the profile's other values.
    """
    found = {name: value for name, value in said().items() if name in names}
    left = [name for name in names if name not in found]
    if not left:
        return Choice(found, [], [])
    choice = cluster().find(left, {**known, **found})
    return replace(choice, taken=found | choice.taken)
