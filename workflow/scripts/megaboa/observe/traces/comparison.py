"""Compares two profiles: changes by kind of time, class of kernels and phase, and what they cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from megaboa.formats import counted
from megaboa.observe.traces.conclusions import gain, milliseconds
from megaboa.records import Analysis, Change, Comparison

KINDS = ("compute", "exposed", "copies_exposed", "idle", "starved")
NOTICEABLE = 0.01  # share of a step
MOST_LINES = 10


def compare(before: Analysis, after: Analysis) -> Comparison:
    """Compare means per step over the ranks that both profiles have. A positive `delta` is slower."""
    ranks = sorted({row.rank for row in before.ranks} & {row.rank for row in after.ranks})
    found = Comparison(ranks=tuple(ranks), mismatches=tuple(mismatches(before, after)))
    if not ranks:
        return replace(found, summary=("The two profiles have no rank in common.",))
    sides = [_Side(document, ranks) for document in (before, after)]
    step = _row("step", "wall", sides[0].wall, sides[1].wall, sides[1].wall)
    rows = []
    for kind, tables in (("time", [s.budget for s in sides]), ("class", [s.classes for s in sides])):
        rows += _rows(kind, *tables, sides[1].wall)
    rows += _rows("phase", *[side.phases for side in sides], sides[1].wall)
    n, windows = (sides[0].n, sides[1].n), (sides[0].window, sides[1].window)
    found = replace(found, step=step, rows=tuple(rows), n=n, windows=windows)
    return replace(found, summary=tuple(_summary(found)))


def mismatches(before: Analysis, after: Analysis) -> list[str]:
    """Differences that make two profiles hard to compare."""
    said = []
    for name, of in (("ranks", "rank"), ("devices", "device_name"), ("world sizes", "world_size"), ("tools", "kind")):
        sides = [sorted({str(getattr(capture, of)) for capture in document.captures}) for document in (before, after)]
        if sides[0] != sides[1]:
            said.append(f"{name} differ: {', '.join(sides[0]) or 'none'} before, {', '.join(sides[1]) or 'none'} after")
    return said


class _Side:
    """One profile's means over ranks, per step."""

    def __init__(self, document: Analysis, ranks: list[int | None]) -> None:
        rows = [row for row in document.budget if row.rank in ranks]
        details = [document.details[str(rank)] for rank in ranks]
        chosen = [row for row in document.ranks if row.rank in ranks]
        self.n = len(rows)
        self.window = ", ".join(row.window for row in chosen[:3]) + (", ..." if len(chosen) > 3 else "")
        self.wall = float(np.mean([row.wall for row in rows]))
        self.budget = {kind: _mean(getattr(row, kind) for row in rows) for kind in KINDS}
        self.classes = _means([[(row.name, row.ms) for row in one.classes] for one in details])
        self.phases = _means([[(row.phase, row.device_ms) for row in one.phases] for one in details])


def _means(tables: list[list[tuple[str, float]]]) -> dict[str, float | None]:
    """Means over ranks of the sum for each name."""
    names = dict.fromkeys(name for table in tables for name, _ in table)
    sums = {name: [sum(ms for other, ms in table if other == name) for table in tables] for name in names}
    return {name: float(np.mean(values)) for name, values in sums.items()}


def _mean(values: Iterable[float | None]) -> float | None:
    values = list(values)
    return None if None in values else float(np.mean(values))


def _rows(of: str, before: dict, after: dict, wall: float) -> list[Change]:
    names = [*before, *(name for name in after if name not in before)]
    absent = None if of == "time" else 0.0  # a class that doesn't occur took no time; an unknown kind isn't 0
    pairs = [(name, before.get(name, absent), after.get(name, absent)) for name in names]
    rows = [_row(of, name, old, new, wall) for name, old, new in pairs if old is not None and new is not None]
    return sorted(rows, key=lambda row: -row.delta)


def _row(of: str, name: str, before: float, after: float, wall: float) -> Change:
    """One change, in milliseconds per step. The ceiling is the most that returning to `before` would gain."""
    delta = after - before
    ceiling = gain(wall, delta) if 0 < delta < wall else 0.0
    return Change(of=of, name=name, before=before, after=after, delta=delta, gain_ceiling=ceiling)


def _summary(found: Comparison) -> list[str]:
    step, (old, new) = found.step, found.n
    change = step.after / step.before - 1
    word = "slower" if change > 0 else "faster"
    lines = [
        f"A step takes {milliseconds(step.after)} instead of {milliseconds(step.before)}: "
        f"{abs(change):.1%} {word} (n = {new} against {old} steps of {counted(len(found.ranks), 'rank')})."
    ]
    lines += [f"Compare with care: {text}." for text in found.mismatches]
    changed = [row for row in found.rows if abs(row.delta) >= NOTICEABLE * step.after]
    for row in sorted(changed, key=lambda row: -abs(row.delta)):
        ceiling = f"; removing it: at most +{row.gain_ceiling:.1%}" if row.delta > 0 else ""
        lines.append(
            f"{row.of} {row.name}: {milliseconds(row.before)} to {milliseconds(row.after)} "
            f"({milliseconds(row.delta, sign=True)} a step{ceiling})."
        )
    return lines[:MOST_LINES]
