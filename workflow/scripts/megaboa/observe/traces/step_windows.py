"""Finds the steps in a capture by an anchor that recurs in every step, and checks them by a second one.

On a GPU a step is the time from the first kernel that it launched to the first one of the next step, regardless of the
host.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from megaboa.observe.traces import kernel_classes
from megaboa.observe.traces.captures import UNKNOWN, Capture, Finding, launch_times

NUMBERED = re.compile(r"^ProfilerStep#(\d+)$")
STEP_RANGE = re.compile(r"(^|[./: ])(train_?step|training_step|iteration|step)([ #_:]*(\d+))?$", re.IGNORECASE)
OPTIMIZER_RANGE = re.compile(r"optimizer[._]?step", re.IGNORECASE)
AGREEMENT = 0.05  # allowed relative difference between the median steps of two anchors
REGULAR = 0.1  # largest relative spread of the distances between starts of an anchor kernel


@dataclass(frozen=True)
class Anchor:
    name: str
    windows: np.ndarray  # (n, 2), nanoseconds
    numbers: list[int] | None  # numbers of the steps, if the anchor names them
    of_host: bool = False  # windows of the host's ranges, not of the device

    @property
    def median(self) -> float:
        return float(np.median(self.windows[:, 1] - self.windows[:, 0]))


@dataclass(frozen=True)
class Steps:
    """The steps that are analysed, without the first and the last one of the capture."""

    anchor: str
    numbers: list[int]
    windows: np.ndarray
    dropped: list[int]
    second: str | None = None
    second_ratio: float | None = None  # ratio of the second anchor's median step to the first's

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def text(self) -> str:
        if not self.numbers:
            return "no step"
        first, last = self.numbers[0], self.numbers[-1]
        return f"step {first}" if first == last else f"steps {first} to {last}"


NO_STEPS = Steps("none", [], np.empty((0, 2), dtype=np.int64), [])


def find_steps(capture: Capture, first_step: int) -> tuple[Steps, list[Finding]]:
    """Find the steps. `first_step` is the number of the capture's first step, used if no anchor names it."""
    found = filter(None, map(_forward, anchors(capture)))
    first = next(found, None)
    if first is None:
        text = "no step was found: no range named after one, no optimizer, no kernel that returns regularly"
        return NO_STEPS, [Finding("no_steps", "error", capture.label, text)]
    second = next(found, None)
    findings = _compared(capture, first, second)
    if first.of_host and capture.device == "gpu" and len(capture.kernels):
        text = (
            "which kernels a step launched is unknown: steps are those of the host, kernels may run in the next one's"
        )
        findings.append(Finding("host_windows", "warning", capture.label, text))
    count = len(first.windows)
    numbers = first.numbers or list(range(first_step, first_step + count))
    kept = slice(1, -1) if count >= 3 else slice(None)
    if count < 3:
        text = f"{count} step(s) captured: the first and the last, which are not steady, could not be dropped"
        findings.append(Finding("few_steps", "warning", capture.label, f"{text}; capture five or more"))
    dropped = [numbers[0], numbers[-1]] if count >= 3 else []
    ratio = second.median / first.median if second else None
    steps = Steps(first.name, numbers[kept], first.windows[kept], dropped, second.name if second else None, ratio)
    return steps, findings


def _forward(anchor: Anchor) -> Anchor | None:
    """An anchor without steps that end before they begin, which occur if the device reorders kernels."""
    good = anchor.windows[:, 1] > anchor.windows[:, 0]
    numbers = anchor.numbers and [number for number, kept in zip(anchor.numbers, good, strict=True) if kept]
    return replace(anchor, windows=anchor.windows[good], numbers=numbers) if good.any() else None


def _compared(capture: Capture, first: Anchor, second: Anchor | None) -> list[Finding]:
    if second is None:
        text = f"steps were found by {first.name} alone: there is no second anchor to check them by"
        return [Finding("one_anchor", "note", capture.label, text)]
    if abs(second.median / first.median - 1) <= AGREEMENT:
        return []
    text = (
        f"anchors disagree: a step takes {first.median / 1e6:.3f} ms by {first.name}, "
        f"but {second.median / 1e6:.3f} ms by {second.name}: check which is a step before believing any share"
    )
    return [Finding("anchors_disagree", "warning", capture.label, text)]


def anchors(capture: Capture) -> Iterator[Anchor]:
    """The anchors in a capture, best first."""
    for name, pattern in (("ProfilerStep", NUMBERED), ("a step's range", STEP_RANGE)):
        if anchor := _of_ranges(capture, name, pattern):
            yield anchor
            break
    if anchor := _between(capture, "the optimizer's range", *_optimizer_ranges(capture)):
        yield anchor
    if anchor := _between(capture, "the optimizer's kernels", *_bursts(capture)):
        yield anchor
    yield from _regular_kernels(capture)


