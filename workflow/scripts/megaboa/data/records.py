"""One record: its place, and the texts that it holds, or why it holds none."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN_KEYS = 20


@dataclass(frozen=True)
class Bad:
    """Why a record can't be used."""

    reason: str


# Position (a byte for files that can be cut, a row of a table, else the record's number), and its text by key.
Record = tuple[int, "Sequence[str] | Bad"]


@dataclass(frozen=True)
class Format:
    """How documents are found in files."""

    keys: tuple[str, ...] = ("text",)
    separator: str | None = None
    max_bytes: int = 128 << 20

    @classmethod
    def of(cls, spec: dict[str, Any]) -> Format:
        keys = (spec["text_key"],) if isinstance(spec["text_key"], str) else tuple(spec["text_key"])
        return cls(keys, spec["separator"], spec["max_document_mb"] << 20)


def decode(content: bytes) -> Sequence[str] | Bad:
    if (place := content.find(0)) >= 0:
        return Bad(f"holds NUL bytes, as a crashed writer leaves them (byte {place})")
    try:
        return (content.decode(),)
    except UnicodeDecodeError as error:
        return Bad(f"not UTF-8 text (byte {error.start})")


def too_long(max_bytes: int) -> Bad:
    return Bad(f"longer than max_document_mb allows ({max_bytes >> 20} MiB)")


def line_reader(form: Format) -> Callable[[bytes | memoryview], Sequence[str] | Bad]:
    """From a line of JSON to its texts: by the fast parser, and where it refuses, by Python's own (it takes NaN)."""
    import orjson

    # The fast parser refuses lone surrogates; looking for them again would take another walk through the text.
    quick, careful = text_getter(form, surrogates=False), text_getter(form)

    def texts(line: bytes | memoryview) -> Sequence[str] | Bad:
        try:
            return quick(orjson.loads(line))
        except orjson.JSONDecodeError:
            return careful(json.loads(bytes(line)))

    return texts


def text_getter(form: Format, surrogates: bool = True) -> Callable[[Any], Sequence[str] | Bad]:
    """From a record to its texts. `a.b` is a key of that name, or `b` within `a`.

    `surrogates=False` says that there can be no lone ones.
    """
    keys = form.keys
    surely_short = form.max_bytes // 4 if not surrogates else -1
    steps = [key.split(".") for key in keys]

    def texts(record: Any) -> Sequence[str] | Bad:
        if not isinstance(record, dict):
            return Bad(f"a JSON {type(record).__name__}, where an object with the key {keys[0]!r} is needed")
        found = []
        for key, path in zip(keys, steps, strict=True):
            value: Any = record
            for step in [key] if key in record else path:
                if not isinstance(value, dict) or step not in value:
                    some = sorted(map(str, record))[:SHOWN_KEYS]
                    return Bad(f"no key {key!r}; set the corpus's `text_key` to one of {some}")
                value = value[step]
            if not isinstance(value, str):
                return Bad(
                    f"{key!r} holds {type(value).__name__}, not a string; set `text_key` to the field with the text"
                )
            if len(value) > surely_short:
                if (size := utf8_bytes(value)) is None:
                    return Bad(f"{key!r} holds half a character (a lone surrogate)")
                if size > form.max_bytes:
                    return too_long(form.max_bytes)
            found.append(value)
        return found

    return texts


def utf8_bytes(text: str) -> int | None:
    """How long a text is as UTF-8; None if it can't be that."""
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None
