"""From files to a checked experiment."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megaboa.config import check, environment, keys, sweep, yaml_file
from megaboa.config.errors import ConfigError, Problem
from megaboa.config.models.experiment import Experiment
from megaboa.config.yaml_file import Places, dotted


@dataclass(frozen=True)
class LoadedExperiment:
    """The experiment as it was read: typed, and as a plain tree with the place of every value.

    In `experiment`, a number for which the file has an expression is still that text.
    """

    experiment: Experiment
    raw: dict[str, Any]
    files: tuple[Path, ...]
    places: Places
    factors: tuple[sweep.Factor, ...]
    notes: tuple[str, ...] = ()  # what the environment has changed, and what the sweep replaces

    def problem(self, path: tuple[str | int, ...], message: str) -> Problem:
        return keys.problem_at(self.places, path, dotted(path), message)


def load(
    paths: Iterable[Path | str], extra: dict[str, Any] | None = None, variables: Mapping[str, str] | None = None
) -> LoadedExperiment:
    """Read the files, later ones over earlier ones and `extra` (dotted keys allowed) over all, and check everything.

    `variables` is the environment, of which some go before the files.

    Raises ConfigError with all problems at once.
    """
    files = tuple(Path(path) for path in paths)
    raw: dict[str, Any] = {}
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
    notes, wrong = environment.lay_over(raw, places, variables or {})
    problems += wrong
    if files and raw.get("experiment") is None:
        raw["experiment"] = files[0].stem
        places["experiment",] = (str(files[0]), 0)
    experiment = None
    try:
        experiment = Experiment.model_validate(raw)
    except ValidationError as error:
        seen = {(problem.key, problem.line) for problem in problems}  # a value refused by the reader is null by now
        translated = check.translate(error, raw, places)
        problems += [problem for problem in translated if (problem.key, problem.line) not in seen]
    factors, replaced, wrong = sweep.read(raw, places)
    problems += wrong
    problems += check.references(raw, places, factors)
    if unreadable:  # what the other files lack may stand in the one that can't be read
        problems = [problem for problem in problems if "is missing" not in problem.message]
    if problems or experiment is None:
        raise ConfigError(problems)
    return LoadedExperiment(experiment, raw, files, places, factors, (*notes, *replaced))


def command_line(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `--config` gave, with the types that it would have in a file: Snakemake hands nested values over as text."""
    return {name: _typed(value) for name, value in given.items()}


def _typed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return command_line(value)
    if isinstance(value, list | tuple):
        return [_typed(item) for item in value]
    return yaml_file.scalar(value) if isinstance(value, str) else value


def merge(base: dict[str, Any], over: dict[str, Any]) -> None:
    """Lay one tree over another, in place: mappings merge, everything else replaces."""
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            merge(base[name], value)
        else:
            base[name] = copy.deepcopy(value)


def nested(extra: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """`{"parallel.tp": 2}` as `{"parallel": {"tp": 2}}`."""
    models = raw.get("models")
    names = {"models": list(models) if isinstance(models, dict) else []}
    tree: dict[str, Any] = {}
    for name, value in extra.items():
        branch: Any = value
        for part in reversed(keys.split(name, names)):
            branch = {part: branch}
        merge(tree, branch)
    return tree


def _extra_places(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Places:
    places: Places = {}
    for name, value in tree.items():
        places[*path, name] = ("--config", 0)
        if isinstance(value, dict):
            places |= _extra_places(value, (*path, name))
    return places


def _fold_overrides(raw: dict[str, Any], places: Places) -> list[Problem]:
    """Turn overrides that only spell a key of ours differently into that key; refuse what is set twice."""
    overrides = raw.get("overrides")
    if not isinstance(overrides, dict):
        return []
    problems = []
    for field in list(overrides):
        path = keys.split(f"overrides.{field}", {})
        here = ("overrides", field)
        if path == here:
            if message := keys.override_problem(field):
                problems.append(keys.problem_at(places, here, dotted(here), message))
            continue
        section = raw.setdefault(path[0], {})
        if not isinstance(section, dict):
            continue
        if path[1] in section:
            message = f"sets the same field as {dotted(path)}: remove one"
            problems.append(keys.problem_at(places, here, dotted(here), message))
        else:
            section[path[1]] = overrides[field]
            places[path] = places.get(here, ("--config", 0))
        del overrides[field]
    return problems
