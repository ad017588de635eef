"""One step of one rank, coarse enough to draw: what each stream did when."""

from __future__ import annotations

from typing import Any

import numpy as np

from megaboa.observe.traces import classes, intervals
from megaboa.observe.traces.budget import Timeline
from megaboa.observe.traces.steps import Steps

MOST_LANES = 6
PIXELS = 1500  # spans that are closer than a step's length divided by this are drawn as one


def timeline_of(timeline: Timeline, steps: Steps) -> dict[str, Any]:
    """Of the step in the middle: per stream and class the spans, in milliseconds from the step's begin."""
    row = len(steps) // 2
    begin, end = steps.windows[row].tolist()
    kernels = timeline.capture.kernels
    inside = (kernels.start < end) & (kernels.end > begin)
    lanes, work = np.unique(kernels.place[inside], return_counts=True)
    busiest = lanes[np.argsort(-work, kind="stable")[:MOST_LANES]]
    found = []
    for lane in sorted(busiest.tolist()):
        for number, name in enumerate(classes.NAMES):
            chosen = inside & (kernels.place == lane) & (timeline.class_numbers == number)
            if chosen.any():
                spans = _coarse(kernels.spans[chosen], begin, end)
                found.append({"lane": f"stream {lane}", "class": name, "spans": spans})
    copies = timeline.capture.copies
    moved = (copies.start < end) & (copies.end > begin)
    if moved.any():
        found.append({"lane": "copies", "class": "copies", "spans": _coarse(copies.spans[moved], begin, end)})
    return {
        "rank": timeline.capture.rank,
        "step": steps.numbers[row],
        "wall": (end - begin) / 1e6,
        "streams": len(lanes),
        "rows": found,
    }


def _coarse(rows: np.ndarray, begin: int, end: int) -> list[list[float]]:
    least = max(1, (end - begin) // PIXELS)
    widened = intervals.union(np.column_stack([rows[:, 0], rows[:, 1] + least]))
    widened[:, 1] -= least
    clipped = np.clip(widened, begin, end) - begin
    return [[round(first / 1e6, 6), round(last / 1e6, 6)] for first, last in clipped.tolist()]
