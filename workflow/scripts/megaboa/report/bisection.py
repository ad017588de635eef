"""Bisects a list whose first entry is good and whose last is bad: chooses the next one to try, and judges results."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megaboa.records import Checks

# `untold`: only more runs would decide; `broken`: its runs did not finish.
Mark = Literal["good", "bad", "untold", "broken"]


@dataclass(frozen=True)
class Suspects:
    """Positions in the list: the last good one, the first bad one, and those between."""

    good: int
    bad: int
    rest: tuple[int, ...]  # between them, neither good nor bad

    @property
    def is_one(self) -> bool:
        return not self.rest


def suspects(marks: Mapping[int, Mark]) -> Suspects:
    bad = min(number for number, mark in marks.items() if mark == "bad")
    good = max(number for number, mark in marks.items() if mark == "good" and number < bad)
    return Suspects(good, bad, tuple(range(good + 1, bad)))


def next_to_try(marks: Mapping[int, Mark]) -> int | None:
    """The untried position nearest to the middle; None if none is left."""
    found = suspects(marks)
    untried = [number for number in found.rest if number not in marks]
    return min(untried, key=lambda number: abs(2 * number - found.good - found.bad), default=None)


def failing(checks: Checks) -> list[str]:
    """The quantities that are worse than the baseline."""
    return sorted({str(check.more["quantity"]) for check in _of_baseline(checks) if check.state == "FAIL"})


def mark_of(checks: Checks, quantities: Collection[str]) -> Mark:
    """The mark of one entry, by the quantities in which the last one fails."""
    states = [check.state for check in _of_baseline(checks) if check.more["quantity"] in quantities]
    if "FAIL" in states:
        return "bad"
    return "good" if states and set(states) == {"PASS"} else "untold"


def reasons(checks: Checks, quantities: Collection[str] = ()) -> Sequence[str]:
    kept = [check for check in _of_baseline(checks) if not quantities or check.more["quantity"] in quantities]
    return [f"{check.name}: {check.detail}" for check in kept if check.state != "PASS"]


def _of_baseline(checks: Checks) -> list:
    return [check for check in checks.checks if check.kind == "baseline"]
