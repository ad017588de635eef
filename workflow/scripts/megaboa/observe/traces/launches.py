"""Which call of the host launched what ran on the device, and how long the device waited for it."""

from __future__ import annotations

import numpy as np

from megaboa.observe.traces import intervals
from megaboa.observe.traces.events import UNKNOWN, Events


def launch_rows(kernels: Events, calls: Events) -> np.ndarray:
    """For every kernel the row of the call that launched it, or -1. Kernels of a CUDA graph share one."""
    if not len(calls) or not len(kernels):
        return np.full(len(kernels), UNKNOWN, dtype=np.int64)
    correlations = calls.correlation
    order = None  # mostly calls are numbered as they came
    if (correlations[1:] < correlations[:-1]).any():
        order = np.argsort(correlations, kind="stable")
        correlations = correlations[order]
    index = np.minimum(np.searchsorted(correlations, kernels.correlation), len(calls) - 1)
    known = (correlations[index] == kernels.correlation) & (kernels.correlation != UNKNOWN)
    return np.where(known, index if order is None else order[index], UNKNOWN)


def launch_times(kernels: Events, calls: Events) -> np.ndarray:
    """When the host began to issue each kernel; -1 where the capture doesn't say."""
    rows = launch_rows(kernels, calls)
    if not len(calls):
        return rows
    return np.where(rows == UNKNOWN, UNKNOWN, calls.start[rows])


def starved(kernels: Events, launched: np.ndarray, compute: np.ndarray) -> np.ndarray:
    """The time between computations in which the host had not yet begun to issue the next one: a lower bound.

    `kernels` and `launched` are those that compute, `compute` is their union.
    """
    if len(compute) < 2:
        return intervals.NONE
    begins, ends = compute[:-1, 1], compute[1:, 0]
    issued = launched[np.searchsorted(kernels.start, ends, side="left")]
    until = np.where(issued == UNKNOWN, begins, np.clip(issued, begins, ends))
    return intervals.union(np.column_stack([begins, until]))


def gap_lengths(busy: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Lengths of the times between `begin` and `end` in which the device had nothing to do."""
    rows = intervals.gaps(busy, begin, end)
    return rows[:, 1] - rows[:, 0]
