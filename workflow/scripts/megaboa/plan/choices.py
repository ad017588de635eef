"""Expands the sweep, in which every combination of its axes is one run, and finds mistakes in it.

Problems are collected, so that all are reported at once.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megaboa.check.refusals import some
from megaboa.config import ConfigError, LoadedExperiment, Problem
from megaboa.config.sweep import Factor, Option
from megaboa.config.yaml_file import dotted

MAX_NAME = 100
NUDGE, SEED = ("training", "nudge"), ("training", "seed")
PARENT = ("continue_from",)

TreePath = tuple[str, ...]
Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Choice:
    """One combination of the sweep: a run before it is resolved. `labels`: by axis, of axes that have labels."""

    name: str
    values: dict[TreePath, Any]
    place: Place
    reference: str | None = None  # for a run added by an agreement: the run that it is derived from
    places: dict[TreePath, Place] = field(default_factory=dict)  # of values, where `place` is of the whole sweep
    labels: dict[str, str] = field(default_factory=dict)


def choices_of(loaded: LoadedExperiment) -> Iterator[Choice]:
    """The choices of the sweep without those that it excludes, followed by those that agreements add."""
    excluded = loaded.experiment.sweep.exclude if loaded.experiment.sweep else []
    wanted = {one.reference: [] for one in loaded.experiment.report.agreements if one.twins or one.seeds}
    for choice in of_sweep(loaded):
        if any(fnmatch.fnmatch(choice.name, pattern) for pattern in excluded):
            continue
        if choice.name in wanted:
            wanted[choice.name].append(choice)
        yield choice
    for references in wanted.values():
        for reference in references:
            yield from _added(loaded, reference)


def twins(reference: str, number: int) -> tuple[str, ...]:
    return tuple(f"{reference}-twin{one + 1}" for one in range(number))


def seeds(reference: str, number: int) -> tuple[str, ...]:
    return tuple(f"{reference}-seed{one + 1}" for one in range(number))


def _added(loaded: LoadedExperiment, reference: Choice) -> Iterator[Choice]:
    """Twins of a reference, and its runs with other seeds."""
    groups = [one for one in loaded.experiment.report.agreements if one.reference == reference.name]
    place = ("report", "agreements", loaded.experiment.report.agreements.index(groups[0]))
    for number, name in enumerate(twins(reference.name, max(one.twins for one in groups)), start=1):
        values = {**reference.values, NUDGE: number}
        yield Choice(name, values, (*place, "twins"), reference.name, labels=reference.labels)
    first = reference.values.get(SEED, loaded.experiment.training.seed)
    for number, name in enumerate(seeds(reference.name, max(one.seeds for one in groups)), start=1):
        values = {**reference.values, SEED: first + number}
        yield Choice(name, values, (*place, "seeds"), reference.name, labels=reference.labels)


def of_sweep(loaded: LoadedExperiment) -> Iterator[Choice]:
    """All choices of the sweep, also those that it excludes."""
    if not loaded.factors:
        yield Choice("run", {}, ())
    elif len(loaded.factors) == 1:
        for option in loaded.factors[0].options:
            yield Choice(option.name, option.values, option.place, labels=option.labels)
    else:
        for options in itertools.product(*(factor.options for factor in loaded.factors)):
            yield _with_parent_of_its_cell(_join(options), options, loaded)


def _join(options: tuple[Option, ...]) -> Choice:
    values = {path: value for option in options for path, value in option.values.items()}
    places = {path: option.place for option in options for path in option.values}
    labels = {axis: label for option in options for axis, label in option.labels.items()}
    return Choice("-".join(option.name for option in options), values, ("sweep",), places=places, labels=labels)


def _with_parent_of_its_cell(choice: Choice, options: tuple[Option, ...], loaded: LoadedExperiment) -> Choice:
    """The choice. If its entry of `sweep.runs` continues from another entry, that means the run of the same cell of
    the grid; a run's full name keeps its meaning."""
    *cell, entry = options
    named = re.fullmatch(r"([^/]+)/([^@]+)(@.+)?", str(entry.values.get(PARENT)))
    if named is None or loaded.factors[-1].title != "sweep.runs":
        return choice
    experiment, name, step = named.groups("")
    entries = {option.name for option in loaded.factors[-1].options}
    if experiment != loaded.experiment.experiment or name not in entries or _is_run(name, loaded.factors):
        return choice
    parent = "-".join([*(option.name for option in cell), name])
    return replace(choice, values={**choice.values, PARENT: f"{experiment}/{parent}{step}"})


def _is_run(name: str, factors: Sequence[Factor]) -> bool:
    """Whether a name consists of one option of each factor."""
    first, *others = factors
    if not others:
        return any(option.name == name for option in first.options)
    starts = (f"{option.name}-" for option in first.options)
    return any(name.startswith(start) and _is_run(name.removeprefix(start), others) for start in starts)


def bad_names(choices: list[Choice]) -> Iterator[tuple[Choice, str]]:
    """Choices whose names can't be folder names, or occur twice."""
    seen: set[str] = set()
    for choice in choices:
        if len(choice.name) > MAX_NAME:
            message = f"the run name {choice.name!r} is longer than {MAX_NAME} characters: give names under sweep.runs"
            yield choice, message
        elif not re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", choice.name):
            yield choice, f"the run name {choice.name!r} does not begin with a letter: label the values"
        if choice.name in seen:
            message = f"two runs are called {choice.name!r}, and would share a folder: remove one, or label the values"
            yield choice, message
        seen.add(choice.name)


class Problems:
    def __init__(self, loaded: LoadedExperiment):
        self.loaded = loaded
        self.found: dict[Problem, list[str]] = {}  # message -> names of the runs that have the problem
        self.count = 0

    def add(self, path: Place, message: str, run: str = "") -> None:
        self.found.setdefault(self.loaded.problem(path, message), []).append(run)
        self.count += 1

    def raise_all(self) -> None:
        if self.found:
            raise ConfigError(_complete(problem, names) for problem, names in self.found.items())

    def place_of(self, path: TreePath, choice: Choice) -> Place:
        """Where the user wrote a run's value at a path: in the sweep, or else in its section."""
        if path not in choice.values:
            return path
        own = choice.places.get(path, choice.place)
        candidates = [(*own, dotted(path)), ("sweep", "grid", dotted(path)), ("sweep", "zip", dotted(path))]
        return next((place for place in candidates if place in self.loaded.places), choice.place)


def _complete(problem: Problem, runs: list[str]) -> Problem:
    """A problem with the names of its runs added, so that it is reported only once."""
    named = [name for name in runs if name]
    if not named or named == ["run"]:
        return problem
    return Problem(problem.key, f"{problem.message} ({some(named)})", problem.file, problem.line)
