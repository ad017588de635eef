"""The numbers that expressions can use, for one run: read from its tree, derived from others, or unknown."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from megaboa.config import formula, keys
from megaboa.config.formula import FormulaError, Number
from megaboa.layout import DENSE
from megaboa.records import Tree

# Values that other quantities are derived from, but that expressions can't name.
_HIDDEN = {"nodes": "resources.nodes", "gpus_per_node": "resources.gpus_per_node"}
_KEYS = {**{name: key for name, key in formula.NAMES.items() if key}, **_HIDDEN}
_BY_KEY = {key: name for name, key in _KEYS.items()}


class UnknownQuantityError(FormulaError):
    """A number that isn't set, or that only the recipe knows."""


class Quantities:
    """Values of names, with expressions resolved on demand; a cycle is an error.

    `own_defaults`: whether unset keys have our defaults (for a recipe, it decides).
    """

    def __init__(self, raw: Tree, own_defaults: bool, params: Callable[[], int]):
        self.raw = raw
        self.own_defaults = own_defaults
        self.params = params
        self.known: dict[str, Number] = {}
        self.open: list[str] = []

    def __call__(self, name: str) -> Number:
        if name not in self.known:
            if name in self.open:
                chain = " → ".join([*self.open[self.open.index(name) :], name])
                raise FormulaError(f"depends on itself: {chain}")
            self.open.append(name)
            try:
                self.known[name] = self._find(name)
            finally:
                self.open.pop()
        return self.known[name]

    def get(self, name: str) -> Number | None:
        """The number, or None if it isn't set, or only the recipe knows it."""
        try:
            return self(name)
        except UnknownQuantityError:
            return None

    def value(self, key: str, given: Any) -> Number:
        """The value of a key with its expression calculated; rounded up if the key is a whole number."""
        number = formula.evaluate(given, self) if isinstance(given, str) else given
        return math.ceil(number) if keys.formula_keys()[key] else float(number)

    def _find(self, name: str) -> Number:
        match name:
            case "params":
                return self.params()
            case "world_size":
                return self("nodes") * self("gpus_per_node")
            case "dp":
                return Fraction(self("world_size")) / math.prod(map(self, DENSE))
            case "train_iters" if self._set("training.train_iters") is None:
                return math.ceil(Fraction(self("train_tokens")) / (self("gbs") * self("seq_length")))
            case "train_tokens" if self._set("training.train_tokens") is None:
                if self._set("training.train_iters") is None:
                    raise UnknownQuantityError("training.train_iters (or train_tokens) is not set")
                return self("train_iters") * self("gbs") * self("seq_length")
        key = _KEYS[name]
        given = self._set(key)
        if given is not None:
            return self.value(key, given)
        if self.own_defaults or key.startswith("resources."):
            return keys.all_keys()[key].field.default
        raise UnknownQuantityError(f"{name} is left to the recipe: set {key}")

    def _set(self, key: str) -> Any:
        section, _, field = key.partition(".")
        return (self.raw.get(section) or {}).get(field)


def resolve(raw: Tree, quantities: Quantities) -> tuple[Tree, list[tuple[str, str]]]:
    """The tree with numbers instead of expressions, and the key and error of each expression that fails."""
    result, problems = raw, []
    for key in keys.formula_keys():
        section, _, field = key.partition(".")
        given = (raw.get(section) or {}).get(field)
        if not isinstance(given, str):
            continue
        try:
            name = _BY_KEY.get(key)
            value = quantities(name) if name else quantities.value(key, given)
            result = overlay(result, {(section, field): value})
        except FormulaError as error:
            names = ", ".join(formula.names_for(field))
            problems.append((key, f"the expression {given!r} {_sentence(error)}; names: {names}"))
    return result, problems


def _sentence(error: FormulaError) -> str:
    text = str(error)
    return f"can't be calculated: {text}" if isinstance(error, UnknownQuantityError) or text.startswith("a ") else text


def overlay(tree: Tree, values: dict[tuple[str, ...], Any]) -> Tree:
    """A copy of a tree with some values set. Unchanged parts are shared with the original, which isn't modified."""
    result = dict(tree)
    fresh = {(): result}
    for path, value in values.items():
        node = result
        for depth, part in enumerate(path[:-1], start=1):
            if path[:depth] not in fresh:
                inner = node.get(part)
                node[part] = fresh[path[:depth]] = dict(inner) if isinstance(inner, dict) else {}
            node = fresh[path[:depth]]
        node[path[-1]] = value
    return result
