"""The law that best fits measured points: no negative coefficients, and least squares of relative errors, in which a
factor of two counts the same in both directions. Standard library only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import product

from megaboa.records import Law, Point

Solution = dict[int, float]  # by column: latency, work, values, groups
COLUMNS = 4
ROUNDS = 4
FASTER = 2.0  # a law's rate is at most this times the fastest measured point


def fitted(points: Sequence[Point]) -> Law:
    """The law with the smallest errors, among all selections of terms in addition to work."""
    rows = [(1.0, one.work, one.values, one.groups - 1.0) for one in points]
    measured = [one.seconds for one in points]
    choices = []
    for others in product((False, True), repeat=COLUMNS - 1):
        used = [1, *(column for column, is_used in zip((0, 2, 3), others, strict=True) if is_used)]
        if len(used) <= len(points) and all(any(row[column] for row in rows) for column in used):
            choices.append(_best(rows, measured, used))
    possible = [one for one in choices if one[1] > 0 and min(one.values()) >= 0]
    found = min(possible, key=lambda one: _distance(one, rows, measured))
    latency, work, values, group = (found.get(column, 0.0) for column in range(COLUMNS))
    law = Law(rate=1 / work, latency=latency, moved=1 / values if values else None, group=group)
    errors = [abs(law.seconds(one.work, one.values, one.groups) / one.seconds - 1) for one in points]
    return Law(
        rate=law.rate,
        latency=latency,
        moved=law.moved,
        group=group,
        error=statistics.median(errors),
        points=tuple(points),
    )


def _best(rows: Sequence[Sequence[float]], measured: Sequence[float], used: list[int]) -> Solution:
    """Least squares with errors relative to the measurements, and then to the geometric mean of measurement and last
    solution."""
    found = _least_squares(rows, measured, measured, used)
    least = 1 / (FASTER * max(row[1] / seconds for row, seconds in zip(rows, measured, strict=True)))
    if found[1] < least and len(used) > 1:  # the other terms explain more than there is: use the highest possible rate
        left = [max(seconds - least * row[1], 0.0) for row, seconds in zip(rows, measured, strict=True)]
        return {**_least_squares(rows, left, measured, [column for column in used if column != 1]), 1: least}
    for _ in range(ROUNDS):
        if min(found.values()) < 0:
            break
        means = [math.sqrt(_value(found, row) * seconds) for row, seconds in zip(rows, measured, strict=True)]
        found = _least_squares(rows, measured, means, used)
    return found


def _value(found: Solution, row: Sequence[float]) -> float:
    return sum(found[column] * row[column] for column in found)


def _distance(found: Solution, rows: Sequence[Sequence[float]], measured: Sequence[float]) -> float:
    return sum(math.log(_value(found, row) / seconds) ** 2 for row, seconds in zip(rows, measured, strict=True))


def _least_squares(
    rows: Sequence[Sequence[float]], measured: Sequence[float], units: Sequence[float], used: list[int]
) -> Solution:
    """Least squares by normal equations, with rows divided by their unit, and columns by their maximum."""
    scale = [max(row[column] for row in rows) for column in used]
    scaled = [
        [row[column] / size / unit for column, size in zip(used, scale, strict=True)]
        for row, unit in zip(rows, units, strict=True)
    ]
    wanted = [seconds / unit for seconds, unit in zip(measured, units, strict=True)]
    count = len(used)
    matrix = [
        [
            *(sum(one[i] * one[j] for one in scaled) for j in range(count)),
            sum(one[i] * right for one, right in zip(scaled, wanted, strict=True)),
        ]
        for i in range(count)
    ]
    for i in range(count):
        pivot = max(range(i, count), key=lambda line: abs(matrix[line][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if not matrix[i][i]:  # linearly dependent columns
            return {1: -1.0}
        for other in range(count):
            if other != i:
                share = matrix[other][i] / matrix[i][i]
                matrix[other] = [a - share * b for a, b in zip(matrix[other], matrix[i], strict=True)]
    return {column: matrix[i][-1] / matrix[i][i] / scale[i] for i, column in enumerate(used)}
