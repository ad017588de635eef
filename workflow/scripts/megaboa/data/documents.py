"""How documents are found in records: the keys of their texts, and why a record can't be used."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megaboa.data.filters import Dropped, Failed, Judge
from megaboa.records import TextSpec

SHOWN_KEYS = 20


@dataclass(frozen=True)
class Bad:
    """Why a record can't be used."""

    reason: str


# Position of a record (a byte for divisible files, a row for tables, else the record's number), and its texts by key.
Texts = Sequence[str] | Bad | Dropped | Failed
Record = tuple[int, Texts]


@dataclass(frozen=True)
class Format:
    """How documents are found in files."""

    keys: tuple[str, ...] = ("text",)
    separator: str | None = None
    max_bytes: int = 128 << 20
    judge: Judge | None = None  # the user's filter
    named: str = "text_key"  # the option that names the keys; unless it is text_key, their values need not be text

    @property
    def is_text(self) -> bool:
        return self.named == "text_key"

    @classmethod
    def of(cls, spec: TextSpec, judge: Judge | None = None) -> Format:
        keys = (spec.text_key,) if isinstance(spec.text_key, str) else tuple(spec.text_key)
        return cls(keys, spec.separator, spec.max_document_mb << 20, judge)

    def judged(self, record: dict[str, Any], texts: Sequence[str]) -> Sequence[str] | Dropped | Failed:
        """The texts of a record, or the filter's objection."""
        return (self.judge and self.judge(record, texts[0])) or texts

    def decoded(self, content: bytes) -> Texts:
        """A document of a text file, as a record with one key."""
        texts = decode(content)
        return texts if isinstance(texts, Bad) else self.judged({"text": texts[0]}, texts)


def is_blank(text: str) -> bool:
    return not text or text.isspace()


def decode(content: bytes) -> Sequence[str] | Bad:
    if (place := content.find(0)) >= 0:
        return Bad(f"holds NUL bytes, as a crashed writer leaves them (byte {place})")
    try:
        return (content.decode(),)
    except UnicodeDecodeError as error:
        return Bad(f"not UTF-8 text (byte {error.start})")


def too_long(max_bytes: int) -> Bad:
    return Bad(f"longer than max_document_mb allows ({max_bytes >> 20} MiB)")


def line_reader(form: Format) -> Callable[[bytes | memoryview], Texts]:
    """A function that parses a line of JSON into its texts, by the fast parser or, if that refuses, by Python's own
    (for NaN)."""
    import orjson

    # The fast parser refuses lone surrogates, so there is no need to search for them again.
    quick, careful = text_getter(form, surrogates=False), text_getter(form)

    def texts(line: bytes | memoryview) -> Texts:
        try:
            return quick(orjson.loads(line))
        except orjson.JSONDecodeError:
            return careful(json.loads(bytes(line)))

    return texts


def text_getter(form: Format, surrogates: bool = True) -> Callable[[Any], Texts]:
    """A function that extracts a record's texts. `a.b` is either a key of that name, or `b` within `a`.

    `surrogates=False`: there can be no lone surrogates.
    """
    keys = form.keys
    surely_short = form.max_bytes // 4 if not surrogates else -1
    steps = [key.split(".") for key in keys]

    def texts(record: Any) -> Texts:
        if not isinstance(record, dict):
            each = ": write each element on a line (`jq -c '.[]'`)" if isinstance(record, list) else ""
            return Bad(f"a JSON {type(record).__name__}, where an object with the key {keys[0]!r} is needed{each}")
        found = []
        for key, path in zip(keys, steps, strict=True):
            value: Any = record
            for step in [key] if key in record else path:
                if not isinstance(value, dict) or step not in value:
                    some = sorted(map(str, record))[:SHOWN_KEYS]
                    return Bad(f"no key {key!r}; set the corpus's `{form.named}` to one of {some}")
                value = value[step]
            if not form.is_text:
                found.append(value)
                continue
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
        return found if form.judge is None else form.judged(record, found)

    return texts


def utf8_bytes(text: str) -> int | None:
    """Length of a text as UTF-8; None if it can't be encoded."""
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None
