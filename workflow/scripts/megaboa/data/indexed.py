"""Megatron's indexed dataset: a .bin file of token ids and an .idx file that says where documents begin.

Written with numpy alone, because the tokenizing machine needs no torch; a test compares every byte with megatron-core's
own builder. Everything is processed in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaboa.files import flush
from megaboa.index_file import HEADER_BYTES, Header, read_header

# Megatron uses two bytes per token for smaller vocabularies.
TWO_BYTES_BELOW = 65500
PIECE = 1 << 20  # documents processed at once

Lengths = Callable[[], Iterator[NDArray]]


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that Megatron uses for token ids of this vocabulary."""
    return np.dtype(np.uint16 if vocab_size < TWO_BYTES_BELOW else np.int32)


def write_index(path: Path, dtype: np.dtype, lengths: Lengths) -> int:
    """Write an .idx for documents of these lengths and return their number. `lengths` yields pieces, and is called
    repeatedly."""
    documents = sum(len(piece) for piece in lengths())
    with path.open("wb") as stream:
        stream.write(Header(np.dtype(dtype).name, documents, documents + 1).pack())
        for piece in lengths():
            stream.write(piece.astype("<i4").tobytes())
        begin = 0
        for piece in lengths():
            ends = begin + np.cumsum(piece, dtype=np.int64) * np.dtype(dtype).itemsize
            stream.write(np.concatenate([[begin], ends[:-1]])[: len(piece)].astype("<i8").tobytes())
            begin = int(ends[-1]) if len(piece) else begin
        for first in range(0, documents + 1, PIECE):
            stream.write(np.arange(first, min(first + PIECE, documents + 1), dtype="<i8").tobytes())
        flush(stream)
    return documents


def in_pieces(values: NDArray, size: int = PIECE) -> Iterator[NDArray]:
    for begin in range(0, len(values), size):
        yield values[begin : begin + size]


def mapped(path: Path, dtype: np.dtype | str) -> NDArray:
    """A file's content, which stays on disk until it is accessed."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


@dataclass(frozen=True)
class Index:
    """An .idx file, mapped into memory."""

    dtype: np.dtype
    lengths: NDArray
    pointers: NDArray
    documents: NDArray

    @classmethod
    def open(cls, path: Path) -> Index:
        header = read_header(path)
        sequences, documents = header.sequences, header.boundaries
        if path.stat().st_size != header.size:
            raise ValueError(f"{path} has {path.stat().st_size} bytes instead of {header.size}")

        def array(kind: str, count: int, offset: int) -> NDArray:
            return np.memmap(path, kind, "r", offset, count) if count else np.empty(0, kind)

        return cls(
            np.dtype(header.dtype),
            array("<i4", sequences, HEADER_BYTES),
            array("<i8", sequences, HEADER_BYTES + sequences * 4),
            array("<i8", documents, HEADER_BYTES + sequences * 12),
        )

    def wrong_pointers(self, shortest: int = 1) -> list[str]:
        """Contradictions between pointers and lengths, or documents that are too short."""
        found, expected = [], 0
        for begin in range(0, len(self.lengths), PIECE):
            lengths, pointers = self.lengths[begin : begin + PIECE], self.pointers[begin : begin + PIECE]
            ends = expected + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            wrong = np.flatnonzero(pointers != np.concatenate([[expected], ends[:-1]]))
            if len(wrong):
                found.append(f"the pointer of document {begin + wrong[0]} is wrong")
                break
            if (short := lengths < shortest).any():
                found.append(f"document {begin + int(np.argmax(short))} has no tokens")
            expected = int(ends[-1])
        return found

    def problems(self) -> list[str]:
        """All problems of an index that was written here."""
        found = self.wrong_pointers()
        wrong_list = len(self.documents) != len(self.lengths) + 1
        for begin in range(0, len(self.documents), PIECE):
            piece = self.documents[begin : begin + PIECE]
            wrong_list |= bool((piece != np.arange(begin, begin + len(piece))).any())
        return [*found, "its list of documents is not that of one sequence per document"] if wrong_list else found

    @property
    def bytes(self) -> int:
        """The expected size of the .bin."""
        return int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if len(self.lengths) else 0

    def tokens(self, data: NDArray, document: int) -> NDArray:
        begin = int(self.pointers[document]) // self.dtype.itemsize
        return data[begin : begin + int(self.lengths[document])]
