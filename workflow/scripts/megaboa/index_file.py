"""The header of an .idx file, as Megatron-Core writes it: version, token type, and counts. Then come a length (32 bits)
and a pointer into the .bin (64 bits) of each sequence, and the number of each document's first sequence (64 bits).
Standard library only."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

AGAIN = "copy both files again, or write them again"
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}  # Megatron's DType, without floats
BYTES = {"uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2}
_LAYOUT = struct.Struct("<9sQBQQ")
HEADER_BYTES = _LAYOUT.size


@dataclass(frozen=True)
class Header:
    dtype: str
    sequences: int
    boundaries: int  # number of documents, plus one

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return HEADER_BYTES + self.sequences * 12 + self.boundaries * 8

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


def mismatch(prefix: str) -> str | None:
    """What the sizes of a pair of .bin and .idx say against it. Only the ends of the .idx's lists are read."""
    path = Path(f"{prefix}.idx")
    header = read_header(path)
    if (size := path.stat().st_size) != header.size:
        return f"{path} has {size:,} bytes instead of {header.size:,}: {AGAIN}"
    if not header.sequences:
        return None
    with path.open("rb") as stream:
        stream.seek(HEADER_BYTES + (header.sequences - 1) * 4)
        [length] = struct.unpack("<i", stream.read(4))
        stream.seek(HEADER_BYTES + header.sequences * 12 - 8)
        [pointer] = struct.unpack("<q", stream.read(8))
    return other_data(prefix, pointer + length * BYTES[header.dtype])


def other_data(prefix: str, expected: int) -> str | None:
    """What is wrong with a .bin that hasn't as many bytes as its .idx says."""
    size = Path(f"{prefix}.bin").stat().st_size
    return (
        None
        if size == expected
        else f"{prefix}.bin has {size:,} bytes, and {prefix}.idx is the index of {expected:,}: {AGAIN}"
    )
