"""analysis.json: where the time of profiled steps went. Times are in milliseconds unless the name says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megaboa.records.base import IF_SET, Record

# --- tables of one rank -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ClassTime(Record):
    """Wall time of a class of kernels, by union; `work_ms` is the sum over kernels, which counts overlaps twice."""

    name: str = field(metadata={"key": "class"})
    ms: float
    per_step: float
    work_ms: float
    n: int


@dataclass(frozen=True, kw_only=True)
class PhaseTime(Record):
    phase: str
    device_ms: float
    host_ms: float
    n: int


@dataclass(frozen=True, kw_only=True)
class KernelTime(Record):
    kernel: str
    name: str = field(metadata={"key": "class"})
    n: int
    per_step: float
    work_ms: float
    mean_us: float


@dataclass(frozen=True, kw_only=True)
class CopyTime(Record):
    kind: str
    n: int
    per_step: float
    ms: float
    bytes: int
    GBps: float | None


@dataclass(frozen=True, kw_only=True)
class Launches(Record):
    """Gaps without work on the device, and how far the host ran ahead of it."""

    gaps: int
    gaps_per_step: float
    gap_us_median: float | None
    gap_us_p95: float | None
    idle_in_gaps_over_1ms: float
    launch_to_start_us_median: float | None
    kernels: int
    with_launch: int


@dataclass(frozen=True, kw_only=True)
class CollectiveTime(Record):
    operation: str
    n: int
    per_step: float
    ms: float
    exposed_ms: float
    sized: int  # collectives of known size
    bytes: int | None
    GBps: float | None


@dataclass(frozen=True, kw_only=True)
class Message(Record):
    """A single collective."""

    operation: str
    bytes: int
    us: float
    GBps: float
    bus: float | None = field(metadata={"key": "busGBps"})


@dataclass(frozen=True, kw_only=True)
class RankDetails(Record):
    """Means per step of a rank's window."""

    classes: tuple[ClassTime, ...] = ()
    phases: tuple[PhaseTime, ...] = ()
    kernels: tuple[KernelTime, ...] = ()
    copies: tuple[CopyTime, ...] = ()
    launches: Launches | None = None
    collectives: tuple[CollectiveTime, ...] = ()
    points: tuple[Message, ...] = ()


# --- ranks and their steps --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CaptureFile(Record):
    rank: int | None
    file: str
    kind: str
    version: str | None
    host: str | None
    device: str
    device_name: str | None
    world_size: int | None
    part: str
    kernels: int
    missing: tuple[str, ...]  # missing tables or kinds of events


@dataclass(frozen=True, kw_only=True)
class StepBudget(Record):
    """A rank's time in a step by kind; None for what the capture lacks. `budget.py` says how the kinds add up."""

    rank: int | None
    step: int
    begin: float
    wall: float
    compute: float | None = None
    communication: float | None = None
    exposed: float | None = None
    overlapped: float | None = None
    copies: float | None = None
    copies_exposed: float | None = None
    busy: float | None = None
    idle: float | None = None
    starved: float | None = None
    cpu_bound: bool | None = None


@dataclass(frozen=True, kw_only=True)
class MedianAndEnds(Record):
    median: float
    min: float
    max: float


@dataclass(frozen=True, kw_only=True)
class RankSteps(Record):
    """Statistics of a rank's steps by kind of time, and the window they are from."""

    rank: int | None
    host: str | None = None
    part: str = "unknown"
    window: str = ""
    n: int = 0
    dropped: tuple[int, ...] = ()  # steps before and after the window
    anchor: str | None = None
    second_anchor: str | None = None
    second_anchor_ratio: float | None = None
    ms: dict[str, MedianAndEnds | None]
    share: dict[str, float | None] = field(default_factory=dict)
    cpu_bound_steps: int | None = None


# --- across ranks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Clock(Record):
    """The offset that aligns a rank's clock with another's, from `n` shared collectives."""

    rank: int | None
    to_rank: int | None
    offset_us: float
    residual_us: tuple[float, float]
    n: int


