"""Reads traces of PyTorch's profiler (Kineto), which are JSON in Chrome's format.

Events are parsed one by one, so that a large trace is never completely in memory.
"""

from __future__ import annotations

import array
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megaboa.observe.traces.captures import UNKNOWN, Capture, Events, Finding, Names, events

TABLES = {
    "kernel": "kernels",
    "gpu_memcpy": "copies",
    "gpu_memset": "copies",
    "cuda_runtime": "calls",
    "cuda_driver": "calls",
    "user_annotation": "ranges",
    "cpu_op": "operators",
}
SIZED = ("kernels", "copies")
BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Byte": 1, "Char": 1, "Bool": 1}
KNOWN_SCHEMA = 1
# on the host, gloo's collectives appear as annotations on their own threads
HOST_COLLECTIVE = "gloo:"
CHUNK = 1 << 20
LIST = "traceEvents"
BLANK = " \t\r\n"
NUMBER = "0123456789.eE+-"


def read(path: Path) -> Capture:
    trace, names = TraceFile(path), Names()
    columns = {table: array.array("q") for table in set(TABLES.values())}
    findings, count, strange = [], 0, 0
    try:
        for event in trace:
            category = event.get("cat")
            table = TABLES.get(category) if isinstance(category, str) else None
            if not table or event.get("ph") != "X":
                continue
            try:
                columns[table].extend(array.array("q", _row(event, table in SIZED, names)))
                count += 1
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                strange += 1
    except TornError as error:
        if not count:
            raise
        text = f"truncated: {error}; the {count:,} events before that are used"
        findings.append(Finding("truncated", "warning", path.name, text))
    if strange:
        text = f"{strange:,} events without a time, or with one that isn't a number, are left out"
        findings.append(Finding("malformed", "warning", path.name, text))
    return _capture(path, trace.head, names, columns, findings)


def _capture(
    path: Path, head: dict[str, Any], names: Names, columns: dict[str, array.array], findings: list[Finding]
) -> Capture:
    tables = {
        table: events(np.frombuffer(values, dtype=np.int64), sized=table in SIZED) for table, values in columns.items()
    }
    # a GPU run whose kernels weren't recorded is no CPU run
    gpus = head.get("deviceProperties") or columns["calls"] or columns["copies"]
    on_host = not gpus and not len(tables["kernels"]) and len(tables["operators"]) > 0
    if on_host:
        tables["kernels"] = host_kernels(tables["operators"], tables["ranges"], names.all())
    missing = {"kernels": "kernel", "copies": "gpu_memcpy", "calls": "cuda_runtime", "ranges": "user_annotation"}
    where = head.get("distributedInfo")
    where = where if isinstance(where, dict) else {}
    schema = head.get("schemaVersion", 0)
    if isinstance(schema, int) and schema > KNOWN_SCHEMA:
        text = f"written in schema {schema} of PyTorch's traces, newer than the newest known ({KNOWN_SCHEMA})"
        findings.append(Finding("newer_version", "warning", path.name, text))
    devices = head.get("deviceProperties")
    devices = devices if isinstance(devices, list) else []
    return Capture(
        path=path,
        kind="pytorch",
        version=str(schema),
        rank=_whole(where.get("rank")),
        world_size=_whole(where.get("world_size")),
        host=head.get("host_name"),
        device="cpu" if on_host else "gpu",
        device_name=devices[0].get("name") if devices and isinstance(devices[0], dict) else None,
        epoch=_whole(head.get("baseTimeNanoseconds")),
        session=None,
        names=names.all(),
        **tables,
        missing=tuple(kind for table, kind in missing.items() if not columns[table]),
        findings=tuple(findings),
    )


def host_kernels(operators: Events, ranges: Events, names: tuple[str, ...]) -> Events:
    """Events that replace kernels in a run without any: operators that do their own work, and gloo's collectives."""
    collective = np.array([name.startswith(HOST_COLLECTIVE) for name in names], dtype=bool)
    wrapper = np.array([name.startswith(("c10d::", "record_param_comms")) for name in names], dtype=bool)
    working = own_time(operators) * 2 >= operators.durations
    workers = operators.take(working & ~wrapper[operators.name])
    gloo = ranges.take(collective[ranges.name])
    return events(np.concatenate([workers.rows(), gloo.rows()]), sized=True)


