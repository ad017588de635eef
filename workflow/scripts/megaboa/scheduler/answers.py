"""Types of the questions and answers in `protocol.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field


class UnreachableError(Exception):
    """The scheduler could not be asked, so nothing may be concluded."""


class NoPlaceError(Exception):
    """Ranks can't be started here as the run's settings want it; the message says why, and what to do."""


@dataclass(frozen=True)
class QueuedJob:
    """A waiting or running job of ours, from one query of the whole queue."""

    id: str
    state: str  # the scheduler's own word
    waits: bool = False
    only_ends: bool = False  # its processes are gone, or about to be
    reason: str = ""  # why it waits
    stuck: bool = False  # it never starts unless somebody does what the reason says
    nodes: str = ""
    starts: float | None = None
    ends: float | None = None
    folder: str = ""  # the folder that it was submitted from
    comment: str = ""  # the submitter's comment on the job


@dataclass(frozen=True)
class Life:
    """One life of a job, from its request to the loss of its nodes. A requeued job has several."""

    job: str
    submit: float
    start: float
    end: float


@dataclass(frozen=True)
class Task:
    """The place of a process among those that the scheduler started together."""

    rank: int
    local_rank: int
    count: int
    node: int
    nodes: int
    processors: int = 0  # the step's processors on this node; 0 if unknown


@dataclass(frozen=True)
class Size:
    nodes: int
    ranks: int  # per node
    cores: int  # per node


@dataclass(frozen=True)
class Where:
    """Where a job runs in the cluster."""

    partition: str | None
    account: str | None
    constraint: str | None = None  # features that its nodes must have
    qos: str | None = None
    cluster: str | None = None  # another cluster that the job is submitted to


@dataclass(frozen=True)
class Request:
    """What a job asks for; on each node, but for the nodes and the wall time."""

    where: Where
    nodes: int  # with spares
    cores: int
    mem_mb: int
    seconds: int
    gpus: int = 0
    spares: int = 0


@dataclass(frozen=True)
class Excess:
    """A part of a request that is more than the cluster grants. `key`: of the experiment; `certain`: nothing can lift
    the limit, as it is what the nodes have."""

    key: str
    asked: str
    limit: str
    remedy: str
    certain: bool = True

    def __str__(self) -> str:
        return f"{self.key} is {self.asked}, and {self.limit}: {self.remedy}"


@dataclass(frozen=True)
class Choice:
    """Values found for names that a profile leaves open."""

    taken: dict[str, str]
    left: list[str]  # choices left to the user: a line of the site's file for each possible value
    missing: list[str]  # names without a possible value, and why
    variables: Sequence[str] = ()  # environment variables that would also answer


def site_line(name: str, value: str) -> str:
    """A line of the site's file."""
    return f"{name}: {json.dumps(value)}"  # quoted, because YAML doesn't read `2024` or `on` as text


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
