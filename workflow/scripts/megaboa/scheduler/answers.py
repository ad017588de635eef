"""What questions of `protocol.py` are asked with and answered by."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field


class UnreachableError(Exception):
    """The scheduler could not be asked; nothing may be concluded from that."""


class NoPlaceError(Exception):
    """Ranks can't be started here as the run's settings want it; why, and what to do about it."""


@dataclass(frozen=True)
class QueuedJob:
    """A job of ours that waits or runs, as the whole queue is told by one question."""

    id: str
    state: str  # in the scheduler's word
    waits: bool = False
    only_ends: bool = False  # its processes are gone, or are about to be
    reason: str = ""  # why it waits
    nodes: str = ""
    starts: float | None = None
    ends: float | None = None
    folder: str = ""  # it was submitted from here
    comment: str = ""  # what its submitter wrote there


@dataclass(frozen=True)
class Life:
    """A job, from the moment it asked to the moment its nodes were taken away. One that was put back has several."""

    job: str
    submit: float
    start: float
    end: float


@dataclass(frozen=True)
class Task:
    """Who one of the processes is that the scheduler has started together."""

    rank: int
    local_rank: int
    count: int
    node: int
    nodes: int
    processors: int = 0  # that the step has on this node; 0: unknown


@dataclass(frozen=True)
class Size:
    nodes: int
    ranks: int  # of a node
    cores: int  # of a node


@dataclass(frozen=True)
class Where:
    """In the cluster."""

    partition: str | None
    account: str | None
    constraint: str | None = None  # features of its nodes
    qos: str | None = None


@dataclass(frozen=True)
class Choice:
    """What a profile leaves open, found."""

    taken: dict[str, str]
    left: list[str]  # to the user: a line of the site's file for every answer that there is
    missing: list[str]  # what there is no answer to, and why
    variables: Sequence[str] = ()  # of the environment, that answer too


def site_line(name: str, value: str) -> str:
    """Of the site's file."""
    return f"{name}: {json.dumps(value)}"  # quoted: `all` or `2024` would be something else than a name


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
