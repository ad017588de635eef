"""Reads the records of a part of one file: decompressed, split, and with their texts extracted.

A bad record is returned with its reason, not raised, because the corpus decides what to do. An error in the whole file
is an `InputError`; a truncated compressed file is never accepted as complete.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megaboa.data.filters import Dropped, Failed, Judge
from megaboa.data.shards import BLOCK, Part, can_be_cut
from megaboa.errors import InputError
from megaboa.records import SourceFile, TextSpec

CHUNK = 1 << 20
SHOWN_KEYS = 20

Piece = bytes | memoryview


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


class Records:
    """Iterates over a part's records; `share` is the progress."""

    def __init__(self, file: SourceFile, part: Part, form: Format) -> None:
        self.file, self.part, self.form = file, part, form
        self.share = 0.0

    def __iter__(self) -> Iterator[Record]:
        try:
            yield from self._records()
        except OSError as error:
            raise InputError(f"{self.file.path}: can't be read: {error.strerror or error}") from error
        self.share = 1.0

    def _records(self) -> Iterator[Record]:
        match self.file.kind:
            case "jsonl":
                return self._parsed(self._cut(b"\n"))
            case "text" if self.form.separator is not None:
                return self._decoded(self._cut(self.form.separator.encode()))
            case "source" if not self.form.is_text:
                from megaboa.data import docstrings

                return docstrings.rows(self.file, self.form)
            case "text" | "source":
                return self._whole()
            case "parquet" | "arrow":
                from megaboa.data import arrow

                return self._mine(arrow.rows(self.file, self.part, self.form, self))
            case "stream":
                from megaboa.data import stream

                return self._mine(stream.rows(self.file, self.form))
            case kind:
                raise ValueError(f"unknown kind of file: {kind!r}")

    def _cut(self, separator: bytes) -> Iterator[tuple[int, Piece | Bad]]:
        if not can_be_cut(self.file, self.form.separator):
            with unpacked(self.file.path, self.file.packed) as (stream, done):
                pieces = enumerate(piece for _, piece in split(stream, separator, 0, self.form.max_bytes))
                for number, piece in self._mine(pieces):
                    self.share = done() / max(1, self.file.size)
                    yield number, piece
            return
        begin, end = self.part.begin, self.part.end
        with Path(self.file.path).open("rb", buffering=CHUNK) as stream:
            for position, piece in split(stream, separator, begin, self.form.max_bytes):
                if position >= end:
                    break
                self.share = (position - begin) / (end - begin)
                yield position, piece

    def _mine(self, records: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """This shard's records of a file that several shards read in turns."""
        turn, turns = self.part.turn, self.part.turns
        return records if turns == 1 else (record for record in records if record[0] // BLOCK % turns == turn)

    def _parsed(self, lines: Iterator[tuple[int, Piece | Bad]]) -> Iterator[Record]:
        texts = line_reader(self.form)
        for position, line in lines:
            if isinstance(line, Bad):
                yield position, line
                continue
            try:
                yield position, texts(line)
            except (ValueError, RecursionError) as error:
                if line and not bytes(line).isspace():
                    yield position, Bad(f"not a line of JSON ({error})")

    def _decoded(self, pieces: Iterator[tuple[int, Piece | Bad]]) -> Iterator[Record]:
        for position, piece in pieces:
            yield position, piece if isinstance(piece, Bad) else self.form.decoded(bytes(piece))

    def _whole(self) -> Iterator[Record]:
        """The document of a file without a separator: the whole content."""
        if self.file.packed:
            with unpacked(self.file.path, self.file.packed) as (stream, _):
                content = stream.read(self.form.max_bytes + 1)
        elif self.file.size > self.form.max_bytes:
            content = None
        else:
            content = Path(self.file.path).read_bytes()
        if content is None or len(content) > self.form.max_bytes:
            yield 0, too_long(self.form.max_bytes)
            return
        record = self.form.decoded(content)
        if not (isinstance(record, Bad) and self.file.kind == "source"):
            yield 0, record


def split(stream: IO[bytes], separator: bytes, begin: int, max_bytes: int) -> Iterator[tuple[int, Piece | Bad]]:
    """The pieces between separators that begin at byte `begin` or later, with their positions. Nothing is copied.

    Memory is bounded by the longest permitted piece; of a longer piece, only the end is searched for.
    """
    place = max(0, begin - len(separator))
    if place:
        stream.seek(place)
    others = begin > 0  # the piece around `begin` belongs to the previous part
    dropped = 0  # bytes of the current piece that were discarded
    rest = b""
    while chunk := stream.read(max(CHUNK, len(rest))):  # more for a long piece, or copying would be quadratic
        content = rest + chunk
        view, done = memoryview(content), 0
        while (end := content.find(separator, done)) >= 0:
            length = dropped + end - done
            if not others:
                yield place, view[done:end] if length <= max_bytes else too_long(max_bytes)
            place += length + len(separator)
            others, dropped, done = False, 0, end + len(separator)
        rest = content[done:]
        kept = len(separator) - 1  # possibly the beginning of a separator
        if others or dropped + len(rest) - kept > max_bytes:
            dropped += max(0, len(rest) - kept)
            rest = rest[-kept:] if kept else b""
    if not others and dropped + len(rest):
        yield place, rest if dropped + len(rest) <= max_bytes else too_long(max_bytes)


def whole(number: int, file: SourceFile) -> Part:
    return Part(number, 0, file.size)


def describe(file: SourceFile, position: int, form: Format, by_line: bool = True) -> str:
    """Where a record is, for people. To count lines, the file is read up to there."""
    if file.kind == "jsonl" and (by_line or file.packed):
        return f"{file.path}:{position + 1 if file.packed else line_number(file.path, position)}"
    if file.kind == "jsonl":
        return f"{file.path}, byte {position}"
    if file.kind in ("parquet", "arrow", "stream"):
        return f"{file.path}, row {position}"
    if file.kind == "source" or form.separator is None:
        return file.path
    byte = can_be_cut(file, form.separator)
    return f"{file.path}, byte {position}" if byte else f"{file.path}, document {position + 1}"


def line_number(path: str, position: int) -> int:
    with Path(path).open("rb") as stream:
        chunks = iter(lambda: stream.read(min(CHUNK, position - stream.tell())), b"")
        return 1 + sum(chunk.count(b"\n") for chunk in chunks)


def documents(
    files: Iterable[SourceFile], form: Format, limit: int | None = None, skip_bad: bool = False, key: str = ""
) -> Iterator[str]:
    """The first `limit` non-blank texts; `key`: used in error messages, such as `corpora.wiki`."""
    texts = itertools.chain.from_iterable(
        _texts(file, number, form, skip_bad, key) for number, file in enumerate(files)
    )
    return itertools.islice((text for text in texts if not is_blank(text)), limit)


def is_blank(text: str) -> bool:
    return not text or text.isspace()


def refuse(file: SourceFile, position: int, form: Format, record: Bad, key: str) -> InputError:
    where = describe(file, position, form)
    return InputError(f"{where}: {record.reason}; fix or remove the record, or set {key}.on_bad_record to `skip`")


def _texts(file: SourceFile, number: int, form: Format, skip_bad: bool, key: str) -> Iterator[str]:
    for position, texts in Records(file, whole(number, file), form):
        if not isinstance(texts, Bad):
            yield from texts  # without the filter, because a tokenizer is trained on all of the text
        elif not skip_bad:
            raise refuse(file, position, form, texts, key)


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
            return Bad(f"a JSON {type(record).__name__}, where an object with the key {keys[0]!r} is needed")
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


class TruncatedError(Exception):
    """A compressed file is truncated."""


@contextlib.contextmanager
def unpacked(path: str, packed: str | None) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """The content of a file that may be compressed (.gz or .zst), and a function for the number of bytes read of the
    file."""
    with Path(path).open("rb") as raw:
        if packed is None:
            yield raw, raw.tell
            return
        inner = gzip.GzipFile(fileobj=raw) if packed == "gz" else _Zstd(raw)
        with io.BufferedReader(inner, CHUNK) as stream:
            try:
                yield stream, raw.tell
            except (EOFError, zlib.error, gzip.BadGzipFile, TruncatedError) as error:
                raise InputError(
                    f"{path}: the compressed file is damaged or truncated ({error}); copy it again"
                ) from error


class _Zstd(io.RawIOBase):
    """A reader that detects truncated files, which zstandard's own takes for complete."""

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self._new = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._error = zstandard.ZstdError
        self._raw, self._frame, self._ready = raw, None, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            rest = self._frame.unused_data if self._frame and self._frame.eof else b""
            if self._frame is not None and self._frame.eof:
                self._frame = None
            data = rest or self._raw.read(1 << 17)
            if not data:
                if self._frame is not None:
                    raise TruncatedError("its last frame has no end")
                return 0
            self._frame = self._frame or self._new()
            try:
                self._ready = self._frame.decompress(data)
            except self._error as error:
                raise TruncatedError(str(error)) from error
        taken = self._ready[: len(buffer)]
        self._ready = self._ready[len(taken) :]
        buffer[: len(taken)] = taken
        return len(taken)
