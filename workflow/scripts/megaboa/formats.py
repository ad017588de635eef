"""Numbers as people read them, counts and sizes, and tables of them. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TextIO

UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_SIZES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
# Characters that control terminals, or turn the direction of text; not line breaks and tabs.
_CONTROLS = {
    code: ascii(chr(code))[1:-1]
    for code in (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(code) not in "\n\t"
}
_ROUNDED = 0.9995  # what would be rounded up to the unit is shown in it


def count(number: float | None) -> str:
    """Three significant digits: `950`, `774M`, `1.5B`, `2.1e+21`."""
    if number is None:
        return "-"
    if number < 1e15 * _ROUNDED:
        for unit, letter in UNITS:
            if number >= unit * _ROUNDED:
                return f"{number / unit:.3g}{letter}"
    return f"{number:.3g}"


def counted(number: int, noun: str) -> str:
    """`1 run`, `12,000 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def text(value: object) -> str:
    """A value as in plan.tsv and in a YAML file; whole numbers without a decimal point."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.10g}"
    return str(value)


class Printable:
    """A text stream that shows control characters (`\\x1b`) instead of writing them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, said: str) -> int:
        return self._stream.write(said.translate(_CONTROLS))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def some_of(names: Sequence[str], most: int = 3, mark: str = ", ") -> str:
    """`a, b, c and 4 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return mark.join(names[:most]) + more


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def written(number: float) -> float | str:
    """A number, or the word for one that isn't finite: in tables an empty cell is a missing one."""
    return number if math.isfinite(number) else str(number).replace("nan", "NaN")


def size(number: float) -> str:
    """Bytes, in three significant digits: `950 B`, `12.3 MB`, `4.56 TB`."""
    for unit, word in _SIZES:
        if number >= unit * _ROUNDED:
            return f"{number / unit:.3g} {word}"
    return f"{number:.0f} B"


def aligned(rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """The lines of a table whose first row has the columns' names; `right`: the columns that end at the same place."""
    columns = []
    for column in zip_longest(*rows, fillvalue=""):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if column[0] in right else cell.ljust(width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
