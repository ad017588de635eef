"""A log as blocks of whole lines, in memory that does not grow with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO

BLOCK_BYTES = 1 << 20
# A line longer than this is no line of a log: what is left of it is not kept.
LONGEST_LINE = 1 << 20

_COLOURS = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\n]*\x07|[()][A-Z0-9]|[c=>])")


class Lines:
    """The whole lines of a stream. What comes after the last line feed was torn, or is still being written."""

    def __init__(self, stream: IO[bytes], block_bytes: int = BLOCK_BYTES) -> None:
        self._stream, self._block_bytes = stream, block_bytes
        self.bytes = 0
        self.torn = False  # it does not end with a line feed

    def blocks(self) -> Iterator[bytes]:
        """One or more lines each, without colours; the last line feed is left out."""
        rest, overlong = b"", False
        while read := self._stream.read(self._block_bytes):
            self.bytes += len(read)
            head, feed, tail = read.rpartition(b"\n")
            if feed:
                # Of an overlong line nothing is believed: it is an empty one.
                yield without_colours(b"".join(head.partition(b"\n")[1:]) if overlong else rest + head)
                rest, overlong = tail, False
            elif not overlong:
                rest += tail
            if len(rest) > LONGEST_LINE:
                rest, overlong = b"", True
        self.torn = overlong or bool(rest)


def without_colours(text: bytes) -> bytes:
    """Without the escape sequences by which terminals are told colours."""
    return _COLOURS.sub(b"", text) if b"\x1b" in text else text
