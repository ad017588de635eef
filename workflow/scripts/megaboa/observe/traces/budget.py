"""The breakdown of a step's time on the device, by unions of intervals over all streams."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megaboa.observe.traces import intervals, kernel_classes
from megaboa.observe.traces.captures import UNKNOWN, Capture, Events, launch_times
from megaboa.observe.traces.step_windows import Steps

# A step is bound by the host if the device starves for this share of it, and for most of the time without computation.
CPU_BOUND_SHARE = 0.1
COLUMNS = (
    "wall",
    "compute",
    "communication",
    "exposed",
    "overlapped",
    "copies",
    "copies_exposed",
    "busy",
    "idle",
    "starved",
)

Budget = dict[str, np.ndarray | None]


@dataclass(frozen=True)
class Timeline:
    """The unions of one capture, from which everything else is derived."""

    capture: Capture

    @cached_property
    def class_numbers(self) -> np.ndarray:
        return kernel_classes.class_numbers(self.capture.names, self.capture.kernels.name)

    @cached_property
    def is_communication(self) -> np.ndarray:
        return self.class_numbers == kernel_classes.NAMES.index(kernel_classes.COMMUNICATION)

    @cached_property
    def compute(self) -> np.ndarray:
        return intervals.union(self.capture.kernels.spans[~self.is_communication])

    @cached_property
    def communication(self) -> np.ndarray:
        return intervals.union(self.capture.kernels.spans[self.is_communication])

    @cached_property
    def copies(self) -> np.ndarray:
        return intervals.union(self.capture.copies.spans)

    @cached_property
    def busy(self) -> np.ndarray:
        return intervals.union(np.concatenate([self.compute, self.communication, self.copies]))

    @cached_property
    def exposed(self) -> np.ndarray:
        """Communication while nothing else ran on the device. Hiding it could save at most this time."""
        return intervals.subtract(self.communication, intervals.union(np.concatenate([self.compute, self.copies])))

    @cached_property
    def launched(self) -> np.ndarray:
        return launch_times(self.capture.kernels, self.capture.calls)

    @cached_property
    def starved(self) -> np.ndarray:
        computing = ~self.is_communication
        return _starved(self.capture.kernels.take(computing), self.launched[computing], self.compute)

    def of_class(self, number: int) -> np.ndarray:
        return intervals.union(self.capture.kernels.spans[self.class_numbers == number])


def _starved(kernels: Events, launched: np.ndarray, compute: np.ndarray) -> np.ndarray:
    """Time between computations in which the host hadn't begun to issue the next one; a lower bound.

    `kernels` and `launched` are those of computations, `compute` is their union.
    """
    if len(compute) < 2:
        return intervals.NONE
    begins, ends = compute[:-1, 1], compute[1:, 0]
    issued = launched[np.searchsorted(kernels.start, ends, side="left")]
    until = np.where(issued == UNKNOWN, begins, np.clip(issued, begins, ends))
    return intervals.union(np.column_stack([begins, until]))


def budget(timeline: Timeline, steps: Steps) -> Budget:
    """Nanoseconds of each kind in each step; None, not zero, for kinds that the capture lacks.

    `compute + exposed + copies_exposed + idle = wall`: overlapping time counts as computation first, then as copies,
    then as communication.
    """
    windows = steps.windows
    wall = windows[:, 1] - windows[:, 0]
    found: Budget = dict.fromkeys(COLUMNS, None) | {"wall": wall}
    capture = timeline.capture
    if not len(capture.kernels):
        return found
    compute = intervals.within(timeline.compute, windows)
    communication = intervals.within(timeline.communication, windows)
    exposed = intervals.within(timeline.exposed, windows)
    busy = intervals.within(timeline.busy, windows)
    found |= {"compute": compute, "communication": communication, "exposed": exposed, "busy": busy, "idle": wall - busy}
    found["overlapped"] = communication - exposed
    if len(capture.copies):
        found["copies"] = intervals.within(timeline.copies, windows)
        found["copies_exposed"] = busy - compute - exposed
    if len(capture.calls):
        found["starved"] = intervals.within(timeline.starved, windows)
    return found


def cpu_bound(found: Budget) -> np.ndarray | None:
    """A mask of the steps in which the device mostly waited for the host to launch; None if unknown."""
    if found["starved"] is None:
        return None
    absent = found["wall"] - found["compute"]
    return (found["starved"] > CPU_BOUND_SHARE * found["wall"]) & (2 * found["starved"] > absent)
