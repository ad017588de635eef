"""SQSH, MOUNT and GPUS_PER_NODE: variables that scripts around Megatron-Bridge have long had, laid over the file.

They count only where ranks run in an image. Of their defaults, those that the scripts had hold where the experiment
says `image: {runtime: pyxis}` and names no image of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaboa.config.errors import Problem
from megaboa.config.yaml_file import Places, dotted
from megaboa.image import references

PATHS = {"SQSH": ("image", "path"), "MOUNT": ("image", "mounts"), "GPUS_PER_NODE": ("resources", "gpus_per_node")}
DEFAULTS = {"SQSH": "./megatron-lm+latest.sqsh", "MOUNT": ".:/workspace/megatron,/fsx:/fsx", "GPUS_PER_NODE": "8"}


def lay_over(raw: dict[str, Any], places: Places, environment: Mapping[str, str]) -> tuple[list[str], list[Problem]]:
    """Put the variables' values into the tree; what was used is returned as lines for the user, with what is wrong."""
    image = raw.get("image")
    given = {name: environment[name] for name in PATHS if environment.get(name)}
    if not isinstance(image, dict) or image.get("runtime") not in ("pyxis", "apptainer"):
        return [f"{name} is set, and not used: image.runtime is none" for name in given], []
    as_before = image["runtime"] == "pyxis" and image.get("path") is None and image.get("build") is None
    notes, problems = [], []
    for name, path in PATHS.items():
        if name not in given and not (as_before and _at(raw, path) is None and not _is_swept(raw, dotted(path))):
            continue
        text = given.get(name, DEFAULTS[name])
        value, problem = _value(name, text)
        if problem:
            problems.append(Problem(dotted(path), problem, "environment"))
            continue
        notes.append(_note(name, path, text, name in given, _at(raw, path)))
        if name == "MOUNT" and name not in given:
            value, left_out = _that_exist(value)
            notes += [f"MOUNT: {mount} is left out of the default: there is no such folder" for mount in left_out]
        if name == "SQSH":
            image.pop("build", None)
        section = raw.setdefault(path[0], {})
        if isinstance(section, dict):
            section[path[1]] = value
            places[path] = (f"{name} (environment)" if name in given else f"{name} (its default)", 0)
    return notes, problems


def _is_swept(raw: dict[str, Any], key: str) -> bool:
    """Whether runs have values of their own; beside one from the environment that is a mistake."""

    def names(node: Any) -> bool:
        return isinstance(node, dict) and (key in node or any(map(names, node.values())))

    return names(raw.get("sweep"))


def _value(name: str, text: str) -> tuple[Any, str | None]:
    if name == "GPUS_PER_NODE":
        whole = text.isascii() and text.isdigit() and int(text) > 0
        return (int(text), None) if whole else (None, f"GPUS_PER_NODE is {text!r}, and must be a whole number above 0")
    return (text.split(",") if name == "MOUNT" else text), None


def _note(name: str, path: tuple[str, str], text: str, given: bool, before: Any) -> str:
    if not given:
        return f"{name} is not set: {dotted(path)} is {text}, its default"
    instead = f", in place of {before}" if before is not None else ""
    return f"{name} is set: {dotted(path)} is {text}{instead}"


def _that_exist(mounts: list[str]) -> tuple[list[str], list[str]]:
    there = [mount for mount in mounts if Path(references.split_mount(mount)[0]).exists()]
    return there, [mount for mount in mounts if mount not in there]


def _at(raw: dict[str, Any], path: tuple[str, str]) -> Any:
    section = raw.get(path[0])
    return section.get(path[1]) if isinstance(section, dict) else None
