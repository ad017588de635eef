"""JSON traces, event by event: a large one is never in memory as a whole."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK = 1 << 20
LIST = "traceEvents"
BLANK = " \t\r\n"
NUMBER = "0123456789.eE+-"


class TornError(Exception):
    """The file ends in the middle, or is none of JSON."""


class TraceFile:
    """The events of a trace by iteration; `head` holds what else its outermost object says, complete at the end."""

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
        if self._next() == "[":  # a bare list, as Chrome's format allows
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
        """The next character that isn't blank; it is not taken."""
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
                self._more(may_end=True)  # a number may go on
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
