"""Definition of a record, and the one place that reads and writes records.

A record is a JSON file, or a line of one. Its class defines the keys; a key with a default may be missing, as in files
of older versions. A file without `version` has version 0; a version that a class doesn't know is refused. Keys that a
class doesn't know are kept in `more`, and written back with the rest. Standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

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
    required = [name for name, key in _required(kind) if key not in values]
    if required:
        raise _no_record(kind, source, f"it lacks {' and '.join(required)}")
    try:
        return _build(kind, {key: value for key, value in values.items() if key != kind.VERSION_KEY})
    except (TypeError, ValueError, AttributeError) as error:
        raise _no_record(kind, source, str(error)) from None


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


def _default(one: dataclasses.Field) -> Any:
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()


@functools.cache
def _required(kind: type[Record]) -> list[tuple[str, str]]:
    found = [one for one in dataclasses.fields(kind) if one.default is one.default_factory is dataclasses.MISSING]
    return [(one.name, one.metadata.get("key") or one.name) for one in found]


@functools.cache
def _readers(kind: type[Record]) -> dict[str, tuple[str, Callable[[Any], Any] | None]]:
    """Key in the file -> the field's name and the function that converts the JSON value, if needed."""
    hints = typing.get_type_hints(kind)
    named = [one for one in dataclasses.fields(kind) if one.name != "more"]
    return {one.metadata.get("key") or one.name: (one.name, _reader(hints[one.name])) for one in named}


def _build[R: Record](kind: type[R], values: Tree) -> R:
    readers, found, more = _readers(kind), {}, {}
    for key, value in values.items():
        if key in readers:
            name, reader = readers[key]
            found[name] = reader(value) if reader and value is not None else value
        elif key != "event" or not issubclass(kind, Event):
            more[key] = value
    return kind(**found, more=more)


def _reader(hint: Any) -> Callable[[Any], Any] | None:
    """The function that converts a JSON value to this type; None if no conversion is needed."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Record):
        return functools.partial(_build, hint)
    if origin in (types.UnionType, typing.Union):
        return next((reader for one in inner if (reader := _reader(one))), None)
    if origin is tuple:
        each = _reader(inner[0])
        return (lambda values: tuple(map(each, values))) if each else tuple
    if origin is dict and (each := _reader(inner[1])):
        return lambda values: {key: None if value is None else each(value) for key, value in values.items()}
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return plain(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
