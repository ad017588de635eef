"""Breaks down a run's wall time over all attempts; every second belongs to exactly one kind."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megaboa.observe.numbers import WARMUP_STEPS
from megaboa.observe.steps import Row
from megaboa.observe.summary import timed_rows
from megaboa.records import (
    BEFORE,
    PHASES,
    AttemptEnd,
    AttemptStart,
    AttemptTime,
    Called,
    Evaluated,
    Event,
    Goodput,
    Left,
    Phase,
    Saved,
    Step,
    StepEvent,
    Tested,
    TrainStart,
)
from megaboa.scheduler.answers import Life
from megaboa.scheduler.registry import cluster

# `away`: the run was not requested, after a stop or a final failure. Only `queue` and `away` hold no machine.
KINDS = ("queue", "startup", "compile", "productive", "checkpoint", "evaluation", "lost", "idle", "away")
NOT_ALLOCATED = ("queue", "away")

# Parts of an attempt's start, in order: before the ranks, until they run, and then what they wait for.
STARTUP = ("scheduler", "environment", "health_check", "checkpoint", "keeper", "launch", "import", "configure")
STARTUP += ("connect", "model", "load", "data", "first_step")
ENDED_BY = {
    "started": "launch",
    "imported": "import",
    "verified": "checkpoint",  # verified while the ranks start
    "configured": "configure",
    "connected": "connect",
    "model": "model",
    "built": "load",
    "train_start": "data",
    "step": "first_step",
}

Span = tuple[str, float, float]


@dataclass(frozen=True)
class Course:
    """The uses of an attempt's time, and of the time before it in which no rank ran."""

    start: AttemptStart
    end: float
    outcome: dict[str, str | None]  # with its cause; None if not recorded
    before: tuple[Span, ...]
    during: tuple[Span, ...]
    events: Sequence[StepEvent]


def courses(
    entries: Sequence[Event], events: Sequence[StepEvent], rows: Sequence[Row], lives: Sequence[Life] | None = None
) -> list[Course]:
    """The time of every attempt, oldest first. Only this function decides what a second was used for."""
    timed = timed_rows([row for row in rows if not row.replayed])
    usual = statistics.median(row.seconds for row in timed) if timed else None
    undone = {(row.step, row.attempt) for row in rows if row.replayed}
    found: list[Course] = []
    before = _begin(entries, lives)
    for start, own, end, outcome in _attempts(entries, events, lives):
        gap = tuple(_between(before, start.time, entries, lives))
        during = tuple(_inside(start.time, end, own, undone, start.attempt, usual))
        found.append(Course(start, end, outcome, gap, during, own))
        before = max(before, end)
    return found


def goodput(
    entries: Sequence[Event], events: Sequence[StepEvent], rows: Sequence[Row], lives: Sequence[Life] | None = None
) -> Goodput | None:
    """The breakdown of a run, by its ledger, events, step rows and the scheduler's accounts; None without attempts."""
    attempts = courses(entries, events, rows, lives)
    if not attempts:
        return None
    per_attempt = [
        AttemptTime(
            attempt=one.start.attempt,
            **one.outcome,
            seconds=_sums(one.during),
            phases=_phases(one.start.time, one.events),
            startup=startup(one.start, one.events, lives),
        )
        for one in attempts
    ]
    seconds = _sums([span for one in attempts for span in (*one.before, *one.during)])
    allocated = sum(value for kind, value in seconds.items() if kind not in NOT_ALLOCATED)
    return Goodput(
        wall_seconds=attempts[-1].end - _begin(entries, lives),
        allocated_seconds=allocated,
        seconds=seconds,
        goodput=seconds["productive"] / allocated if allocated else None,
        accounting="ledger" if lives is None else cluster().accounts,
        attempts=tuple(per_attempt),
    )


def _attempts(
    entries: Sequence[Event], events: Sequence[StepEvent], lives: Sequence[Life] | None
) -> Iterator[tuple[AttemptStart, list[StepEvent], float, dict[str, str | None]]]:
    """Each attempt's start, events, end and outcome. If no end is recorded, the last event is the end."""
    ends = {entry.attempt: entry for entry in entries if isinstance(entry, AttemptEnd)}
    for start in (entry for entry in entries if isinstance(entry, AttemptStart)):
        own = sorted((event for event in events if event.attempt == start.attempt), key=lambda event: event.time)
        last = max([start.time, *(event.time for event in own)])
        end = ends.get(start.attempt)
        # An end recorded by the supervisor's next life has the time of that, not of the end.
        late = end is None or end.cause == "lost"
        outcome = {"outcome": end and end.outcome, "cause": end and end.cause}
        over = last if late else max(last, end.time)
        # Ranks don't outlive their job either: a node's failure is recorded by the job's next life.
        ends_of_jobs = [life.end for life in lives or () if life.start <= start.time < life.end]
        yield start, own, min([over, *ends_of_jobs]), outcome


def _begin(entries: Sequence[Event], lives: Sequence[Life] | None) -> float:
    first = min(entry.time for entry in entries)
    return min([first, *(life.submit for life in lives or ())])


