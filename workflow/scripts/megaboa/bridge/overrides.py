"""Writes an experiment's overrides in Hydra's grammar, which Bridge parses. Standard library only."""

from __future__ import annotations

from typing import Any

from megaboa.errors import InputError
from megaboa.records import Tree


def hydra_overrides(overrides: Tree) -> list[str]:
    """Overrides for Bridge. Without Hydra's `+` a field that Bridge doesn't know is an error, not a new field."""
    return [f"{field}={hydra_value(value)}" for field, value in overrides.items()]


def hydra_value(value: Any) -> str:
    """A value quoted so that Hydra restores its type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list):
        return "[" + ",".join(hydra_value(item) for item in value) + "]"
    return "{" + ",".join(f"{_name(name)}:{hydra_value(item)}" for name, item in value.items()) + "}"


def _name(name: Any) -> str:
    """A mapping's name, which Hydra's grammar has no quotes for."""
    if set(str(name)) & set("\\{}[]():,='\"$ "):
        raise InputError(f"overrides: the name {name!r} of a mapping: take letters, digits, '-', '_', '.' and '/'")
    return str(name)


def _quoted(text: str) -> str:
    """A string in quotes. Hydra unescapes backslashes only before a quote or at the end, so only these are doubled."""
    out, slashes = [], 0
    for character in text:
        if character == "'":
            out.append("\\" * (slashes + 1))
        slashes = slashes + 1 if character == "\\" else 0
        out.append(character)
    return "'" + "".join(out) + "\\" * slashes + "'"
