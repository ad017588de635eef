"""Access to foreign SQLite files: opened read-only, and inspected before anything is read."""

from __future__ import annotations

import itertools
import sqlite3
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 50_000
HEAD = b"SQLite format 3\0"


class Database:
    """An exported file, and its tables with their columns."""

    def __init__(self, path: Path) -> None:
        # immutable: without locks and journals
        uri = f"file:{urllib.parse.quote(str(path.absolute()))}?mode=ro&immutable=1"
        self._connection = sqlite3.connect(uri, uri=True)
        names = self._connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
        self.tables = {name: self._columns(name) for (name,) in names}

    def _columns(self, table: str) -> set[str]:
        return {row[1] for row in self._connection.execute(f'PRAGMA table_info("{table}")')}

    def lacks(self, table: str, *columns: str) -> list[str]:
        return [column for column in columns if column not in self.tables.get(table, ())]

    def rows(self, query: str) -> list[tuple]:
        return self._connection.execute(query).fetchall()

    def columns(self, query: str, kinds: Sequence[type]) -> list[np.ndarray]:
        """The integer columns of a query, each as an array of the given type."""
        width = len(kinds)
        blocks: list[list[np.ndarray]] = [[np.empty(0, dtype=kind)] for kind in kinds]
        cursor = self._connection.execute(query)
        while rows := cursor.fetchmany(BLOCK):
            flat = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64, count=width * len(rows))
            for number, kind in enumerate(kinds):
                blocks[number].append(flat[number::width].astype(kind))
        found = []
        for number in range(width):  # one by one, so that a column's blocks are freed before the next is joined
            found.append(np.concatenate(blocks[number]))
            blocks[number] = []
        return found

    def integers(self, query: str, width: int) -> np.ndarray:
        """The integer columns of a query as one array."""
        return np.column_stack(self.columns(query, [np.int64] * width))

    def close(self) -> None:
        self._connection.close()

    def each(self, query: str) -> Iterator[tuple]:
        yield from self._connection.execute(query)

    def pairs(self, table: str, key: str = "name", value: str = "value") -> dict[Any, Any]:
        """A table with two columns as a dictionary; empty if there is no such table."""
        return {} if self.lacks(table, key, value) else dict(self.rows(f"SELECT {key}, {value} FROM {table}"))


def torn(path: Path) -> str | None:
    """Detect a truncated file by its first 100 bytes. SQLite itself notices only when it reaches the missing part."""
    with path.open("rb") as stream:
        head = stream.read(100)
    if not head.startswith(HEAD) or len(head) < 100:
        return "it is not an SQLite file, or only the first bytes of one"
    page, pages = int.from_bytes(head[16:18], "big"), int.from_bytes(head[28:32], "big")
    wanted, size = (65536 if page == 1 else page) * pages, path.stat().st_size
    return f"truncated: {size:,} of {wanted:,} bytes are there" if size < wanted else None