def _between(begin: float, end: float, entries: Sequence[Event], lives: Sequence[Life] | None) -> Iterator[Span]:
    """The uses of a time in which no rank ran."""
    if end <= begin:
        return
    if lives is None:
        yield from _between_by_ledger(begin, end, entries)
        return
    marks = sorted({begin, end, *(m for life in lives for m in (life.submit, life.start, life.end) if begin < m < end)})
    for left, right in itertools.pairwise(marks):
        middle = (left + right) / 2
        holding = next((life for life in lives if life.start <= middle < life.end), None)
        if holding:
            yield ("startup" if holding.start >= begin and holding.end >= end else "idle"), left, right
        else:
            waiting = any(life.submit <= middle < life.start for life in lives)
            yield ("queue" if waiting else "away"), left, right


def _between_by_ledger(begin: float, end: float, entries: Sequence[Event]) -> Iterator[Span]:
    """The same without accounts: a requeued job waits until it starts again; a new call begins a new life."""
    calls = [entry.time for entry in entries if isinstance(entry, Called) and begin <= entry.time <= end]
    put_back = any(
        isinstance(entry, Left) or (isinstance(entry, AttemptEnd) and entry.action == "requeue")
        for entry in entries
        if begin <= entry.time <= end
    )
    if calls:
        yield ("queue" if put_back else "away"), begin, calls[-1]
        yield "startup", calls[-1], end
    else:
        yield ("queue" if put_back else "idle"), begin, end


def _inside(
    begin: float,
    end: float,
    events: Sequence[StepEvent],
    undone: set[tuple[int, int]],
    attempt: int,
    usual: float | None,
) -> Iterator[Span]:
    """The uses of an attempt's time. An event's duration ends at the event; gaps between events are idle."""
    cursor, steps, started = begin, 0, False
    for event in events:
        time = min(max(event.time, cursor), end)  # a rank's clock may be ahead of the scheduler's, whose end counts
        if isinstance(event, Phase | TrainStart):
            started = started or isinstance(event, TrainStart)
            yield "startup", cursor, time
        elif isinstance(event, Step | Saved | Evaluated | Tested):
            # Older files don't have an evaluation's duration.
            middle = cursor if event.seconds is None else max(cursor, time - event.seconds)
            yield ("idle" if started else "startup"), cursor, middle
            if isinstance(event, Step):
                steps += 1
                started = True
                yield from _step(middle, time, (event.step, attempt) in undone, steps, usual)
            else:
                yield ("checkpoint" if isinstance(event, Saved) else "evaluation"), middle, time
        else:
            yield "idle", cursor, time
        cursor = time
    yield ("idle" if started else "startup"), cursor, end


def _step(begin: float, end: float, undone: bool, number: int, usual: float | None) -> Iterator[Span]:
    """The uses of a step. What the first steps take beyond the usual is `compile`: kernels, graphs, connections."""
    if undone:
        yield "lost", begin, end
        return
    useful = min(begin + usual, end) if usual is not None and number <= WARMUP_STEPS else end
    yield "productive", begin, useful
    yield "compile", useful, end


def startup(start: AttemptStart, events: Sequence[StepEvent], lives: Sequence[Life] | None = None) -> dict[str, float]:
    """Seconds of each known part (`STARTUP`) of an attempt's start, up to the end of its first step.

    `keeper` is the part of the launch in which ranks waited for the keeper's import.
    """
    at = {event.phase: event.time for event in events if isinstance(event, Phase)}
    begun = next((event for event in events if isinstance(event, TrainStart)), None)
    first = next((event for event in events if isinstance(event, Step)), None)
    if "started" not in at:  # older files lack the phases
        return {}
    keeper = at.pop("keeper", None)
    parts = {name: value for name, value in start.before.items() if name in BEFORE}
    job = next((life for life in lives or () if life.start <= start.time < life.end), None)
    if job:
        parts = {"scheduler": max(0.0, start.time - sum(start.before.values()) - job.start), **parts}
    moments = [("begin", start.time), *((name, at[name]) for name in PHASES if name in at)]
    moments += [("train_start", begun.time)] if begun else []
    moments += [("step", first.time)] if begun and first else []
    for (_, left), (name, right) in itertools.pairwise(moments):
        parts[ENDED_BY[name]] = parts.get(ENDED_BY[name], 0.0) + right - left
    if keeper is not None and "launch" in parts:
        waited = min(parts["launch"], max(0.0, keeper - start.time))
        parts |= {"launch": parts["launch"] - waited, "keeper": waited}
    return {name: parts[name] for name in STARTUP if name in parts}


def _phases(begin: float, events: Sequence[StepEvent]) -> dict[str, float]:
    """Seconds from an attempt's start until each phase of its ranks."""
    told = [event for event in events if isinstance(event, Phase | TrainStart)]
    return {(event.phase if isinstance(event, Phase) else event.event): event.time - begin for event in told}


def _sums(spans: Sequence[Span]) -> dict[str, float]:
    sums = dict.fromkeys(KINDS, 0.0)
    for kind, begin, end in spans:
        sums[kind] += end - begin
    return sums
