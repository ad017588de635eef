"""Megatron's indexed dataset: a .bin file of token ids and an .idx file that says where documents begin.

Written here with numpy alone, because the machine that tokenizes needs no torch; a test holds every byte
against megatron-core's own builder.
"""

from __future__ import annotations

import array
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
CODES = {np.dtype(np.int32): 4, np.dtype(np.uint16): 8}
# Megatron takes two bytes per token for vocabularies smaller than this.
TWO_BYTES_BELOW = 65500


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that Megatron uses for token ids of this vocabulary."""
    return np.dtype(np.uint16 if vocab_size < TWO_BYTES_BELOW else np.int32)


class IndexedWriter:
    """Append documents to `<prefix>.bin`; `close` writes `<prefix>.idx`. Memory: four bytes per document."""

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        self.documents = 0
        self.tokens = 0
        self._lengths = array.array("i")
        self._stream = self.prefix.with_name(self.prefix.name + ".bin").open("wb")

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self._stream.close()
        if failure is None:
            self._write_index()

    def add(self, ids: list[int] | NDArray) -> None:
        """One document."""
        tokens = np.asarray(ids, dtype=np.int64)
        bounds = np.iinfo(self.dtype)
        if tokens.size and (tokens.min() < 0 or tokens.max() > bounds.max):
            raise ValueError(f"token id {tokens.max()} does not fit {self.dtype}")
        self._stream.write(tokens.astype(self.dtype.newbyteorder("<")).tobytes())
        self._lengths.append(tokens.size)
        self.documents += 1
        self.tokens += tokens.size

    def _write_index(self) -> None:
        lengths = np.array(self._lengths, dtype="<i4")
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1].astype("<i8") * self.dtype.itemsize, out=pointers[1:])
        with self.prefix.with_name(self.prefix.name + ".idx").open("wb") as stream:
            stream.write(MAGIC + struct.pack("<QBQQ", VERSION, CODES[self.dtype], len(lengths), len(lengths) + 1))
            stream.write(lengths.tobytes())
            stream.write(pointers.tobytes())
            stream.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
