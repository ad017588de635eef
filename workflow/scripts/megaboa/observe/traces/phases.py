"""Which phase of a step launched a kernel: the innermost range around its launch, on the thread that launched it."""

from __future__ import annotations

import re

import numpy as np

from megaboa.observe.traces import intervals, launches
from megaboa.observe.traces.events import UNKNOWN, Capture
from megaboa.observe.traces.steps import Steps

UNNAMED = "not named"
# In this order: `recv_forward` is no forward pass. A name of both passes (`forward_backward_func`) holds both.
_PATTERNS = {
    "pipeline": r"(send|recv)_(forward|backward)|p2p|communicate",
    "both": r"forward.*backward",
    "optimizer": r"optimizer|clip_grad|grad_norm|^adam",
    "data": r"data_?loader|get_batch|data_iterator",
    "backward": r"backward|^autograd::engine",
    "forward": r"forward",
}
PHASES = ("forward", "backward", "optimizer", "pipeline", "data", UNNAMED)
_PHASES = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _PATTERNS.items()]


def phase_of(name: str) -> str:
    found = next((phase for phase, pattern in _PHASES if pattern.search(name)), UNNAMED)
    return UNNAMED if found == "both" else found


def phases(capture: Capture, steps: Steps) -> dict[str, dict[str, np.ndarray]]:
    """Nanoseconds of each phase in each step: on the device by union, and of the ranges themselves on the host."""
    begin, end, place, phase = _named_ranges(capture)
    if not len(begin):
        return {}
    of_kernel = _kernel_phases(capture, begin, end, place, phase)
    found = {}
    for number, name in enumerate(PHASES):
        device = intervals.union(capture.kernels.spans[of_kernel == number])
        host = intervals.union(intervals.spans(begin, end)[phase == number])
        if len(device) or len(host):
            found[name] = {
                kind: intervals.within(rows, steps.windows) for kind, rows in (("device", device), ("host", host))
            }
    return found


def _named_ranges(capture: Capture) -> tuple[np.ndarray, ...]:
    """Ranges and operators that name a phase, sorted so that outer ones come first."""
    numbers = np.array([PHASES.index(phase_of(name)) for name in capture.names], dtype=np.int64)
    unnamed = PHASES.index(UNNAMED)
    tables = [(table, numbers[table.name]) for table in (capture.ranges, capture.operators)]
    kept = [(table.take(phase != unnamed), phase[phase != unnamed]) for table, phase in tables]
    begin, end, place = (
        np.concatenate([getattr(table, column) for table, _ in kept]) for column in ("start", "end", "place")
    )
    phase = np.concatenate([phase for _, phase in kept])
    order = np.lexsort((-end, begin))
    return begin[order], end[order], place[order], phase[order]


def _kernel_phases(capture: Capture, begin, end, place, phase) -> np.ndarray:
    rows = launches.launch_rows(capture.kernels, capture.calls)
    if capture.device == "cpu":  # operators launch nothing: they are where they are
        times, threads = capture.kernels.start, capture.kernels.place
    else:
        known = rows != UNKNOWN
        times = np.where(known, capture.calls.start[rows] if len(capture.calls) else 0, UNKNOWN)
        threads = np.where(known, capture.calls.place[rows] if len(capture.calls) else 0, UNKNOWN)
    found = np.full(len(capture.kernels), PHASES.index(UNNAMED), dtype=np.int64)
    for thread in np.unique(place):
        own, mine = place == thread, np.flatnonzero(threads == thread)
        edges, labels = innermost(begin[own].tolist(), end[own].tolist(), phase[own].tolist(), PHASES.index(UNNAMED))
        at = np.searchsorted(edges, times[mine], side="right") - 1
        found[mine[at >= 0]] = labels[at[at >= 0]]
    return found


def innermost(begins: list[int], ends: list[int], labels: list[int], outside: int) -> tuple[np.ndarray, np.ndarray]:
    """Nested ranges of one thread, outer ones first, as a line of edges and what holds from each edge on."""
    edges: list[int] = []
    holds: list[int] = []
    open_ranges: list[tuple[int, int]] = []

    def close_until(time: float) -> None:
        while open_ranges and open_ranges[-1][0] <= time:
            ended = open_ranges.pop()[0]
            edges.append(ended)
            holds.append(open_ranges[-1][1] if open_ranges else outside)

    for begin, end, label in zip(begins, ends, labels, strict=True):
        close_until(begin)
        edges.append(begin)
        holds.append(label)
        open_ranges.append((end, label))
    close_until(float("inf"))
    return np.array(edges, dtype=np.int64), np.array(holds, dtype=np.int64)