def own_time(table: Events) -> np.ndarray:
    """The time of each operator without the operators that it calls. Operators of one thread nest."""
    own = table.durations.copy()
    ends = table.end.tolist()
    for thread in np.unique(table.place):
        open_rows: list[int] = []
        rows = np.flatnonzero(table.place == thread)
        # of operators with the same start the longest is the outer one
        for row in rows[np.lexsort((-table.end[rows], table.start[rows]))].tolist():
            while open_rows and ends[open_rows[-1]] <= table.start[row]:
                open_rows.pop()
            if open_rows:
                own[open_rows[-1]] -= ends[row] - table.start[row]
            open_rows.append(row)
    return own


def _row(event: dict[str, Any], sized: bool, names: Names) -> tuple[int, ...]:
    values = event.get("args") or {}
    start = round(float(event["ts"]) * 1000)
    name = str(event.get("name", ""))
    on_device = "stream" in values
    place = values["stream"] if on_device else event.get("tid", 0)
    row = (start, start + round(float(event.get("dur", 0)) * 1000), names.number(name), _integer(place))
    row += (_integer(values.get("correlation", UNKNOWN)),)
    return (*row, message_bytes(values), _integer(values.get("Group size", UNKNOWN))) if sized else row


def message_bytes(values: dict[str, Any]) -> int:
    """The bytes of a copy, or the larger of a rank's input and output in a collective."""
    if "bytes" in values:
        return _integer(values["bytes"])
    elements = [values.get(f"{side} msg nelems") for side in ("In", "Out")]
    known = [count for count in elements if isinstance(count, int)]
    width = BYTES.get(values.get("dtype", ""))
    return max(known) * width if known and width else UNKNOWN


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _integer(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return UNKNOWN


class TornError(Exception):
    """A file that ends prematurely, or is not JSON."""


class TraceFile:
    """Iterates over the events of a trace. `head` holds the other keys of the outermost object, complete at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head: dict[str, Any] = {}
        self._decode = json.JSONDecoder().raw_decode
        self._text, self._at, self._ended = "", 0, False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        opener = gzip.open if self.path.suffix == ".gz" else open
        try:
            with opener(self.path, "rt", encoding="utf-8", errors="replace") as self._stream:
                yield from self._events()
        except (EOFError, gzip.BadGzipFile, OSError) as error:
            raise TornError(str(error)) from None

    def _events(self) -> Iterator[dict[str, Any]]:
        if self._next() == "[":  # a bare list, which Chrome's format allows
            yield from self._list()
            return
        self._expect("{")
        while self._next() != "}":
            if self._next() == ",":
                self._at += 1
                continue
            key = self._value()
            self._expect(":")
            if key == LIST:
                yield from self._list()
            else:
                self.head[key] = self._value()

    def _list(self) -> Iterator[dict[str, Any]]:
        self._expect("[")
        while (sign := self._next()) != "]":
            if sign == ",":
                self._at += 1
                continue
            value = self._value()
            if isinstance(value, dict):
                yield value
        self._at += 1

    def _next(self) -> str:
        """Peek at the next character that isn't blank."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in BLANK:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            self._more()

    def _expect(self, sign: str) -> None:
        if self._next() != sign:
            raise TornError(f"{self._text[self._at : self._at + 20]!r} where {sign!r} should be")
        self._at += 1

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError:
                self._more()
                continue
            if isinstance(value, int | float) and not self._ended and not self._text[end:].strip(NUMBER):
                self._more(may_end=True)  # the number may continue in the next chunk
                continue
            self._at = end
            return value

    def _more(self, may_end: bool = False) -> None:
        chunk = "" if self._ended else self._stream.read(CHUNK)
        if not chunk:
            self._ended = True
            if may_end:
                return
            raise TornError("it ends in the middle")
        if len(self._text) - self._at > 256 * CHUNK:
            raise TornError("one value is larger than 256 MB")
        self._text, self._at = self._text[self._at :] + chunk, 0
