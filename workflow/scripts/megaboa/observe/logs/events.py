"""What a log says, piece by piece."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megaboa.observe.logs.names import known


@dataclass(frozen=True)
class LineFormat:
    """The fields that the step lines of a dialect have, in their order, as they are printed."""

    dialect: str
    names: tuple[str, ...]
    zero_based: bool = False  # the first step is called 0
    numbered: bool = True  # the line says which step it is about

    @property
    def width(self) -> int:
        return len(self.names) + 2

    def known(self) -> list[tuple[str, float]]:
        """Our names, and what the numbers are to be multiplied with."""
        found: dict[str, float] = {}
        for printed in self.names:
            name, scale = known(printed)
            found |= {printed: 1.0} if name in found else {name: scale}
        return list(found.items())


@dataclass(frozen=True)
class Steps:
    """One or more lines of one layout. Each is about a step, or about all steps since the line before it.

    `numbers`: for each line the step as printed, the step at which training ends (0: not said), then the fields.
    """

    layout: LineFormat
    numbers: array[float]
    rank: str | None = None
    label: bytes = b""  # by which the lines say which rank they are of

    @property
    def count(self) -> int:
        return len(self.numbers) // self.layout.width

    def rows(self) -> Iterator[tuple[int, dict[str, float]]]:
        """How many steps are done, and the fields by our names and in our units, where the quantity is known."""
        width, names = self.layout.width, self.layout.known()
        for begin in range(0, len(self.numbers), width):
            step, _, *numbers = self.numbers[begin : begin + width]
            fields = {name: number * scale for (name, scale), number in zip(names, numbers, strict=True)}
            yield int(step) + self.layout.zero_based, fields


@dataclass(frozen=True, slots=True)
class Note:
    """Anything else: `kind` is start, validation, memory, parameters, setting, saved or torn."""

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    rank: str | None = None


Event = Steps | Note
