"""Arithmetic of time intervals. Wall time is the length of a union; sums of durations count overlaps twice.

Spans are an integer array of shape (n, 2), with a begin and an end in each row, half open. The results of these
functions are sorted, disjoint, and without empty rows.
"""

from __future__ import annotations

import numpy as np

NONE = np.empty((0, 2), dtype=np.int64)


def spans(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    return np.column_stack([begins, ends]).astype(np.int64, copy=False)


def union(rows: np.ndarray) -> np.ndarray:
    """The union of spans. Touching spans become one."""
    there = rows[:, 1] > rows[:, 0]
    if not there.all():
        rows = rows[there]
    if not len(rows):
        return NONE
    if (rows[1:, 0] < rows[:-1, 0]).any():
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
    latest = np.maximum.accumulate(rows[:, 1])
    first = np.concatenate([[True], rows[1:, 0] > latest[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.column_stack([rows[first, 0], latest[last]])


def length(rows: np.ndarray) -> int:
    """The length of a union."""
    return int((rows[:, 1] - rows[:, 0]).sum())


def intersect(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The intersection of two unions."""
    return _where(touching(left, right), touching(right, left), lambda in_left, in_right: in_left & in_right)


def subtract(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The left union without the right one."""
    return _where(left, touching(right, left), lambda in_left, in_right: in_left & ~in_right)


def touching(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The spans of a union that overlap with another one: few, if the other one is small."""
    if not len(others):
        return NONE
    index = np.searchsorted(others[:, 1], rows[:, 0], side="right")  # the first that ends after this one begins
    return rows[(index < len(others)) & (others[np.minimum(index, len(others) - 1), 0] < rows[:, 1])]


def gaps(rows: np.ndarray, begin: int, end: int) -> np.ndarray:
    """The gaps in a union between `begin` and `end`. Only the rows there are visited."""
    if end <= begin:
        return NONE
    first, last = np.searchsorted(rows[:, 1], begin, side="right"), np.searchsorted(rows[:, 0], end, side="left")
    inside = np.clip(rows[first : max(first, last)], begin, end)
    between = np.column_stack([np.append(begin, inside[:, 1]), np.append(inside[:, 0], end)])
    return between[between[:, 1] > between[:, 0]]


def within(rows: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """The length of a union within each window. Windows may overlap and come in any order."""
    return covered_until(rows, windows[:, 1]) - covered_until(rows, windows[:, 0])


def covered_until(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The length of a union before each of these times."""
    if not len(rows):
        return np.zeros(len(times), dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(rows[:, 1] - rows[:, 0])])
    index = np.searchsorted(rows[:, 0], times, side="right")  # number of spans that began by then
    current = rows[np.maximum(index - 1, 0), 1]
    beyond = np.where(index > 0, np.maximum(current - times, 0), 0)
    return before[index] - beyond


def holds(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Whether a union covers each of these times."""
    return np.searchsorted(rows[:, 0], times, side="right") > np.searchsorted(rows[:, 1], times, side="right")


def _where(left: np.ndarray, right: np.ndarray, keep) -> np.ndarray:
    edges = np.sort(np.concatenate([left.ravel(), right.ravel()]))
    if len(edges) < 2:
        return NONE
    kept = keep(holds(left, edges[:-1]), holds(right, edges[:-1]))
    return union(np.column_stack([edges[:-1][kept], edges[1:][kept]]))
