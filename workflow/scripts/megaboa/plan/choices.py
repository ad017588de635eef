"""Expands the sweep: every combination of its axes is one run; and finds mistakes in them.

Problems are collected, so that all are reported at once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megaboa.config import ConfigError, LoadedExperiment, Problem
from megaboa.config.sweep import Option
from megaboa.config.yaml_file import dotted

MAX_NAME = 100

TreePath = tuple[str, ...]
Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Choice:
    """One combination of the sweep: a run before it is resolved."""

    name: str
    values: dict[TreePath, Any]
    place: tuple[str | int, ...]


def choices_of(loaded: LoadedExperiment) -> Iterator[Choice]:
    if not loaded.factors:
        yield Choice("run", {}, ())
    elif len(loaded.factors) == 1:
        for option in loaded.factors[0].options:
            yield Choice(option.name, option.values, option.place)
    else:
        for options in itertools.product(*(factor.options for factor in loaded.factors)):
            yield _join(options)


def _join(options: tuple[Option, ...]) -> Choice:
    values = {path: value for option in options for path, value in option.values.items()}
    return Choice("-".join(option.name for option in options), values, ("sweep",))


def bad_names(choices: list[Choice]) -> Iterator[tuple[Choice, str]]:
    """Names that no folder can have, or that two runs would have."""
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
        self.found: dict[Problem, list[str]] = {}  # with the runs that have it
        self.count = 0

    def add(self, path: Place, message: str, run: str = "") -> None:
        self.found.setdefault(self.loaded.problem(path, message), []).append(run)
        self.count += 1

    def raise_all(self) -> None:
        if self.found:
            raise ConfigError(_complete(problem, names) for problem, names in self.found.items())

    def place_of(self, path: TreePath, choice: Choice) -> Place:
        """Where a run's value at a path was written: in the sweep, or else in its section."""
        if path not in choice.values:
            return path
        candidates = [(*choice.place, dotted(path)), ("sweep", "grid", dotted(path)), ("sweep", "zip", dotted(path))]
        return next((place for place in candidates if place in self.loaded.places), choice.place)


def _complete(problem: Problem, runs: list[str]) -> Problem:
    """Say which runs have a problem, once."""
    named = [name for name in runs if name]
    if not named or named == ["run"]:
        return problem
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    where = f" (run{'s' if len(named) > 1 else ''} {', '.join(named[:3])}{more})"
    return Problem(problem.key, problem.message + where, problem.file, problem.line)
