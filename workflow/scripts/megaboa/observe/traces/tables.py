"""Tables of one capture: kernel classes, single kernels, copies, launches."""

from __future__ import annotations

from typing import Any

import numpy as np

from megaboa.observe.traces import classes, intervals
from megaboa.observe.traces.budget import Timeline
from megaboa.observe.traces.events import UNKNOWN
from megaboa.observe.traces.launches import gap_lengths
from megaboa.observe.traces.steps import Steps

TOP = 20
MATERIAL = 0.01  # of a step: a kernel that takes this much and has no class is named


def class_rows(timeline: Timeline, steps: Steps) -> list[dict[str, Any]]:
    """Milliseconds per step of every class: by union, and summed over kernels (`work_ms`), which is no wall time."""
    counted = inside(timeline, steps)
    durations = timeline.capture.kernels.durations
    rows = []
    for number, name in enumerate(classes.NAMES):
        chosen = counted & (timeline.class_numbers == number)
        if chosen.any():
            union = intervals.within(timeline.of_class(number), steps.windows)
            per_step = {"per_step": float(chosen.sum()) / len(steps), "work_ms": _ms(durations[chosen].sum(), steps)}
            rows.append({"class": name, "ms": _ms(union.sum(), steps), **per_step, "n": int(chosen.sum())})
    return sorted(rows, key=lambda row: -row["ms"])


def kernel_rows(timeline: Timeline, steps: Steps) -> list[dict[str, Any]]:
    """The kernels that took most, by their summed time."""
    table = timeline.capture.kernels.take(inside(timeline, steps))
    names, inverse = np.unique(table.name, return_inverse=True)
    work = np.bincount(inverse, weights=table.durations, minlength=len(names))
    counts = np.bincount(inverse, minlength=len(names))
    order = np.argsort(-work, kind="stable")[:TOP].tolist()
    named = [(timeline.capture.names[names[row]], work[row], counts[row]) for row in order]
    return [
        {
            "kernel": name,
            "class": classes.class_of(name),
            "n": int(count),
            "per_step": float(count) / len(steps),
            "work_ms": _ms(total, steps),
            "mean_us": float(total / count) / 1e3,
        }
        for name, total, count in named
    ]


def unclassified(timeline: Timeline, steps: Steps) -> list[str]:
    """Kernels that nobody put into a class, and that take a noticeable part of a step."""
    limit = MATERIAL * float((steps.windows[:, 1] - steps.windows[:, 0]).mean()) / 1e6
    found = kernel_rows(timeline, steps)
    return [row["kernel"] for row in found if row["class"] == classes.OTHER and row["work_ms"] > limit]


def copy_rows(timeline: Timeline, steps: Steps) -> list[dict[str, Any]]:
    """Copies by direction and kind of memory."""
    copies = timeline.capture.copies
    table = copies.take(intervals.holds(intervals.union(steps.windows), copies.start))
    rows = []
    for name in np.unique(table.name).tolist():
        chosen = table.take(table.name == name)
        sized = chosen.take(chosen.size != UNKNOWN)
        busy = intervals.length(intervals.union(chosen.spans))
        moved, took = int(sized.size.sum()), int(sized.durations.sum())
        rows.append(
            {
                "kind": timeline.capture.names[name],
                "n": len(chosen),
                "per_step": len(chosen) / len(steps),
                "ms": _ms(busy, steps),
                "bytes": moved,
                "GBps": moved / took if took else None,
            }
        )
    return sorted(rows, key=lambda row: -row["ms"])


def launch_row(timeline: Timeline, steps: Steps) -> dict[str, Any]:
    """Times without work on the device, and how far ahead of it the host was."""
    lengths = np.concatenate([gap_lengths(timeline.busy, begin, end) for begin, end in steps.windows.tolist()])
    counted = inside(timeline, steps)
    known = counted & (timeline.launched != UNKNOWN)
    ahead = timeline.capture.kernels.start[known] - timeline.launched[known]
    return {
        "gaps": len(lengths),
        "gaps_per_step": len(lengths) / len(steps),
        "gap_us_median": float(np.median(lengths)) / 1e3 if len(lengths) else None,
        "gap_us_p95": float(np.percentile(lengths, 95)) / 1e3 if len(lengths) else None,
        "idle_in_gaps_over_1ms": float(lengths[lengths > 1e6].sum() / max(1, lengths.sum())),
        "launch_to_start_us_median": float(np.median(ahead)) / 1e3 if len(ahead) else None,
        "kernels": int(counted.sum()),
        "with_launch": int(known.sum()),
    }


def inside(timeline: Timeline, steps: Steps) -> np.ndarray:
    """Which kernels begin in the analysed steps."""
    return intervals.holds(intervals.union(steps.windows), timeline.capture.kernels.start)


def _ms(nanoseconds: float, steps: Steps) -> float:
    return float(nanoseconds) / len(steps) / 1e6
