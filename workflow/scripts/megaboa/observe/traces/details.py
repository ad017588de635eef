"""Details of one rank: tables of its kernels, copies and launches, the phases of its steps, and one step to draw."""

from __future__ import annotations

import re

import numpy as np

from megaboa.observe.traces import intervals, kernel_classes
from megaboa.observe.traces.budget import Timeline
from megaboa.observe.traces.captures import UNKNOWN, Capture, launch_rows
from megaboa.observe.traces.step_windows import Steps
from megaboa.records import ClassTime, CopyTime, KernelTime, Lane, Launches, StepTimeline

TOP = 20
MATERIAL = 0.01  # share of a step: unclassified kernels that take more are reported
UNNAMED = "not named"
# The order matters: `recv_forward` is no forward pass, and `forward_backward_func` contains both passes.
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
MOST_LANES = 6
PIXELS = 1500  # spans closer than the step's length divided by this are drawn as one


def class_rows(timeline: Timeline, steps: Steps) -> list[ClassTime]:
    """Milliseconds per step of every class: of the union, and summed over kernels (`work_ms`), not wall time."""
    counted = inside(timeline, steps)
    durations = timeline.capture.kernels.durations
    rows = []
    for number, name in enumerate(kernel_classes.NAMES):
        chosen = counted & (timeline.class_numbers == number)
        if chosen.any():
            union = intervals.within(timeline.of_class(number), steps.windows)
            per_step = {"per_step": float(chosen.sum()) / len(steps), "work_ms": _ms(durations[chosen].sum(), steps)}
            rows.append(ClassTime(name=name, ms=_ms(union.sum(), steps), **per_step, n=int(chosen.sum())))
    return sorted(rows, key=lambda row: -row.ms)


def kernel_rows(timeline: Timeline, steps: Steps) -> list[KernelTime]:
    """The kernels with the largest total time."""
    table = timeline.capture.kernels.take(inside(timeline, steps))
    names, inverse = np.unique(table.name, return_inverse=True)
    work = np.bincount(inverse, weights=table.durations, minlength=len(names))
    counts = np.bincount(inverse, minlength=len(names))
    order = np.argsort(-work, kind="stable")[:TOP].tolist()
    named = [(timeline.capture.names[names[row]], work[row], counts[row]) for row in order]
    return [
        KernelTime(
            kernel=name,
            name=kernel_classes.class_of(name),
            n=int(count),
            per_step=float(count) / len(steps),
            work_ms=_ms(total, steps),
            mean_us=float(total / count) / 1e3,
        )
        for name, total, count in named
    ]


def unclassified(timeline: Timeline, steps: Steps) -> list[str]:
    """Unclassified kernels that take a notable share of a step."""
    limit = MATERIAL * float((steps.windows[:, 1] - steps.windows[:, 0]).mean()) / 1e6
    found = kernel_rows(timeline, steps)
    return [row.kernel for row in found if row.name == kernel_classes.OTHER and row.work_ms > limit]


def copy_rows(timeline: Timeline, steps: Steps) -> list[CopyTime]:
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
            CopyTime(
                kind=timeline.capture.names[name],
                n=len(chosen),
                per_step=len(chosen) / len(steps),
                ms=_ms(busy, steps),
                bytes=moved,
                GBps=moved / took if took else None,
            )
        )
    return sorted(rows, key=lambda row: -row.ms)


def launch_row(timeline: Timeline, steps: Steps) -> Launches:
    """Gaps without work on the device, and the host's lead over the device."""
    lengths = np.concatenate([_gap_lengths(timeline.busy, begin, end) for begin, end in steps.windows.tolist()])
    counted = inside(timeline, steps)
    known = counted & (timeline.launched != UNKNOWN)
    ahead = timeline.capture.kernels.start[known] - timeline.launched[known]
    return Launches(
        gaps=len(lengths),
        gaps_per_step=len(lengths) / len(steps),
        gap_us_median=float(np.median(lengths)) / 1e3 if len(lengths) else None,
        gap_us_p95=float(np.percentile(lengths, 95)) / 1e3 if len(lengths) else None,
        idle_in_gaps_over_1ms=float(lengths[lengths > 1e6].sum() / max(1, lengths.sum())),
        launch_to_start_us_median=float(np.median(ahead)) / 1e3 if len(ahead) else None,
        kernels=int(counted.sum()),
        with_launch=int(known.sum()),
    )


def _gap_lengths(busy: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Lengths of the idle gaps of the device between `begin` and `end`."""
    rows = intervals.gaps(busy, begin, end)
    return rows[:, 1] - rows[:, 0]


def inside(timeline: Timeline, steps: Steps) -> np.ndarray:
    """A mask of the kernels that begin in the analysed steps."""
    return intervals.holds(intervals.union(steps.windows), timeline.capture.kernels.start)


def _ms(nanoseconds: float, steps: Steps) -> float:
    return float(nanoseconds) / len(steps) / 1e6


def phase_of(name: str) -> str:
    found = next((phase for phase, pattern in _PHASES if pattern.search(name)), UNNAMED)
    return UNNAMED if found == "both" else found


def phases(capture: Capture, steps: Steps) -> dict[str, dict[str, np.ndarray]]:
    """Nanoseconds of each phase in each step: on the device by union, and on the host by the ranges themselves.

    A kernel belongs to the innermost range around its launch, on the thread that launched it.
    """
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
    rows = launch_rows(capture.kernels, capture.calls)
    if capture.device == "cpu":  # operators aren't launched: their own time and thread count
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
    """Flatten nested ranges of one thread, given with outer ones first, to edges and the label that holds from each
    edge on."""
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


def timeline_of(timeline: Timeline, steps: Steps) -> StepTimeline:
    """The spans of the middle step, per stream and class, in milliseconds from the step's begin."""
    row = len(steps) // 2
    begin, end = steps.windows[row].tolist()
    kernels = timeline.capture.kernels
    inside = (kernels.start < end) & (kernels.end > begin)
    lanes, work = np.unique(kernels.place[inside], return_counts=True)
    busiest = lanes[np.argsort(-work, kind="stable")[:MOST_LANES]]
    found = []
    for lane in sorted(busiest.tolist()):
        for number, name in enumerate(kernel_classes.NAMES):
            chosen = inside & (kernels.place == lane) & (timeline.class_numbers == number)
            if chosen.any():
                spans = _coarse(kernels.spans[chosen], begin, end)
                found.append(Lane(lane=f"stream {lane}", name=name, spans=spans))
    copies = timeline.capture.copies
    moved = (copies.start < end) & (copies.end > begin)
    if moved.any():
        found.append(Lane(lane="copies", name="copies", spans=_coarse(copies.spans[moved], begin, end)))
    return StepTimeline(
        rank=timeline.capture.rank,
        step=steps.numbers[row],
        wall=(end - begin) / 1e6,
        streams=len(lanes),
        rows=tuple(found),
    )


def _coarse(rows: np.ndarray, begin: int, end: int) -> list[list[float]]:
    least = max(1, (end - begin) // PIXELS)
    widened = intervals.union(np.column_stack([rows[:, 0], rows[:, 1] + least]))
    widened[:, 1] -= least
    clipped = np.clip(widened, begin, end) - begin
    return [[round(first / 1e6, 6), round(last / 1e6, 6)] for first, last in clipped.tolist()]
