"""Writes a large file in pieces, while earlier pieces are flushed and hashed in the background."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megaboa.files import flush

SENT_BYTES = 64 << 20  # size of pieces that are flushed at once
HASHED_BYTES = 1 << 16  # smaller pieces aren't worth a thread


class LargeFile:
    """A file that is on disk after `close`. If the block ends with an exception, the file is left as it is."""

    def __init__(self, path: Path, hashed: bool = False) -> None:
        self._stream = path.open("wb")
        self._disk, self._hasher = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._sent: Future | None = None
        self._added: Future | None = None
        self._hash = hashlib.sha256() if hashed else None
        self._waiting = 0  # bytes

    def __enter__(self) -> LargeFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end()

    def write(self, piece: bytes | memoryview) -> None:
        """Write a piece, which must not be modified afterwards."""
        size = memoryview(piece).nbytes
        if self._hash:
            self._add(piece, size)
        self._stream.write(piece)
        self._waiting += size
        if self._waiting >= SENT_BYTES:
            self._send()

    def close(self) -> None:
        try:
            _result(self._sent)
            flush(self._stream)
            _result(self._added)
        finally:
            self._end()

    def sha256(self) -> str:
        """Checksum of everything written, available after `close`."""
        return self._hash.hexdigest()

    def _add(self, piece: bytes | memoryview, size: int) -> None:
        _result(self._added)  # so that at most two pieces are held
        self._added = None
        if size < HASHED_BYTES:
            self._hash.update(piece)
        else:
            self._added = self._hasher.submit(self._hash.update, piece)

    def _send(self) -> None:
        if self._sent and not self._sent.done():
            return
        _result(self._sent)  # the system reports a write error only once
        self._stream.flush()
        self._sent, self._waiting = self._disk.submit(os.fdatasync, self._stream.fileno()), 0

    def _end(self) -> None:
        self._disk.shutdown()
        self._hasher.shutdown()
        self._stream.close()


def _result(future: Future | None) -> None:
    """Wait for a background task, and raise its error."""
    if future:
        future.result()
