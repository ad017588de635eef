"""Reads files that may be compressed. A truncated one is never accepted as complete."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from megaboa.errors import InputError

BUFFER = 1 << 20
PIECE = 1 << 11  # bytes of a .zst file that are inflated at a time: at most to 64 MiB, as 4 bytes may stand for 128 KiB


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
        with io.BufferedReader(inner, BUFFER) as stream:
            try:
                yield stream, raw.tell
            except (EOFError, zlib.error, gzip.BadGzipFile, TruncatedError) as error:
                raise InputError(
                    f"{path}: the compressed file is damaged or truncated ({error}); copy it again"
                ) from error


class _Zstd(io.RawIOBase):
    """A reader that inflates little at a time, and detects truncated files: zstandard's takes them for complete."""

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self._new = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._error = zstandard.ZstdError
        self._raw, self._frame, self._ready = raw, None, memoryview(b"")
        self._read = memoryview(b"")  # of the file, not inflated yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._read = self._read or memoryview(self._raw.read(1 << 17))
            if not self._read:
                if self._frame is not None:
                    raise TruncatedError("its last frame has no end")
                return 0
            self._frame = self._frame or self._new()
            piece = self._read[:PIECE]
            try:
                self._ready = memoryview(self._frame.decompress(piece))
            except self._error as error:
                raise TruncatedError(str(error)) from error
            self._read = self._read[len(piece) - len(self._frame.unused_data) :]
            if self._frame.eof:
                self._frame = None
        taken = self._ready[: len(buffer)]
        self._ready = self._ready[len(taken) :]
        buffer[: len(taken)] = taken
        return len(taken)
