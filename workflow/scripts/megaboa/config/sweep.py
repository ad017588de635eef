"""Reads the sweep: each block's axes as factors. Every combination of their options is one run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from megaboa.config import check, config_keys, keys
from megaboa.config.keys import Path
from megaboa.config.problems import Problem
from megaboa.config.yaml_file import Places, dotted
from megaboa.records import Tree


@dataclass(frozen=True)
class Option:
    """One choice of a factor: its part of the run's name, and the values that it sets, by path. `labels`: by axis, of
    axes that have labels."""

    name: str
    values: dict[Path, Any]
    place: tuple[str | int, ...]
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Factor:
    """A set of options, exactly one of which applies to a run."""

    title: str
    options: tuple[Option, ...]

    @property
    def paths(self) -> set[Path]:
        return {path for option in self.options for path in option.values}


def read(raw: Tree, places: Places) -> tuple[tuple[Factor, ...], list[str], list[Problem]]:
    """Read the sweep: its factors, the values of the files that they replace, and problems of keys and values.

    The typed models check the sweep's shape.
    """
    block = raw.get("sweep")
    if not isinstance(block, dict):
        return (), [], []
    reader = _Reader(raw, places)
    factors = [
        Factor(f"sweep.grid.{axis}", reader.axis(("sweep", "grid", axis), axis, given))
        for axis, given in _mapping(block, "grid").items()
    ]
    zipped = [reader.axis(("sweep", "zip", axis), axis, given) for axis, given in _mapping(block, "zip").items()]
    if zipped:
        rows = zip(*zipped, strict=False)  # the models report unequal lengths
        factors.append(Factor("sweep.zip", tuple(reader.together(row) for row in rows)))
    runs = {name: values for name, values in _mapping(block, "runs").items() if isinstance(values, dict)}
    if runs:
        named = (reader.option(("sweep", "runs", name), name, values) for name, values in runs.items())
        factors.append(Factor("sweep.runs", tuple(named)))
    reader.check_factors(factors)
    return tuple(factors), list(reader.replaced.values()), reader.problems


def _mapping(block: Tree, name: str) -> Tree:
    return block[name] if isinstance(block.get(name), dict) else {}


class _Reader:
    def __init__(self, raw: Tree, places: Places):
        self.raw = raw
        self.places = places
        self.problems: list[Problem] = []
        self.replaced: dict[Path, str] = {}
        self.models = list(_mapping(raw, "models"))
        self.known: dict[tuple[str, ...], str | None] = {}
        self.checked: dict[tuple[Path, str], list[str]] = {}

    def problem(self, place: tuple[str | int, ...], message: str) -> None:
        self.problems.append(keys.problem_at(self.places, place, dotted(place), message))

    def axis(self, place: tuple[str | int, ...], axis: str, given: Any) -> tuple[Option, ...]:
        """The options of one axis: plain values of a key, or labels that set several keys."""
        if isinstance(given, dict):
            labelled = {label: values for label, values in given.items() if isinstance(values, dict)}
            options = [self.option((*place, label), label, values) for label, values in labelled.items()]
            return tuple(replace(option, labels={axis: option.name}) for option in options)
        if not isinstance(given, list):
            return ()
        path = self.path(place, axis)
        if path is None:
            return ()
        options = []
        for index, value in enumerate(given):
            sets = self.path_of_value(axis, value)
            self.check_value((*place, index), sets, value)
            options.append(Option(piece(path, value), {sets: value}, (*place, index)))
        return tuple(options)

    def option(self, place: tuple[str | int, ...], name: str, values: Tree) -> Option:
        """The option of a label or a named run."""
        if name != clean(name) and place[1] != "runs":  # the models check the names of runs
            self.problem(place, f"the label {name!r} can't be a file name: use letters, digits, '.', '_' and '-'")
        found: dict[Path, Any] = {}
        for key, value in values.items():
            if self.path((*place, key), key) is None:
                continue
            path = self.path_of_value(key, value)
            clash = next((other for other in found if keys.names_clash(path, other)), None)
            if clash:
                self.problem((*place, key), f"sets the same field as {dotted(clash)}: remove one")
            found[path] = value
            self.check_value((*place, key), path, value)
        return Option(name, found, place)

    def together(self, options: tuple[Option, ...]) -> Option:
        values = {path: value for option in options for path, value in option.values.items()}
        labels = {axis: label for option in options for axis, label in option.labels.items()}
        return Option("-".join(option.name for option in options), values, options[0].place, labels)

    def path_of_value(self, key: str, value: Any) -> Path:
        return keys.split(key, {"models": self.models}, value)

    def path(self, place: tuple[str | int, ...], key: str) -> Path | None:
        """The path of a dotted key of the sweep. If there is no such key, reports a problem and returns None."""
        path = keys.split(key, {"models": self.models})
        if path not in self.known:
            self.known[path] = (
                keys.sweep_problem(key, path, self.models)
                or self.replace(place, path)
                or config_keys.unknown_path(path, self.raw)
            )
        message = self.known[path]
        if not message and (emptied := keys.emptied(path, self.raw.get("overrides"))):
            message = f"sets the same field as overrides.{emptied}, which the file sets: remove one"
        if not message and path in self.replaced and key.startswith("overrides.") and path[0] != "overrides":
            message = f"sets the same field as {dotted(path)}, which the file sets: sweep {dotted(path)} instead"
        if message:
            self.problem(place, message)
            return None
        return path

    def replace(self, place: tuple[str | int, ...], path: Path) -> str | None:
        """Note the file's value that the sweep replaces, if there is one; returns why it can't be replaced."""
        node: Any = self.raw
        for depth, part in enumerate(path):
            if not isinstance(node, dict):
                return f"lies below {dotted(path[:depth])}, which isn't a mapping"
            if part not in node:
                return None
            node = node[part]
        file, line = self.places.get(path, ("the file", 0))
        where = f"{file}, line {line}" if line else file
        if not line:  # set on the command line or by the environment, so meant for every run
            return f"is also set in {where}: remove one of the two"
        self.replaced[path] = f"{dotted(place)} replaces {dotted(path)}: {node} ({where})"
        return None

    def check_value(self, place: tuple[str | int, ...], path: Path, value: Any) -> None:
        known = (path, repr(value))
        if known not in self.checked:
            self.checked[known] = check.value_problems(path, value, self.raw)
        for message in self.checked[known]:
            self.problem(place, message)

    def check_factors(self, factors: list[Factor]) -> None:
        """Report factors that set the same key, and options of the same name."""
        owner: dict[Path, str] = {}
        for factor in factors:
            for path in sorted(factor.paths):
                for other, title in owner.items():
                    if title != factor.title and keys.names_clash(path, other):
                        where = tuple(factor.title.split(".", 2))
                        self.problem(where, f"sets the same field as {title} ({dotted(other)}): remove one")
            owner |= dict.fromkeys(factor.paths, factor.title)
            seen: set[str] = set()
            for option in factor.options:
                if option.name in seen:
                    message = f"two values give the same name {option.name!r}: remove one, or label them"
                    self.problem(option.place, message)
                seen.add(option.name)


def clean(text: str) -> str:
    """A text reduced to characters that a file name may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")


def short_name(path: Path) -> str:
    """A key's name in the names of runs."""
    if path[0] in ("models", "overrides"):
        last = path[-1].rpartition(".")[2]
        return keys.CONFIG_SHORT.get(last, last)
    return keys.sweepable()[".".join(path)].short or path[-1]


def piece(path: Path, value: Any) -> str:
    """An axis and its value as part of a run's name: tp2, lr0.0003, sp, nosp, decay-cosine."""
    short = short_name(path)
    match value:
        case True:
            return short
        case False:
            return f"no{short}"
        case None:
            return f"{short}-none"
        case int() | float():
            return f"{short}{number(value)}".replace("+", "")
        case dict():
            return clean(f"{short}-" + "-".join(f"{name}{number(part)}" for name, part in value.items()))
        case list():
            return clean(f"{short}-" + "-".join(number(part) for part in value))
        case _:
            return clean(f"{short}-{value}")


def number(value: Any) -> str:
    """A number as text: 3e-4 as 0.0003, 2.0 as 2."""
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < 1e16 else repr(value)
    return str(value)
