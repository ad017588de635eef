"""Reads a log's events in order. Most lines are only searched for a few words."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import pyarrow as pa

from megaboa.observe.logs import dialects
from megaboa.observe.logs.events import Event, LineFormat, Note, Steps

# A line without any of these words says nothing. Each word has its parsers; the first that understands a line wins.
STEP, SPEED, START = b"iteration", b"Step Time", b"raining "
Readers = Sequence[tuple[bytes, tuple[Callable[[bytes], Event | None], ...]]]
RARE: Readers = (
    (START, (dialects.read_start,)),
    (b"step", (dialects.read_torchtitan, dialects.read_progress_bar)),
    (b"param", (dialects.read_parameters, dialects.read_torchtitan_size)),
    (b"MxRtt/Rnk", (dialects.read_stragglers,)),
    (b"seq", (dialects.read_torchtitan_settings, dialects.read_setting)),
)
READERS = ((STEP, (dialects.read_iteration,)), (SPEED, (dialects.read_speed,)), *RARE)
BLOCK_BYTES = 1 << 20
# A longer line is no log line, and is dropped.
LONGEST_LINE = 1 << 20
_COLOURS = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\n]*\x07|[()][A-Z0-9]|[c=>])")


@dataclass
class Count:
    """How much of a log was understood."""

    bytes: int = 0
    lines: int = 0
    understood: int = 0
    torn: int = 0

    @property
    def unknown(self) -> int:
        return self.lines - self.understood - self.torn


def read_events(stream: IO[bytes], count: Count | None = None) -> Iterator[Event]:
    """Parse the complete lines of a log; `count` is updated along the way."""
    return LogReader(stream, count or Count()).events()


class LogReader:
    def __init__(self, stream: IO[bytes], count: Count) -> None:
        self._lines, self._count = Lines(stream), count
        self._usual: Steps | None = None  # the previous step line, which most step lines resemble

    def events(self) -> Iterator[Event]:
        before = self._count.bytes
        for block in self._lines.blocks():
            self._count.bytes = before + self._lines.bytes
            self._count.lines += block.count(b"\n") + 1
            for event in self._read(block):
                if event.__class__ is Note and event.kind == "torn":
                    self._count.torn += 1
                    continue
                self._count.understood += event.count if event.__class__ is Steps else 1
                yield event
        self._count.bytes = before + self._lines.bytes
        if self._lines.torn:
            self._count.lines += 1
            self._count.torn += 1

    def _read(self, block: bytes) -> Iterator[Event]:
        """Parse a block. Most lines are noise, and most others are steps; both are handled in bulk.

        If training starts within the block, its lines are parsed one by one, to keep their order.
        """
        if START in block:
            yield from self._read_lines(block, READERS)
            return
        rest = block
        if STEP in block:
            lines, rest = _with(STEP, block)
            if usual := self._usual:
                steps, lines_left = _take(lines, dialects.lines_of(usual.layout, usual.label), usual.layout, usual)
                if steps and not dialects.HEADER.search(lines_left):
                    yield steps
                    lines = lines_left
            yield from self._read_lines(lines, READERS)
        if SPEED in rest:
            lines, rest = _with(SPEED, rest)
            speeds, lines = _take(lines, dialects.SPEED_LINES, dialects.SPEED)
            if speeds:
                yield speeds
            yield from self._read_lines(lines, READERS)
        yield from self._read_lines(rest, RARE)

    def _read_lines(self, block: bytes, all_readers: Readers) -> Iterator[Event]:
        readers = [(word, reads) for word, reads in all_readers if word in block]
        if not readers:
            return
        for line in block.split(b"\n"):
            if event := _event(line, readers):
                if event.__class__ is Steps and event.layout.dialect == "megatron":
                    self._usual = event
                yield event


def _event(line: bytes, readers: Readers) -> Event | None:
    for word, reads in readers:
        if word in line:
            for read in reads:
                if event := read(line):
                    return event
    return None


def _with(word: bytes, block: bytes) -> tuple[bytes, bytes]:
    """Split a block into the lines that contain a word, and all others."""
    sample = block[: len(block) // 16]
    if sample.count(word) > 2 * sample.count(b"\n"):  # it occurs four times in a step line: mostly step lines
        return block, b""
    found, others_, position = [], [], 0
    while (hit := block.find(word, position)) >= 0:
        begin = block.rfind(b"\n", position, hit) + 1 or position
        end = block.find(b"\n", hit)
        end = len(block) if end < 0 else end
        others_.append(block[position:begin])
        found.append(block[begin:end])
        position = end + 1
    others_.append(block[position:])
    return b"\n".join(found), b"".join(others_)


def _take(
    block: bytes, lines: re.Pattern[bytes], layout: LineFormat, like: Steps | None = None
) -> tuple[Steps | None, bytes]:
    """Extract the lines of a layout from a block; returns them and the rest of the block."""
    parts = lines.split(b"\n" + block + b"\n")
    if len(parts) == 1:
        return None, block
    rest = parts[:: lines.groups + 1]
    del parts[:: lines.groups + 1]
    numbers = array("d")
    try:
        numbers.frombytes(pa.array(parts, pa.string()).cast(pa.float64()).to_numpy().tobytes())
    except ValueError:  # a malformed number: leave the lines to the careful parsers
        return None, block
    if not layout.numbered:
        numbers = _with_no_step(numbers, lines.groups)
    return Steps(layout, numbers, like and like.rank, like.label if like else b""), b"".join(rest)[1:-1]


def _with_no_step(numbers: array[float], width: int) -> array[float]:
    found = array("d", bytes(8 * (len(numbers) // width) * (width + 2)))
    for column in range(width):
        found[column + 2 :: width + 2] = numbers[column::width]
    return found


class Lines:
    """The complete lines of a stream. Text after the last line feed was torn, or is still being written."""

    def __init__(self, stream: IO[bytes], block_bytes: int = BLOCK_BYTES) -> None:
        self._stream, self._block_bytes = stream, block_bytes
        self.bytes = 0
        self.torn = False  # the stream doesn't end with a line feed

    def blocks(self) -> Iterator[bytes]:
        """Blocks of one or more lines, without colours and without the last line feed."""
        rest, overlong = b"", False
        while read := self._stream.read(self._block_bytes):
            self.bytes += len(read)
            head, feed, tail = read.rpartition(b"\n")
            if feed:
                # an overlong line is replaced by an empty one
                yield without_colours(b"".join(head.partition(b"\n")[1:]) if overlong else rest + head)
                rest, overlong = tail, False
            elif not overlong:
                rest += tail
            if len(rest) > LONGEST_LINE:
                rest, overlong = b"", True
        self.torn = overlong or bool(rest)


def without_colours(text: bytes) -> bytes:
    """Remove the escape sequences of terminals."""
    return _COLOURS.sub(b"", text) if b"\x1b" in text else text
