"""A log's events, in order. Most lines are looked at no closer than for a few words."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import pyarrow as pa

from megaboa.observe.logs import megatron, others
from megaboa.observe.logs.events import Event, LineFormat, Note, Steps
from megaboa.observe.logs.lines import Lines

# Words that a line must have to say anything, and what reads such lines; the first that understands one is taken.
STEP, SPEED, START = b"iteration", b"Step Time", b"raining "
Readers = Sequence[tuple[bytes, tuple[Callable[[bytes], Event | None], ...]]]
RARE: Readers = (
    (START, (megatron.read_start,)),
    (b"step", (others.read_torchtitan, others.read_progress_bar)),
    (b"param", (megatron.read_parameters, others.read_torchtitan_size)),
    (b"MxRtt/Rnk", (megatron.read_stragglers,)),
    (b"seq", (others.read_torchtitan_settings, megatron.read_setting)),
)
READERS = ((STEP, (megatron.read_iteration,)), (SPEED, (megatron.read_speed,)), *RARE)


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
    """What the whole lines of a log say; `count` is kept up to date."""
    return LogReader(stream, count or Count()).events()


class LogReader:
    def __init__(self, stream: IO[bytes], count: Count) -> None:
        self._lines, self._count = Lines(stream), count
        self._usual: Steps | None = None  # the step line before: most are like it

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
        """Most lines are noise, and most others are steps: both are dealt with many at a time.

        Where a start stands among them, all must come in their order.
        """
        if START in block:
            yield from self._read_lines(block, READERS)
            return
        rest = block
        if STEP in block:
            lines, rest = _with(STEP, block)
            if usual := self._usual:
                steps, lines_left = _take(lines, megatron.lines_of(usual.layout, usual.label), usual.layout, usual)
                if steps and not megatron.HEADER.search(lines_left):
                    yield steps
                    lines = lines_left
            yield from self._read_lines(lines, READERS)
        if SPEED in rest:
            lines, rest = _with(SPEED, rest)
            speeds, lines = _take(lines, megatron.SPEED_LINES, megatron.SPEED)
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
    """The lines that have a word, and all others."""
    sample = block[: len(block) // 16]
    if sample.count(word) > 2 * sample.count(b"\n"):  # four times in a step line: most are, and the rest isn't worth it
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
    """The lines of a layout out of a block, and what is left of it."""
    parts = lines.split(b"\n" + block + b"\n")
    if len(parts) == 1:
        return None, block
    rest = parts[:: lines.groups + 1]
    del parts[:: lines.groups + 1]
    numbers = array("d")
    try:
        numbers.frombytes(pa.array(parts, pa.string()).cast(pa.float64()).to_numpy().tobytes())
    except ValueError:  # something that looks like a number: line by line, with more care
        return None, block
    if not layout.numbered:
        numbers = _with_no_step(numbers, lines.groups)
    return Steps(layout, numbers, like and like.rank, like.label if like else b""), b"".join(rest)[1:-1]


def _with_no_step(numbers: array[float], width: int) -> array[float]:
    found = array("d", bytes(8 * (len(numbers) // width) * (width + 2)))
    for column in range(width):
        found[column + 2 :: width + 2] = numbers[column::width]
    return found
