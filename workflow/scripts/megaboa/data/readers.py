"""Reads the records of a part of one file: decompressed, split, and with their texts extracted.

A bad record is returned with its reason, not raised, because the corpus decides what to do. An error in the whole file
is an `InputError`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from megaboa.data.compressed import unpacked
from megaboa.data.documents import Bad, Format, Record, is_blank, line_reader, too_long
from megaboa.data.shards import BLOCK, Part, can_be_cut
from megaboa.errors import InputError
from megaboa.records import SourceFile

CHUNK = 1 << 20

Piece = bytes | memoryview


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


class Places:
    """Where records are, for people. A line's number is counted from the last one that was asked for in the file."""

    def __init__(self, form: Format, most: int | None = None) -> None:
        """`most`: of a line that begins behind this byte the byte is given, because counting would read too much."""
        self.form, self.most = form, most
        self.counted = ("", 0, 1)  # file, position and line

    def describe(self, file: SourceFile, position: int) -> str:
        if file.kind == "jsonl" and file.packed:
            return f"{file.path}:{position + 1}"
        if file.kind == "jsonl" and self.most is not None and position > self.most:
            return f"{file.path}, byte {position}"
        if file.kind == "jsonl":
            return f"{file.path}:{self._line(file.path, position)}"
        if file.kind in ("parquet", "arrow", "stream"):
            return f"{file.path}, row {position}"
        if file.kind == "source" or self.form.separator is None:
            return file.path
        byte = can_be_cut(file, self.form.separator)
        return f"{file.path}, byte {position}" if byte else f"{file.path}, document {position + 1}"

    def _line(self, path: str, position: int) -> int:
        known, begin, line = self.counted
        if known != path or begin > position:
            begin, line = 0, 1
        with Path(path).open("rb") as stream:
            stream.seek(begin)
            chunks = iter(lambda: stream.read(min(CHUNK, position - stream.tell())), b"")
            line += sum(chunk.count(b"\n") for chunk in chunks)
        self.counted = (path, position, line)
        return line


def describe(file: SourceFile, position: int, form: Format) -> str:
    """Where a record is. To count lines, the file is read up to there."""
    return Places(form).describe(file, position)


def documents(
    files: Iterable[SourceFile], form: Format, limit: int | None = None, skip_bad: bool = False, key: str = ""
) -> Iterator[str]:
    """The first `limit` non-blank texts; `key`: used in error messages, such as `corpora.wiki`."""
    texts = itertools.chain.from_iterable(
        _texts(file, number, form, skip_bad, key) for number, file in enumerate(files)
    )
    return itertools.islice((text for text in texts if not is_blank(text)), limit)


def refuse(file: SourceFile, position: int, form: Format, record: Bad, key: str) -> InputError:
    where = describe(file, position, form)
    return InputError(f"{where}: {record.reason}; fix or remove the record, or set {key}.on_bad_record to `skip`")


def _texts(file: SourceFile, number: int, form: Format, skip_bad: bool, key: str) -> Iterator[str]:
    for position, texts in Records(file, whole(number, file), form):
        if not isinstance(texts, Bad):
            yield from texts  # without the filter, because a tokenizer is trained on all of the text
        elif not skip_bad:
            raise refuse(file, position, form, texts, key)
