"""Loads an experiment from files, the command line and the environment, and checks it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megaboa.config import check, keys, sweep, yaml_file
from megaboa.config.models.experiment import Experiment
from megaboa.config.problems import ConfigError, Problem
from megaboa.config.yaml_file import Places, dotted
from megaboa.fields import keys_of
from megaboa.image.references import split_mount
from megaboa.records import Tree

DEFAULT_CONFIG = Path("config/config.yaml")  # for calls that name no file
# Environment variables that scripts around Megatron-Bridge have long used, the keys that they override, and those
# scripts' defaults.
VARIABLES = {"SQSH": ("image", "path"), "MOUNT": ("image", "mounts"), "GPUS_PER_NODE": ("resources", "gpus_per_node")}
DEFAULTS = {"SQSH": "./megatron-lm+latest.sqsh", "MOUNT": ".:/workspace/megatron,/fsx:/fsx", "GPUS_PER_NODE": "8"}


@dataclass(frozen=True)
class LoadedExperiment:
    """The experiment as read: typed, and as a plain tree with the place of every value.

    In `experiment`, expressions in place of numbers are still text.
    """

    experiment: Experiment
    raw: Tree
    files: tuple[Path, ...]
    places: Places
    factors: tuple[sweep.Factor, ...]
    notes: tuple[str, ...] = ()  # values changed by the environment, and values replaced by the sweep
    device_found: bool = False  # the file doesn't set the device: runs that the one found can't have are left out
    machine_gpus: int | None = None  # the number of this machine's GPUs, if runs share them

    def problem(self, path: tuple[str | int, ...], message: str) -> Problem:
        return keys.problem_at(self.places, path, dotted(path), message)


def load(
    paths: Iterable[Path | str],
    extra: Tree | None = None,
    variables: Mapping[str, str] | None = None,
    contents: bool = True,
) -> LoadedExperiment:
    """Read the files and check everything. Later files override earlier ones; `extra` (dotted keys allowed) overrides
    all.

    `variables` is the environment; some of its variables override the files. `contents`: whether the data and folders
    that they name are looked into.

    Raises ConfigError with all problems at once.
    """
    files = tuple(Path(path) for path in paths)
    raw: Tree = {}
    places: Places = {}
    problems: list[Problem] = []
    for file in files:
        tree, found, wrong = yaml_file.read(file)
        merge(raw, tree)
        places |= found
        problems += wrong
    unreadable = any(not problem.key for problem in problems)
    if extra:
        more = nested(extra, raw)
        merge(raw, more)
        places |= _extra_places(more)
    problems += _fold_overrides(raw, places)
    notes, wrong = _lay_variables_over(raw, places, variables or {})
    problems += wrong
    if files and raw.get("experiment") is None:
        raw["experiment"] = files[0].stem
        places["experiment",] = (str(files[0]), 0)
    refused = {(problem.key, problem.line) for problem in problems}  # values that are null by now
    experiment, wrong = None, []
    try:
        experiment = Experiment.model_validate(raw)
    except ValidationError as error:
        wrong += check.translate(error, raw, places)
    factors, replaced, of_sweep = sweep.read(raw, places)
    wrong += [*of_sweep, *check.references(raw, places, factors, contents)]
    problems += [problem for problem in wrong if (problem.key, problem.line) not in refused]
    if unreadable:  # keys missing in the other files may be in the unreadable one
        problems = [problem for problem in problems if "is missing" not in problem.message]
    if problems or experiment is None:
        raise ConfigError(problems)
    return LoadedExperiment(experiment, raw, files, places, factors, (*notes, *replaced))


def command_line(given: Mapping[str, Any]) -> Tree:
    """The values of `--config` with the types that they would have in a file.

    Snakemake passes nested values as text.
    """
    return {name: _typed(value) for name, value in given.items()}


def _typed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return command_line(value)
    if isinstance(value, list | tuple):
        return [_typed(item) for item in value]
    return yaml_file.scalar(value) if isinstance(value, str) else value


def merge(base: Tree, over: Tree) -> None:
    """Merge one tree into another, in place. Mappings merge, other values replace."""
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            merge(base[name], value)
        else:
            base[name] = copy.deepcopy(value)


def nested(extra: Mapping[str, Any], raw: Mapping[str, Any]) -> Tree:
    """`{"parallel.tp": 2}` as `{"parallel": {"tp": 2}}`."""
    models = raw.get("models")
    names = {"models": list(models) if isinstance(models, dict) else []}
    tree: Tree = {}
    for name, value in extra.items():
        branch: Any = value
        for part in reversed(keys.split(name, names, value)):
            branch = {part: branch}
        merge(tree, branch)
    return tree


def _extra_places(tree: Tree, path: tuple[str, ...] = ()) -> Places:
    places: Places = {}
    for name, value in tree.items():
        places[*path, name] = ("--config", 0)
        if isinstance(value, dict):
            places |= _extra_places(value, (*path, name))
    return places


def _fold_overrides(raw: Tree, places: Places) -> list[Problem]:
    """Replace overrides that are other spellings of our keys by these keys; refuse values that are set twice."""
    overrides = raw.get("overrides")
    if not isinstance(overrides, dict):
        return []
    problems = []
    for field in list(overrides):
        path = keys.split(f"overrides.{field}", {})
        here = ("overrides", field)
        if path == here:
            if message := keys.override_problem(field) or keys.override_value_problem(overrides[field]):
                problems.append(keys.problem_at(places, here, dotted(here), message))
            continue
        if key := next((key for key in keys_of(field) if _is_there(raw, key)), None):
            message = f"sets the same field as {key}: remove one"
            problems.append(keys.problem_at(places, here, dotted(here), message))
        elif keys.is_emptied(field, overrides[field]):
            continue
        elif isinstance(section := raw.setdefault(path[0], {}), dict):
            section[path[1]] = overrides[field]
            places[path] = places.get(here, ("--config", 0))
        else:
            continue
        del overrides[field]
    return problems


def _is_there(raw: Tree, key: str) -> bool:
    section, _, name = key.partition(".")
    return isinstance(raw.get(section), dict) and name in raw[section]


def _lay_variables_over(raw: Tree, places: Places, environment: Mapping[str, str]) -> tuple[list[str], list[Problem]]:
    """Put the variables' values into the tree; returns notes for the user, and problems.

    The variables only count if ranks run in an image. Their defaults apply if the experiment says `image: {runtime:
    pyxis}` and names no image of its own.
    """
    image = raw.get("image")
    given = {name: environment[name] for name in VARIABLES if environment.get(name)}
    if not isinstance(image, dict) or image.get("runtime") not in ("pyxis", "apptainer"):
        return [f"{name} is set, and not used: image.runtime is none" for name in given], []
    as_before = image["runtime"] == "pyxis" and image.get("path") is None and image.get("build") is None
    notes, problems = [], []
    for name, path in VARIABLES.items():
        if name not in given and not (as_before and _at(raw, path) is None and not _is_swept(raw, dotted(path))):
            continue
        text = given.get(name, DEFAULTS[name])
        value, problem = _value_of(name, text)
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


def _is_swept(raw: Tree, key: str) -> bool:
    """Whether runs have their own values of a key, which a value from the environment would contradict."""

    def names(node: Any) -> bool:
        return isinstance(node, dict) and (key in node or any(map(names, node.values())))

    return names(raw.get("sweep"))


def _value_of(name: str, text: str) -> tuple[Any, str | None]:
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
    there = [mount for mount in mounts if Path(split_mount(mount)[0]).exists()]
    return there, [mount for mount in mounts if mount not in there]


def _at(raw: Tree, path: tuple[str, str]) -> Any:
    section = raw.get(path[0])
    return section.get(path[1]) if isinstance(section, dict) else None
