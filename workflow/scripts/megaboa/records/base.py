"""Definition of a record, and the one place that reads and writes records.

A record is a JSON file, or a line of one. Its class defines the keys; a key with a default may be missing, as in files
of older versions. A file without `version` has version 0; a version that a class doesn't know is refused. Keys that a
class doesn't know are kept in `more`, and written back with the rest. Standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import reprlib
import time
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from megaboa import files
from megaboa.errors import InputError

Tree = dict[str, Any]  # keys and values of the user's YAML, Hugging Face or Bridge, which have no record class here
Range = tuple[int, int]  # first and last step


AS_IT_IS = (Tree, str, int, float, bool)  # types that are the same in JSON


class RecordError(InputError, ValueError):
    """A file that can't be read as a record of its class; the message names the file and the remedy."""


IF_SET = {"only_if_set": True}  # metadata of a field that is only written if it isn't the default
NOT_WRITTEN = {"key": None}


@dataclass(frozen=True, kw_only=True)
class Record:
    VERSION_KEY: ClassVar[str] = "version"
    VERSION: ClassVar[int] = 0  # raised with every change that older readers would misread
    OLDEST: ClassVar[int] = 0  # raised with every change after which files of earlier versions would be misread
    REMEDY: ClassVar[str] = "remove it, and call again to have it made"  # for a file that can't be read
    more: Tree = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class Event(Record):
    """A line of a log of events, with its time in unix seconds."""

    event: ClassVar[str]
    time: float = field(default_factory=time.time)


def read[R: Record](kind: type[R], path: str | Path) -> R:
    return parse(kind, files.read_json(path), path)


def read_if_there[R: Record](kind: type[R], path: str | Path) -> R | None:
    """The record in a file, or None if there is no such file."""
    return read(kind, path) if Path(path).exists() else None


def write(path: str | Path, record: Record) -> None:
    files.write_json(path, plain(record))


def parse[R: Record](kind: type[R], values: Any, source: str | Path) -> R:
    """A record from parsed JSON; errors name `source`."""
    if not isinstance(values, dict):
        raise _no_record(kind, source, "it holds something else")
    version = values.get(kind.VERSION_KEY, 0)
    if version not in range(kind.VERSION + 1):
        raise RecordError(
            f"{source}: has version {version}, and this Megaboa reads {kind.__name__} up to version {kind.VERSION}: "
            "use the Megaboa that wrote it, or a newer one"
        )
    if version < kind.OLDEST:
        raise _no_record(kind, source, "an earlier version wrote it, and meant something else")
    try:
        return _build(kind, {key: value for key, value in values.items() if key != kind.VERSION_KEY})
    except _Unread as unread:
        raise _no_record(kind, source, f"{unread.key.lstrip('.') or 'it'} {unread.problem}") from None


class _Unread(Exception):
    """A value that its key can't have. `key`: its place in the record, such as `.node.send`."""

    def __init__(self, problem: str, key: str = ""):
        self.problem, self.key = problem, key


def _no_record(kind: type[Record], source: str | Path, why: str) -> RecordError:
    if issubclass(kind, Event):  # a ledger can't be regenerated
        return RecordError(
            f"{source}: has a line {kind.event!r} that can't be read ({why}): repair or remove that line"
        )
    return RecordError(f"{source}: can't be read as {kind.__name__} ({why}): {kind.REMEDY}")


def plain(record: Record) -> Tree:
    """A record as the values of its JSON."""
    found = {} if not isinstance(record, Event) else {"event": record.event}
    for name, key, default, writer in _written(type(record)):
        value = getattr(record, name)
        if default is _ALWAYS or value != default:
            found[key] = writer(value) if writer else value
    return {**found, **record.more, **({record.VERSION_KEY: record.VERSION} if record.VERSION else {})}


def line(event: Event) -> str:
    return json.dumps(plain(event), sort_keys=True)


def events(kinds: Mapping[str, type[Event]], lines: Iterable[Tree], source: str | Path = "a ledger") -> list[Any]:
    """Parsed lines as events; kinds that aren't in `kinds` are dropped."""
    return [parse(kinds[line["event"]], line, source) for line in lines if line.get("event") in kinds]


