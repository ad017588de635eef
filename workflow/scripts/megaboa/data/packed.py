"""Compressed files, read to their true end: one that was cut short is never taken for a complete one."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from megaboa.errors import InputError

CHUNK = 1 << 20


class TruncatedError(Exception):
    """A compressed file ends before its end."""


@contextlib.contextmanager
def unpacked(path: str, packed: str | None) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """The content of a file that may be a .gz or .zst, and a function that says how many of its bytes were read."""
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
                    f"{path}: the compressed file is damaged or cut short ({error}); copy it again"
                ) from error


class _Zstd(io.RawIOBase):
    """zstandard's own reader takes a file that is cut short for a complete one."""

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
