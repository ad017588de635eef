"""Reads YAML strictly: no duplicate keys, no guesses about `no`, `010` or `1:30`. Records the line of every value."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from megaboa.config.problems import Problem, show
from megaboa.records import Tree

Place = tuple[str, int]
Places = dict[tuple[str | int, ...], Place]  # path of a value in the tree -> file and line

MAX_VALUES = 1_000_000  # nested aliases can blow up a small file to any size

_STANDARD = "tag:yaml.org,2002:"
_DOUBTFUL = "tag:doubtful:"  # plain scalars that versions of YAML interpret differently
_HINTS = {
    "truth": "is text in one version of YAML and true or false in another: write true or false, or put it in quotes",
    "octal": "looks octal: write a number without leading zeros, or put it in quotes",
    "base": "is not decimal: write the number in decimal, or put it in quotes",
    "clock": "is a number to the base 60 in one version of YAML: write a plain number, or put it in quotes",
    "infinite": "is not a finite number",
}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """A loader in which only the resolvers below determine the types of plain scalars."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


def _resolve(tag: str, pattern: str) -> None:
    _Loader.add_implicit_resolver(tag, re.compile(rf"^(?:{pattern})$"), None)


_resolve(_STANDARD + "merge", "<<")
_resolve(_STANDARD + "null", "~|null|Null|NULL|")
_resolve(_STANDARD + "bool", "true|True|TRUE|false|False|FALSE")
_resolve(_DOUBTFUL + "truth", "(?i:yes|no|on|off)")
_resolve(_DOUBTFUL + "octal", r"[-+]?0[0-9_]+|[-+]?0o[0-7_]+")
_resolve(_DOUBTFUL + "base", r"[-+]?0x[0-9a-fA-F_]+|[-+]?0b[01_]+")
_resolve(_DOUBTFUL + "clock", r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
_resolve(_DOUBTFUL + "infinite", r"[-+]?\.(?i:inf)|\.(?i:nan)|(?i:nan)|[-+]?(?i:inf|infinity)")
_resolve(_STANDARD + "int", r"[-+]?(?:0|[1-9][0-9_]*)")
_resolve(_STANDARD + "float", r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


class _Reader:
    """Converts a tree of YAML nodes to values, and records places and problems."""

    def __init__(self, file: str):
        self.file = file
        self.places: Places = {}
        self.problems: list[Problem] = []
        self.open: set[int] = set()
        self.count = 0

    def problem(self, node: yaml.Node, path: tuple[str | int, ...], message: str) -> None:
        self.problems.append(Problem(dotted(path), message, self.file, node.start_mark.line + 1))

    def value(self, node: yaml.Node, path: tuple[str | int, ...]) -> Any:
        self.places[path] = (self.file, node.start_mark.line + 1)
        self.count += 1
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if id(node) in self.open:
            self.problem(node, path, "an alias (*) may not stand inside what it repeats")
            return None
        if self.count > MAX_VALUES:
            raise _TooLargeError
        self.open.add(id(node))
        try:
            if node.tag not in (_STANDARD + "map", _STANDARD + "seq"):
                self.problem(node, path, f"the tag {node.tag!r} is not allowed: write plain YAML")
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            return self.mapping(node, path)
        finally:
            self.open.discard(id(node))

    def mapping(self, node: yaml.MappingNode, path: tuple[str | int, ...]) -> Tree:
        own: Tree = {}
        merged: Tree = {}
        for key_node, value_node in node.value:
            if key_node.tag == _STANDARD + "merge":
                merged |= self.merged(value_node, path)
                continue
            name = self.name(key_node, path)
            if name is None:
                continue
            if name in own:
                first = self.places[*path, name][1]
                self.problem(key_node, (*path, name), f"is given twice (first on line {first}): remove one")
                continue
            own[name] = self.value(value_node, (*path, name))
            self.places[*path, name] = (self.file, key_node.start_mark.line + 1)
        return {**{k: v for k, v in merged.items() if k not in own}, **own}

    def merged(self, node: yaml.Node, path: tuple[str | int, ...]) -> Tree:
        """The keys that `<<` merges in; of several mappings the first one wins."""
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        result: Tree = {}
        for part in nodes:
            if not isinstance(part, yaml.MappingNode):
                self.problem(node, path, "`<<` needs a mapping, as in `<<: *name`")
            elif id(part) in self.open:
                self.problem(node, path, "an alias (*) may not stand inside what it repeats")
            else:
                self.open.add(id(part))
                result = self.mapping(part, path) | result
                self.open.discard(id(part))
        return result

    def name(self, node: yaml.Node, path: tuple[str | int, ...]) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            self.problem(node, path, "a key must be a word, not a list or a mapping")
        elif node.tag != _STANDARD + "str":
            self.problem(node, path, f"the key {node.value!r} is not text: put it in quotes")
        else:
            return node.value
        return None

    def scalar(self, node: yaml.ScalarNode, path: tuple[str | int, ...]) -> Any:
        text, tag = node.value, node.tag
        if tag.startswith(_DOUBTFUL):
            self.problem(node, path, f"{text} {_HINTS[tag.removeprefix(_DOUBTFUL)]}")
            return None
        match tag.removeprefix(_STANDARD):
            case "str":
                return text
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "float" | "int" as kind:
                if (number := _number(kind, text)) is not None:
                    return number
                self.problem(node, path, f"{text} is not a finite number")
            case _:
                self.problem(node, path, f"the tag {tag!r} is not allowed: write plain YAML")
        return None


class _TooLargeError(Exception):
    pass


def dotted(path: tuple[str | int, ...]) -> str:
    """A path as text: `('sweep', 'grid', 'parallel.tp', 0)` as `sweep.grid.parallel.tp[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def scalar(text: str) -> Any:
    """A single value as it would be read from a file. Text that has none of YAML's other types stays text."""
    try:
        node = yaml.compose(text, _Loader)
    except yaml.YAMLError:
        return text
    reader = _Reader("--config")
    value = reader.value(node, ()) if isinstance(node, yaml.ScalarNode) else text
    return text if reader.problems else value  # such as 010: then the key's own check names it


def read(path: Path) -> tuple[Tree, Places, list[Problem]]:
    """A file's top-level mapping (empty if it can't be read), the place of each value, and the problems."""
    file = str(path)

    def failed(message: str, line: int | None = None) -> tuple[Tree, Places, list[Problem]]:
        return {}, {}, [Problem("", message, file, line)]

    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        return failed(f"can't be read ({error.strerror}): check the path")
    except UnicodeDecodeError as error:
        return failed(f"is not UTF-8 text (byte {error.start}): save it as UTF-8")
    try:
        node = yaml.compose(text, _Loader)
        if node is None:
            return failed("is empty: an experiment needs at least `models`")
        reader = _Reader(file)
        tree = reader.value(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        return failed(_syntax_message(text, error), mark.line + 1 if mark else None)
    except yaml.YAMLError as error:  # characters that YAML doesn't allow
        return failed(f"is not YAML: {str(error).splitlines()[0]}")
    except (RecursionError, _TooLargeError):
        return failed("is nested too deeply, or aliases repeat too much: write it out")
    if not isinstance(tree, dict):
        return failed(f"must hold keys and values at the top level, not {show(tree)}", 1)
    return tree, reader.places, reader.problems


def _syntax_message(text: str, error: yaml.MarkedYAMLError) -> str:
    if "single document" in f"{error.context} {error.problem}":
        return "holds several documents (`---`): keep one"
    lines = text.splitlines()
    line = error.problem_mark.line if error.problem_mark else 0
    if any("\t" in part[: len(part) - len(part.lstrip())] for part in lines[max(line - 1, 0) : line + 1]):
        return "there is a tab in the indentation: indent with spaces"
    detail = ", ".join(part for part in (error.context, error.problem) if part)
    return f"is not YAML: {detail}"


def _number(kind: str, text: str) -> int | float | None:
    """The number that is written so; None if there is no finite one, as in `10_`, `.inf` or `0x10`."""
    try:
        if kind == "int":
            return int(text)
        return value if math.isfinite(value := float(text)) else None
    except ValueError:
        return None