_ALWAYS = object()


@functools.cache
def _written(kind: type[Record]) -> list[tuple[str, str, Any, Callable[[Any], Any] | None]]:
    """For every field that is written: its name, key in the file, default that is left out, and conversion to JSON."""
    hints = typing.get_type_hints(kind)
    keys = [(one, one.metadata.get("key", one.name)) for one in dataclasses.fields(kind) if one.name != "more"]
    return [
        (
            one.name,
            key,
            _default(one) if one.metadata.get("only_if_set") else _ALWAYS,
            None if hints[one.name] in AS_IT_IS else _plain,
        )
        for one, key in keys
        if key
    ]


def _is_required(one: dataclasses.Field) -> bool:
    return one.default is one.default_factory is dataclasses.MISSING


def _default(one: dataclasses.Field) -> Any:
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()


class _Shape(NamedTuple):
    """What a type is in JSON: its name in errors, and by types of JSON how it is read, if not as it is."""

    name: str
    readers: tuple[tuple[Any, Callable[[Any], Any] | None], ...]


@functools.cache
def _fields(kind: type[Record]) -> dict[str, tuple[str, _Shape, tuple[Any, ...]]]:
    """Key in the file -> the field's name, its shape, and the types of JSON that are read as they are."""
    hints, found = typing.get_type_hints(kind), {}
    for one in dataclasses.fields(kind):
        name, readers = _shape(hints[one.name])
        if not _is_required(one):
            readers = (*readers, (types.NoneType, lambda _, one=one: _default(one)))  # null is the default
        as_they_are = tuple(kind for kind, reader in readers if reader is None)
        found[one.metadata.get("key") or one.name] = one.name, _Shape(name, readers), as_they_are
    del found["more"]
    return found


def _build[R: Record](kind: type[R], values: Tree) -> R:
    fields, found, more = _fields(kind), {}, {}
    for key, value in values.items():
        if key in fields:
            name, shape, as_they_are = fields[key]
            found[name] = value if isinstance(value, as_they_are) else _read(shape, value, f".{key}")
        elif key != "event" or not issubclass(kind, Event):
            more[key] = value
    try:
        return kind(**found, more=more)
    except TypeError:
        required = {one.name for one in dataclasses.fields(kind) if _is_required(one)} - found.keys()
        lacking = [key for key, (name, _, _) in fields.items() if name in required]
        raise _Unread(f"lacks {' and '.join(lacking)}") from None


def _read(shape: _Shape, value: Any, key: str) -> Any:
    for kind, reader in shape.readers:
        if isinstance(value, kind):
            try:
                return reader(value) if reader else value
            except _Unread as unread:
                raise _Unread(unread.problem, key + unread.key) from None
    raise _Unread(f"is {reprlib.repr(value)}, not {shape.name}", key)


def _shape(hint: Any) -> _Shape:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Record):
        return _Shape("a mapping", ((dict, functools.partial(_build, hint)),))
    if origin in (types.UnionType, typing.Union):
        members = [_shape(one) for one in inner]
        names = dict.fromkeys(member.name for member in members)
        return _Shape(" or ".join(names), tuple(one for member in members for one in member.readers))
    if origin in (tuple, list):
        each = [_shape(one) for one in inner if one is not ...]  # the last one is also that of all further values

        def sequence(values: Any) -> Any:
            return origin(_read(each[min(i, len(each) - 1)], value, f"[{i}]") for i, value in enumerate(values))

        return _Shape("a list", (((list, tuple), sequence),))
    if origin is dict:
        of = None if hint == Tree else _shape(inner[1])
        mapping = of and (lambda values: {key: _read(of, value, f".{key}") for key, value in values.items()})
        return _Shape("a mapping", ((dict, mapping),))
    name, kind = _PLAIN[type(inner[0]) if origin is typing.Literal else hint]
    return _Shape(name, ((kind, None),))


_NUMBER = "a number", (int, float, types.NoneType)  # null is what JSON has for one that isn't finite
_PLAIN = {
    **{int: _NUMBER, float: _NUMBER},
    str: ("text", str),
    bool: ("true or false", bool),
    types.NoneType: ("null", types.NoneType),
}


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return plain(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
