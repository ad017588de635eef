"""The sweep multiplied out: every combination of its axes is one run to be planned."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megaboa.config import LoadedExperiment
from megaboa.config.sweep import Option

MAX_NAME = 100

TreePath = tuple[str, ...]


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
