"""The common form of all captures: events on a device or a host thread, as columns.

Errors and gaps in a capture become named findings, so that missing data is never silently read as zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from megaboa.observe.traces import intervals

UNKNOWN = -1
KINDS = ("kernels", "copies", "ranges", "operators", "calls")
# error: no result; warning: a partial result, or one to be read with care; note: for information
LEVELS = ("error", "warning", "note")


@dataclass(frozen=True)
class Events:
    """Events of one kind, sorted by their start. Times are nanoseconds of the capture's own clock."""

    start: np.ndarray  # int64
    end: np.ndarray  # int64
    name: np.ndarray  # int32: index into the capture's names
    place: np.ndarray  # int32: stream of device events, thread of host events
    correlation: np.ndarray  # int32: shared by a call and the events that it launched; -1: unknown
    size: np.ndarray | None = None  # int64: bytes moved; -1: unknown. None: all are unknown
    group: np.ndarray | None = None  # int32: number of participating ranks; -1 and None as for size

    def __len__(self) -> int:
        return len(self.start)

    def rows(self) -> np.ndarray:
        """The columns as one integer array; unknown sizes and groups are -1."""
        columns = [np.full(len(self), UNKNOWN) if column is None else column for column in self._columns()]
        return np.column_stack(columns).astype(np.int64)

    def take(self, chosen: np.ndarray) -> Events:
        return Events(*(None if column is None else column[chosen] for column in self._columns()))

    @property
    def sizes(self) -> np.ndarray:
        return np.full(len(self), UNKNOWN) if self.size is None else self.size

    @property
    def groups(self) -> np.ndarray:
        return np.full(len(self), UNKNOWN) if self.group is None else self.group

    @property
    def spans(self) -> np.ndarray:
        return intervals.spans(self.start, self.end)

    @property
    def durations(self) -> np.ndarray:
        return self.end - self.start

    def sorted(self) -> Events:
        if np.all(self.start[1:] >= self.start[:-1]):
            return self
        return self.take(np.argsort(self.start, kind="stable"))

    def shifted(self, offset: int) -> Events:
        return replace(self, start=self.start + offset, end=self.end + offset)

    def _columns(self) -> tuple[np.ndarray | None, ...]:
        return self.start, self.end, self.name, self.place, self.correlation, self.size, self.group


def events(rows: np.ndarray, sized: bool = False) -> Events:
    """Events from integer columns: start, end, name, place, correlation and, if `sized`, size and group."""
    rows = rows.reshape(-1, 7 if sized else 5)
    start, end = rows[:, 0].copy(), rows[:, 1].copy()
    name, place, correlation = (rows[:, column].astype(np.int32) for column in (2, 3, 4))
    size, group = (rows[:, 5].copy(), rows[:, 6].astype(np.int32)) if sized else (None, None)
    return Events(start, end, name, place, correlation, size, group).sorted()


EMPTY = events(np.empty((0, 5), dtype=np.int64))
EMPTY_SIZED = events(np.empty((0, 7), dtype=np.int64), sized=True)


@dataclass(frozen=True)
class Capture:
    """One profiler's record of one rank."""

    path: Path
    kind: str  # nsys | pytorch
    version: str
    rank: int | None = None
    owner: str | None = None  # the device, if a file has several captures
    world_size: int | None = None
    host: str | None = None
    device: str = "gpu"  # cpu: operators stand in for kernels
    device_name: str | None = None
    epoch: int | None = None  # time of day at 0 of the capture's clock, in nanoseconds
    session: str | None = None  # shared by the captures of one run
    names: tuple[str, ...] = ()
    kernels: Events = EMPTY_SIZED
    copies: Events = EMPTY_SIZED
    ranges: Events = EMPTY  # NVTX ranges, annotations
    operators: Events = EMPTY  # PyTorch's operators, on the host
    calls: Events = EMPTY  # calls of the CUDA API
    network: tuple[dict, ...] = ()
    gpu_metrics: tuple[dict, ...] = ()
    missing: tuple[str, ...] = ()  # tables or kinds of events that the capture lacks
    findings: tuple[Finding, ...] = field(default=())

    @property
    def label(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else self.path.name

    def shifted(self, offset: int) -> Capture:
        moved = {kind: getattr(self, kind).shifted(offset) for kind in KINDS}
        return replace(self, **moved, epoch=None if self.epoch is None else self.epoch - offset)

    def named(self, table: Events) -> list[str]:
        return [self.names[index] for index in table.name]


class Names:
    """Interns names: events refer to them by number."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._number: dict[str, int] = {}
        for name in known:
            self.number(name)

    def number(self, name: str) -> int:
        return self._number.setdefault(name, len(self._number))

    def all(self) -> tuple[str, ...]:
        return tuple(self._number)


@dataclass(frozen=True)
class Finding:
    code: str
    level: str
    where: str  # a file, a rank, or the whole profile
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.text} [{self.code}]"


def worst_first(findings: list[Finding]) -> list[Finding]:
    """The findings without duplicates, the worst first."""
    return sorted(dict.fromkeys(findings), key=lambda finding: LEVELS.index(finding.level))


def launch_rows(kernels: Events, calls: Events) -> np.ndarray:
    """The index of the call that launched each kernel, or -1. Kernels of a CUDA graph share one call."""
    if not len(calls) or not len(kernels):
        return np.full(len(kernels), UNKNOWN, dtype=np.int64)
    correlations = calls.correlation
    order = None  # calls are mostly numbered in order, so that no sorting is needed
    if (correlations[1:] < correlations[:-1]).any():
        order = np.argsort(correlations, kind="stable")
        correlations = correlations[order]
    index = np.minimum(np.searchsorted(correlations, kernels.correlation), len(calls) - 1)
    known = (correlations[index] == kernels.correlation) & (kernels.correlation != UNKNOWN)
    return np.where(known, index if order is None else order[index], UNKNOWN)


def launch_times(kernels: Events, calls: Events) -> np.ndarray:
    """The time at which the host began to issue each kernel; -1 if unknown."""
    rows = launch_rows(kernels, calls)
    if not len(calls):
        return rows
    return np.where(rows == UNKNOWN, UNKNOWN, calls.start[rows])
