"""The part of a corpus that each shard reads. For any number of shards, their parts together are the corpus, in order.

A plain file of lines or a table is cut at the shards' borders; a record belongs to the part in which it begins. A
compressed file or a stream can only be read from the beginning, so if it is large, shards take turns, with BLOCK
records each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megaboa.records import SourceFile

BLOCK = 1000  # records


@dataclass(frozen=True)
class Part:
    """The section [begin, end) of file number `file`; if the file can't be cut, every n-th block."""

    file: int
    begin: int
    end: int
    turn: int = 0
    turns: int = 1


def divide(files: Sequence[SourceFile], shards: int, separator: str | None) -> list[list[Part]]:
    """The parts of every shard, of approximately equal size in bytes."""
    total = sum(file.size for file in files)
    borders = [total * shard // shards for shard in range(shards + 1)]
    parts: list[list[Part]] = [[] for _ in range(shards)]
    start = 0
    for number, file in enumerate(files):
        end = start + file.size
        touched = [shard for shard in range(shards) if borders[shard] < end and start < borders[shard + 1]]
        if not touched:  # an empty file
            continue
        if can_be_cut(file, separator):
            for shard in touched:
                begins, ends = max(borders[shard], start) - start, min(borders[shard + 1], end) - start
                parts[shard].append(Part(number, begins, ends))
        elif file.size * shards <= total or not has_records(file, separator):
            parts[touched[0]].append(Part(number, 0, file.size))
        else:
            for turn, shard in enumerate(touched):
                parts[shard].append(Part(number, 0, file.size, turn, len(touched)))
        start = end
    return parts


def has_records(file: SourceFile, separator: str | None) -> bool:
    """Whether the file holds more than one document."""
    return file.kind not in ("text", "source") or (file.kind == "text" and separator is not None)


def can_be_cut(file: SourceFile, separator: str | None) -> bool:
    if file.packed or file.kind in ("stream", "source"):
        return False
    if file.kind == "text":
        return separator is not None and not overlaps_itself(separator)
    return True


def overlaps_itself(separator: str) -> bool:
    """Whether the place where a search starts affects the splits, as in `a\\n\\n\\nb`, cut at two line feeds."""
    return any(separator.startswith(separator[begin:]) for begin in range(1, len(separator)))
