"""Where a run's time went, over all its attempts: every second of the wall time belongs to exactly one kind."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from megaboa.observe.accounting import Life
from megaboa.observe.numbers import WARMUP_STEPS
from megaboa.observe.steps import Row
from megaboa.observe.summary import timed_rows

# `away`: nobody had asked for the run, after a stop or a failure that ends it. Only `queue` and `away` hold no machine.
KINDS = ("queue", "startup", "compile", "productive", "checkpoint", "evaluation", "lost", "idle", "away")
NOT_ALLOCATED = ("queue", "away")

Entry = dict[str, Any]
Span = tuple[str, float, float]


def goodput(
    entries: Sequence[Entry], events: Sequence[Entry], rows: Sequence[Row], lives: Sequence[Life] | None = None
) -> dict[str, Any] | None:
    """The ledger, from attempts.jsonl, the attempts' events, the step rows and SLURM's accounts; None: no attempt."""
    attempts = list(_attempts(entries, events))
    if not attempts:
        return None
    timed = timed_rows([row for row in rows if not row["replayed"]])
    usual = statistics.median(row["seconds"] for row in timed) if timed else None
    undone = {(row["step"], row["attempt"]) for row in rows if row["replayed"]}
    spans: list[Span] = []
    per_attempt = []
    before = _begin(entries, lives)
    wall = attempts[-1][2] - before
    for start, own, end, outcome in attempts:
        gap = list(_between(before, start["time"], entries, lives))
        inside = list(_inside(start["time"], end, own, undone, start["attempt"], usual))
        spans += [*gap, *inside]
        per_attempt.append(
            {"attempt": start["attempt"], **outcome, "seconds": _sums(inside), "phases": _phases(start["time"], own)}
        )
        before = max(before, end)
    seconds = _sums(spans)
    allocated = sum(value for kind, value in seconds.items() if kind not in NOT_ALLOCATED)
    return {
        "wall_seconds": wall,
        "allocated_seconds": allocated,
        "seconds": seconds,
        "goodput": seconds["productive"] / allocated if allocated else None,
        "rank_hours": sum((end - start["time"]) * start.get("world_size", 1) / 3600 for start, _, end, _ in attempts),
        "accounting": "ledger" if lives is None else "sacct",
        "attempts": per_attempt,
    }


def _attempts(entries: Sequence[Entry], events: Sequence[Entry]) -> Iterator[tuple[Entry, list[Entry], float, Entry]]:
    """Start, events, end and outcome of each. Where nobody wrote the end down, it is that of the last event."""
    ends = {entry["attempt"]: entry for entry in entries if entry["event"] == "end"}
    for start in (entry for entry in entries if entry["event"] == "start"):
        number = start["attempt"]
        own = sorted((event for event in events if event["attempt"] == number), key=lambda event: event["time"])
        last = max([start["time"], *(event["time"] for event in own)])
        end = ends.get(number, {})
        # An end that the next life of the supervisor wrote says when that began.
        late = end.get("cause") == "lost" or not end
        outcome = {"outcome": end.get("outcome"), "cause": end.get("cause")}
        yield start, own, last if late else max(last, end["time"]), outcome


def _begin(entries: Sequence[Entry], lives: Sequence[Life] | None) -> float:
    first = min(entry["time"] for entry in entries)
    return min([first, *(life.submit for life in lives or ())])


def _between(begin: float, end: float, entries: Sequence[Entry], lives: Sequence[Life] | None) -> Iterator[Span]:
    """The time in which no rank ran."""
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


def _between_by_ledger(begin: float, end: float, entries: Sequence[Entry]) -> Iterator[Span]:
    """Without accounts: a job that was put back waits until it starts again; a new call begins a new life."""
    calls = [entry["time"] for entry in entries if entry["event"] == "call" and begin <= entry["time"] <= end]
    put_back = any(
        entry["event"] in ("end", "left", "unhealthy") and entry.get("action", "requeue") == "requeue"
        for entry in entries
        if begin <= entry["time"] <= end and entry["event"] != "call"
    )
    if calls:
        yield ("queue" if put_back else "away"), begin, calls[-1]
        yield "startup", calls[-1], end
    else:
        yield ("queue" if put_back else "idle"), begin, end


def _inside(
    begin: float, end: float, events: Sequence[Entry], undone: set[tuple[int, int]], attempt: int, usual: float | None
) -> Iterator[Span]:
    """An attempt's time. What an event says of its length ends with the event; what is left between them is idle."""
    cursor, steps, started = begin, 0, False
    for event in events:
        kind, time = event["event"], max(event["time"], cursor)
        if kind in ("phase", "train_start"):
            started = started or kind == "train_start"
            yield "startup", cursor, time
        elif kind in ("step", "save", "eval", "test"):
            # Older files don't say how long an evaluation took.
            length = event.get("seconds")
            middle = cursor if length is None else max(cursor, time - length)
            yield ("idle" if started else "startup"), cursor, middle
            if kind == "step":
                steps += 1
                started = True
                yield from _step(middle, time, (event["step"], attempt) in undone, steps, usual)
            else:
                yield ("checkpoint" if kind == "save" else "evaluation"), middle, time
        else:
            yield "idle", cursor, time
        cursor = time
    yield ("idle" if started else "startup"), cursor, max(cursor, end)


def _step(begin: float, end: float, undone: bool, number: int, usual: float | None) -> Iterator[Span]:
    """The first steps compile kernels, capture graphs and connect ranks: what they take beyond the usual."""
    if undone:
        yield "lost", begin, end
        return
    useful = min(begin + usual, end) if usual is not None and number <= WARMUP_STEPS else end
    yield "productive", begin, useful
    yield "compile", useful, end


def _phases(begin: float, events: Sequence[Entry]) -> dict[str, float]:
    """Seconds from an attempt's start until its ranks had come so far."""
    named = {
        event.get("phase", event["event"]): event for event in events if event["event"] in ("phase", "train_start")
    }
    return {name: event["time"] - begin for name, event in named.items()}


def _sums(spans: Sequence[Span]) -> dict[str, float]:
    sums = dict.fromkeys(KINDS, 0.0)
    for kind, begin, end in spans:
        sums[kind] += end - begin
    return sums
