"""Collectives: the time and size of each operation, and how long a rank waits in them for others."""

from __future__ import annotations

import numpy as np

from megaboa.observe.traces import intervals, kernel_classes
from megaboa.observe.traces.budget import Timeline
from megaboa.observe.traces.captures import UNKNOWN, Capture, Events
from megaboa.observe.traces.step_windows import Steps
from megaboa.records import CollectiveTime, Message, Waiting

MOST_POINTS = 1000


def collective_events(timeline: Timeline, steps: Steps) -> tuple[Events, np.ndarray]:
    """The collectives that begin in the analysed steps, and their operations."""
    capture = timeline.capture
    inside = intervals.holds(intervals.union(steps.windows), capture.kernels.start)
    table = capture.kernels.take(timeline.is_communication & inside)
    return table, operations(capture, table)


def operations(capture: Capture, table: Events) -> np.ndarray:
    numbers, inverse = np.unique(table.name, return_inverse=True)
    labels = np.array([kernel_classes.operation_of(capture.names[number]) for number in numbers], dtype=object)
    return labels[inverse] if len(numbers) else np.empty(0, dtype=object)


def by_operation(timeline: Timeline, steps: Steps) -> list[CollectiveTime]:
    """One row per operation, in milliseconds per step. `GBps` covers only collectives of known size."""
    table, operation = collective_events(timeline, steps)
    rows = []
    for name in sorted(set(operation.tolist())):
        chosen = table.take(operation == name)
        union = intervals.union(chosen.spans)
        sized = chosen.take(chosen.sizes > 0)
        rows.append(
            CollectiveTime(
                operation=name,
                n=len(chosen),
                per_step=len(chosen) / len(steps),
                ms=intervals.length(union) / len(steps) / 1e6,
                exposed_ms=intervals.length(intervals.intersect(union, timeline.exposed)) / len(steps) / 1e6,
                sized=len(sized),
                bytes=int(sized.sizes.sum()) if len(sized) else None,
                GBps=float(sized.sizes.sum() / sized.durations.sum()) if sized.durations.sum() else None,
            )
        )
    return sorted(rows, key=lambda row: -row.ms)


def points(timeline: Timeline, steps: Steps) -> list[Message]:
    """Size and bandwidth of single collectives, thinned out if there are very many."""
    table, operation = collective_events(timeline, steps)
    rows = np.flatnonzero((table.sizes > 0) & (table.durations > 0))
    rows = rows[:: max(1, -(-len(rows) // MOST_POINTS))].tolist()
    return [
        Message(
            operation=operation[row],
            bytes=int(table.sizes[row]),
            us=float(table.durations[row]) / 1e3,
            GBps=float(table.sizes[row] / table.durations[row]),
            bus=_bus(operation[row], int(table.sizes[row]), int(table.durations[row]), int(table.groups[row])),
        )
        for row in rows
    ]


def _bus(operation: str, size: int, duration: int, ranks: int) -> float | None:
    """Bus bandwidth as defined by NCCL's tests, which doesn't depend on the number of ranks."""
    if ranks < 2:
        return None
    share = (ranks - 1) / ranks
    factor = {"AllReduce": 2 * share, "AllGather": share, "ReduceScatter": share, "AllToAll": share}.get(operation, 1.0)
    return size / duration * factor


def matched(timelines: list[Timeline], windows: list[Steps]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Begin and end (instances x captures) of the collectives that all captures have, matched by operation and order.

    Operations that occur unequally often are left out, because their order doesn't match.
    """
    streams = [_by_key(timeline, steps) for timeline, steps in zip(timelines, windows, strict=True)]
    pairs = []
    for key in sorted(set.intersection(*(set(stream) for stream in streams))):
        tables = [stream[key] for stream in streams]
        if len({len(table) for table in tables}) == 1:
            pairs.append(tuple(np.column_stack([getattr(t, side) for t in tables]) for side in ("start", "end")))
    return pairs


def _by_key(timeline: Timeline, steps: Steps) -> dict[tuple[str, int], Events]:
    table, operation = collective_events(timeline, steps)
    keys = list(zip(operation.tolist(), table.sizes.tolist(), strict=True))
    found = {key: np.array([other == key for other in keys]) for key in dict.fromkeys(keys)}
    return {key: table.take(rows) for key, rows in found.items()}


def one_group(captures: list[Capture], dimensions: int | None) -> bool:
    """Whether all captured ranks take part in each of their collectives, so that the n-th of one is the n-th of
    another.

    `dimensions`: the number of parallel dimensions (tp, cp, dp, ...) of the layout. Two ranks can only have one.
    """
    count = len(captures)
    everybody = count > 1 and {capture.world_size for capture in captures} == {count}
    return everybody and (count == 2 or dimensions == 1)


def waiting(timelines: list[Timeline], windows: list[Steps]) -> Waiting | None:
    """Split the time of ranks in shared collectives into transfer, and waiting for the last rank to arrive.

    The shortest stay of any rank is the transfer, which may still include some waiting. What others stay longer is
    waiting. Instances that don't overlap on all ranks are counted as unmatched.
    """
    pairs = matched(timelines, windows)
    total = sum(len(collective_events(t, s)[0]) for t, s in zip(timelines, windows, strict=True))
    rows = [(begin, end) for begins, ends in pairs for begin, end in zip(begins, ends, strict=True)]
    shared = [(begin, end) for begin, end in rows if begin.max() < end.min()]
    if not shared:
        return None
    stays = np.array([end - begin for begin, end in shared])
    last = np.array([begin.argmax() for begin, _ in shared])
    transfer = stays.min(axis=1)
    steps = min(len(window) for window in windows)
    return Waiting(
        matched=len(shared),
        unmatched=total - len(shared) * len(timelines),
        transfer_ms=float(transfer.sum()) / steps / 1e6,
        waiting_ms={
            timeline.capture.label: float((stays[:, index] - transfer).sum()) / steps / 1e6
            for index, timeline in enumerate(timelines)
        },
        arrived_last={timeline.capture.label: int((last == index).sum()) for index, timeline in enumerate(timelines)},
    )


def sizes_known(timeline: Timeline) -> bool:
    return bool((timeline.capture.kernels.take(timeline.is_communication).sizes != UNKNOWN).any())
