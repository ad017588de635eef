"""Sizes of messages, which NCCL attaches to its NVTX ranges: as JSON in older exports, as bytes in newer ones."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megaboa.observe.traces.events import UNKNOWN, Events
from megaboa.observe.traces.launches import launch_rows
from megaboa.observe.traces.sqlite_file import Database

FIELD = "Message size [bytes]"
_IN_JSON = re.compile(r'"message size[^"]*"\s*:\s*"?(\d+)', re.IGNORECASE)
# Before the payload: domain, flags, schema, flags, size of the payload, size of all. So nsys-ai 0.3 reads exports of
# 2026.2; what doesn't fit its schema gives no number.
_HEAD = struct.Struct("<IIIIQQ")
_SIZE = struct.Struct("<Q")


def message_sizes(database: Database) -> Callable[[str | None, bytes | str | None], int]:
    """A function of a range's two kinds of payload; -1 where neither names a size."""
    schemas = _schemas(database)

    def size(text: str | None, binary: bytes | str | None) -> int:
        if text and (found := _IN_JSON.search(text)):
            return int(found.group(1))
        return _in_bytes(binary, schemas) if binary and schemas else UNKNOWN

    return size


def _schemas(database: Database) -> dict[int, tuple[int, int]]:
    """By schema the offset of the size, and how long the payload is."""
    if database.lacks("NVTX_PAYLOAD_SCHEMAS", "schemaId", "payloadSize") or database.lacks(
        "NVTX_PAYLOAD_SCHEMA_ENTRIES", "schemaId", "name", "offset"
    ):
        return {}
    lengths = dict(database.rows("SELECT schemaId, payloadSize FROM NVTX_PAYLOAD_SCHEMAS"))
    entries = database.rows(f"SELECT schemaId, offset FROM NVTX_PAYLOAD_SCHEMA_ENTRIES WHERE name = '{FIELD}'")
    return {schema: (offset or 0, lengths[schema]) for schema, offset in entries if lengths.get(schema)}


def _in_bytes(binary: bytes | str, schemas: dict[int, tuple[int, int]]) -> int:
    content = binary.encode("latin-1", "replace") if isinstance(binary, str) else binary
    if len(content) < _HEAD.size:
        return UNKNOWN
    _, _, schema, _, length, total = _HEAD.unpack_from(content)
    offset, expected = schemas.get(schema, (0, None))
    if length != expected or total != len(content) or _HEAD.size + offset + _SIZE.size > total:
        return UNKNOWN
    return _SIZE.unpack_from(content, _HEAD.size + offset)[0]


def with_sizes(kernels: Events, calls: Events, ranges: Events, sizes: np.ndarray) -> Events:
    """Give a kernel the bytes of the NVTX range in which it was launched, where that range names some."""
    size = kernels.sizes
    launches = launch_rows(kernels, calls)
    for thread in np.unique(ranges.place[sizes != UNKNOWN]):
        rows = np.flatnonzero((sizes != UNKNOWN) & (ranges.place == thread))
        launched = np.flatnonzero((launches != UNKNOWN) & (calls.place[launches] == thread))
        times = calls.start[launches[launched]]
        index = np.searchsorted(ranges.start[rows], times, side="right") - 1
        inside = (index >= 0) & (times < ranges.end[rows[index]])
        size[launched[inside]] = sizes[rows[index[inside]]]
    return replace(kernels, size=size)
