"""The header of an .idx file, as Megatron-Core writes it: version, token type, and counts. Standard library only."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}  # Megatron's DType, without floats
_LAYOUT = struct.Struct("<9sQBQQ")
HEADER_BYTES = _LAYOUT.size


@dataclass(frozen=True)
class Header:
    dtype: str
    sequences: int
    boundaries: int  # number of documents, plus one

    def pack(self) -> bytes:
        return _LAYOUT.pack(MAGIC, VERSION, CODES[self.dtype], self.sequences, self.boundaries)


def read_header(path: str | Path) -> Header:
    """The header of an .idx file; raises ValueError with a sentence if it has none."""
    with Path(path).open("rb") as stream:
        head = stream.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES or not head.startswith(MAGIC):
        raise ValueError(f"{path} is not a Megatron index")
    _, version, code, sequences, boundaries = _LAYOUT.unpack(head)
    kinds = {code: dtype for dtype, code in CODES.items()}
    if version != VERSION or code not in kinds:
        raise ValueError(f"{path}: unknown version {version} or type {code} of tokens")
    return Header(kinds[code], sequences, boundaries)
