"""What a broken rule reports, and arithmetic for the nearest legal values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from megaboa.check.facts import Facts


@dataclass(frozen=True)
class Broken:
    """A key whose value breaks a rule, the problem, and the nearest legal values."""

    key: str
    message: str
    nearest: tuple[object, ...] = ()
    level: Literal["error", "warning", "image"] = "error"


@dataclass(frozen=True)
class Finding:
    """A broken rule: the problem, and the rule's name and sentence."""

    rule: str
    sentence: str
    key: str
    message: str
    level: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message} [{self.rule}]"


Rule = Callable[[Facts], Broken | None]


def sentence(rule: Callable[..., Broken | None]) -> str:
    """A rule's docstring in one line: what must hold, and what refuses it otherwise."""
    return " ".join((rule.__doc__ or "").split())


def finding(rule: Callable[..., Broken | None], broken: Broken) -> Finding:
    values = " or ".join(str(value) for value in broken.nearest)
    message = f"{broken.message}; nearest: {values}" if values else broken.message
    return Finding(rule.__name__, sentence(rule), broken.key, message, broken.level)


def warning(key: str, message: str, nearest: Iterable[object] = ()) -> Broken:
    return Broken(key, message, tuple(nearest), "warning")


def multiples(value: int, unit: int) -> tuple[int, ...]:
    """The multiples of a unit below and above a value; at least one unit."""
    below = max(value // unit, 1) * unit
    return tuple(sorted({below, (value // unit + 1) * unit}))


def divisors(number: int, near: int, also: int = 0) -> tuple[int, ...]:
    """The divisors of a number (and of another) next to a value, below and above."""
    found = [d for d in range(1, max(number, 1) + 1) if number % d == 0 and also % d == 0]
    below, above = [d for d in found if d < near], [d for d in found if d > near]
    return tuple((below[-1:] or []) + above[:1])
