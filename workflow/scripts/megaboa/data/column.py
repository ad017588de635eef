"""The documents of one text key of a shard, as files: token ids (.bin), and by document its length (.lengths), where
its record was (.origins) and, to find duplicates, a hash of its text (.hashes).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaboa.data.encoder import Tokens
from megaboa.data.indexed import in_pieces
from megaboa.data.largefile import LargeFile
from megaboa.files import flush

LENGTH, ORIGIN = np.dtype("<i4"), np.dtype("<i8")
HASH_BYTES = 16
LENGTH_BINS = 32  # powers of two
COUNTED = 1 << 17  # tokens at once, which stay in the processor's cache

Facts = dict[str, Any]


@dataclass
class Column:
    """The documents of one text key of a shard, as they are written."""

    path: Path  # without an ending
    dtype: np.dtype
    hashed: bool
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: int = 0  # documents that the tokenizer makes nothing of
    dropped: Counter = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tokens = LargeFile(Path(f"{self.path}.bin"))
        endings = ["lengths", "origins", *(["hashes"] if self.hashed else [])]
        self._files = {
            ending: Path(f"{self.path}.{ending}").open("wb")  # noqa: SIM115
            for ending in endings
        }
        self._counts = np.zeros(0, dtype=np.int64)
        self._histogram = np.zeros(LENGTH_BINS, dtype=np.int64)

    def write(self, tokens: Tokens) -> None:
        """The tokens of the texts that wait."""
        self._count(tokens)
        self._tokens.write(tokens.ids.astype(self.dtype.newbyteorder("<"), copy=False).data)
        self._files["lengths"].write(tokens.lengths.astype("<i4").tobytes())
        self._files["origins"].write(np.array(self.origins, dtype="<i8").tobytes())
        if self.hashed:
            hashes = (hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).digest() for text in self.texts)
            self._files["hashes"].write(b"".join(hashes))
        self.documents += len(self.texts)
        # The encoder has left the UTF-8 of every text with it: asked for now, it is not made again.
        self.text_bytes += sum(len(text) if text.isascii() else len(text.encode()) for text in self.texts)
        self.tokens += len(tokens.ids)
        self.empty += int(np.count_nonzero(tokens.lengths == 0))
        self.texts, self.origins = [], []

    def _count(self, tokens: Tokens) -> None:
        for piece in in_pieces(tokens.ids, COUNTED):
            counts = np.bincount(piece, minlength=len(self._counts))
            counts[: len(self._counts)] += self._counts
            self._counts = counts
        if (largest := len(self._counts) - 1) > np.iinfo(self.dtype).max:
            raise ValueError(f"token id {largest} does not fit {self.dtype}")
        self._histogram += length_histogram(tokens.lengths)

    def close(self) -> None:
        self._tokens.close()
        for stream in self._files.values():
            flush(stream)
            stream.close()

    def facts(self) -> Facts:
        with Path(f"{self.path}.counts.npy").open("wb") as stream:
            np.save(stream, self._counts)
            flush(stream)
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "empty": self.empty,
            "dropped": dict(self.dropped),
            "lengths": self._histogram.tolist(),
        }


def length_histogram(lengths: NDArray) -> NDArray:
    """Documents by the power of two below their length: of 1 token, 2 or 3, 4 to 7, ..."""
    bins = np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    return np.bincount(np.minimum(bins, LENGTH_BINS - 1), minlength=LENGTH_BINS)