@dataclass(frozen=True, kw_only=True)
class Perturbation(Record):
    """The profiler's overhead: captured steps compared with those after them."""

    captured_ms: float
    captured_n: int
    reference_ms: float
    reference_n: int
    reference: str
    slowdown: float


@dataclass(frozen=True, kw_only=True)
class Waiting(Record):
    """The time of shared collectives, split into transfer and waiting for the last rank."""

    matched: int
    unmatched: int
    transfer_ms: float
    waiting_ms: dict[str, float]
    arrived_last: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class PartSpeeds(Record):
    """Ranks with the same part of the model: which one is slow, and how often. Without common steps most fields are
    None."""

    part: str
    ranks: tuple[int, ...]
    n: int
    verdict: str
    fastest: int | None = None
    slowest: int | None = None
    slowest_host: str | None = None
    slowest_in: float | None = None
    spread: float | None = None
    spread_by_step: float | None = None
    median_ms: dict[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class StageIdle(Record):
    rank: int | None
    stage: int
    n: int
    bubble: float
    starved: float | None


@dataclass(frozen=True, kw_only=True)
class PipelineIdle(Record):
    """Measured idle share of pipeline stages, and the ideal one, due to filling and draining alone."""

    ideal: float | None
    measured: float
    ranks: tuple[StageIdle, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NetworkCounter(Record):
    """A counter of a network card, or of a GPU."""

    rank: int | None
    card: int
    metric: str
    unit: str | None
    n: int
    mean: float
    max: float


@dataclass(frozen=True, kw_only=True)
class Lane(Record):
    lane: str
    name: str = field(metadata={"key": "class"})
    spans: list[list[float]]  # relative to the step's begin


@dataclass(frozen=True, kw_only=True)
class StepTimeline(Record):
    """One step of one rank, to be drawn."""

    rank: int | None
    step: int
    wall: float
    streams: int
    rows: tuple[Lane, ...]


# --- conclusions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProfileFinding(Record):
    code: str
    level: str
    where: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Opportunity(Record):
    """A kind of lost time, and an upper bound of the throughput that removing it would gain."""

    kind: str
    ms: float
    share: float
    gain_ceiling: float
    n: int
    look: str


@dataclass(frozen=True, kw_only=True)
class Change(Record):
    """A difference between two profiles, in means per step; `delta` above 0 is slower.

    `gain_ceiling`: upper bound of the gain from returning to `before`.
    """

    of: str
    name: str
    before: float
    after: float
    delta: float
    gain_ceiling: float


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    against: str | None = field(default=None, metadata=IF_SET)
    ranks: tuple[int | None, ...]  # ranks in both profiles
    mismatches: tuple[str, ...]
    step: Change | None = None
    rows: tuple[Change, ...] = ()
    n: tuple[int, int] | None = field(default=None, metadata=IF_SET)
    windows: tuple[str, str] | None = field(default=None, metadata=IF_SET)
    summary: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Analysis(Record):
    """analysis.json; its version is in the key `form`."""

    VERSION = 1
    VERSION_KEY = "form"

    captures: tuple[CaptureFile, ...] = ()
    device: Literal["cpu", "gpu"] | None = None  # None: nobody knows
    budget: tuple[StepBudget, ...] = ()
    ranks: tuple[RankSteps, ...] = ()
    details: dict[str, RankDetails] = field(default_factory=dict)
    clocks: tuple[Clock, ...] = ()
    perturbation: Perturbation | None = None
    waiting: Waiting | None = None
    stragglers: tuple[PartSpeeds, ...] = ()
    pipeline: PipelineIdle | None = None
    network: tuple[NetworkCounter, ...] = ()
    gpu_metrics: tuple[NetworkCounter, ...] = ()
    timeline: StepTimeline | None = None
    findings: tuple[ProfileFinding, ...] = ()
    opportunities: tuple[Opportunity, ...] = ()
    summary: tuple[str, ...] = ()
    comparison: Comparison | None = field(default=None, metadata=IF_SET)