def _of_ranges(capture: Capture, name: str, pattern: re.Pattern) -> Anchor | None:
    matches = {number: found for number, text in enumerate(capture.names) if (found := pattern.search(text))}
    rows = np.flatnonzero(np.isin(capture.ranges.name, list(matches)))
    if not len(rows):
        return None
    rows = _outermost(capture.ranges.start[rows], capture.ranges.end[rows], rows)
    begins, ends = capture.ranges.start[rows], capture.ranges.end[rows]
    last = [matches[number].groups()[-1] for number in capture.ranges.name[rows].tolist()]
    numbers = [int(text) for text in last] if all(last) else None
    on_device = _on_device(capture, begins, ends)
    if on_device is None:
        return Anchor(name, np.column_stack([begins, np.append(begins[1:], ends[-1])]), numbers, of_host=True)
    return Anchor(name, on_device, numbers)


def _outermost(begins: np.ndarray, ends: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The rows of ranges that aren't inside others: a step's range may contain one called `step` too."""
    kept = []
    until = None
    for begin, end, row in zip(begins.tolist(), ends.tolist(), rows.tolist(), strict=True):
        if until is None or begin >= until:
            kept.append(row)
            until = end
    return np.array(kept, dtype=np.int64)


def _on_device(capture: Capture, begins: np.ndarray, ends: np.ndarray) -> np.ndarray | None:
    """Convert host windows to device windows: from the first kernel launched in one to the first of the next.

    None if launches are unknown, or a step launched nothing.
    """
    launched = launch_times(capture.kernels, capture.calls)
    step = np.searchsorted(begins, launched, side="right") - 1
    valid = (launched != UNKNOWN) & (step >= 0) & (launched < ends[-1])
    if not valid.any() or len(np.unique(step[valid])) < len(begins):
        return None
    starts = np.full(len(begins), np.iinfo(np.int64).max)
    np.minimum.at(starts, step[valid], capture.kernels.start[valid])
    end = capture.kernels.end[valid & (step == len(begins) - 1)].max()
    return np.column_stack([starts, np.append(starts[1:], end)])


def _optimizer_ranges(capture: Capture) -> tuple[np.ndarray, np.ndarray]:
    wanted = [number for number, text in enumerate(capture.names) if OPTIMIZER_RANGE.search(text)]
    rows = np.flatnonzero(np.isin(capture.ranges.name, wanted))
    rows = _outermost(capture.ranges.start[rows], capture.ranges.end[rows], rows)
    return capture.ranges.start[rows], capture.ranges.end[rows]


def _bursts(capture: Capture) -> tuple[np.ndarray, np.ndarray]:
    """Bursts of the optimizer's kernels at the end of each step, separated by long pauses."""
    number = kernel_classes.NAMES.index("optimizer")
    chosen = capture.kernels.take(kernel_classes.class_numbers(capture.names, capture.kernels.name) == number)
    if len(chosen) < 2:
        return chosen.start, chosen.end
    pauses = chosen.start[1:] - np.maximum.accumulate(chosen.end)[:-1]
    apart = pauses > 0.3 * pauses.max(initial=0)
    if pauses.max(initial=0) <= 0:
        apart[:] = False
    return chosen.start[np.append(True, apart)], chosen.end[np.append(apart, True)]


def _between(capture: Capture, name: str, begins: np.ndarray, ends: np.ndarray) -> Anchor | None:
    """Steps between the ends of successive events. The time before the first event is not a whole step."""
    if len(ends) < 2:
        return None
    return Anchor(name, np.column_stack([ends[:-1], ends[1:]]), None)


def _regular_kernels(capture: Capture) -> Iterator[Anchor]:
    """The rarest kernel that recurs at regular intervals, if another kernel recurs as often."""
    names, counts = np.unique(capture.kernels.name, return_counts=True)
    regular: dict[int, list[int]] = {}
    for name, count in zip(names.tolist(), counts.tolist(), strict=True):
        if 3 <= count <= 1000:
            distances = np.diff(capture.kernels.start[capture.kernels.name == name])
            if distances.std() < REGULAR * distances.mean():
                regular.setdefault(count, []).append(name)
    shared = sorted(count for count, sharing in regular.items() if len(sharing) > 1)
    if shared:
        starts = capture.kernels.start[capture.kernels.name == regular[shared[0]][0]]
        yield Anchor("a kernel that returns regularly", np.column_stack([starts[:-1], starts[1:]]), None)
