"""The ledger of a run's attempts: a line when one starts and a line when it ends, on disk before anything goes on.

Append-only. What a killed supervisor could not write, the next one adds (`cause` lost, or what SLURM says of it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megaboa.causes import FREE, NODE_CAUSES, REPEATABLE
from megaboa.files import append_line, digest
from megaboa.paths import RunStore
from megaboa.records import (
    AttemptEnd,
    AttemptStart,
    Called,
    Distrusted,
    Event,
    Left,
    LeftOut,
    Range,
    RanOn,
    Trusted,
    Unhealthy,
    line,
    plain,
    read_ledger,
)
from megaboa.run.patience import patiently


def append(ledger: Path, event: Event) -> None:
    text = line(event)
    patiently(lambda: append_line(ledger, text))  # what follows relies on this line


def next_attempt(store: RunStore) -> int:
    """Never the number of a folder that is there: a ledger may have lost lines."""
    told = (event.attempt for event in read_ledger(store.ledger) if isinstance(event, AttemptStart | AttemptEnd))
    return max(max(told, default=0), store.newest_attempt) + 1


def starts(entries: Sequence[Event]) -> list[AttemptStart]:
    return [entry for entry in entries if isinstance(entry, AttemptStart)]


def ends(entries: Sequence[Event]) -> list[AttemptEnd]:
    return [entry for entry in entries if isinstance(entry, AttemptEnd)]


def open_attempt(entries: Sequence[Event]) -> AttemptStart | None:
    """The start of an attempt whose end nobody wrote down."""
    begun, ended = starts(entries), {end.attempt for end in ends(entries)}
    return begun[-1] if begun and begun[-1].attempt not in ended else None


def failures_in_a_row(entries: Sequence[Event]) -> int:
    """Ends that use up the budget, since the last one that left a newer checkpoint, or since a person called again."""
    count, reached = 0, 0
    for entry in entries:
        if isinstance(entry, Called):
            count = 0
        count += isinstance(entry, Unhealthy)
        if not isinstance(entry, AttemptEnd):
            continue
        progressed = entry.iteration > reached
        reached = max(reached, entry.iteration)
        spends = entry.outcome == "failed" and entry.cause not in FREE
        count = (0 if progressed else count) + spends
    return count


def links_without_progress(entries: Sequence[Event]) -> int:
    """Jobs of a chain that ended, one after the other, with the checkpoint that they began with."""
    begun = {start.attempt: start.resumed_from for start in starts(entries)}
    count = 0
    for end in ends(entries):
        idle = end.cause == "time_limit" and end.iteration <= begun.get(end.attempt, 0)
        count = count + 1 if idle else 0
    return count


def links_without_save(entries: Sequence[Event]) -> int:
    """Jobs of a chain whose wall time ended, one after the other, before the save of their last step was over."""
    count = 0
    for end in ends(entries):
        if end.cause == "time_limit":
            count = count + 1 if (end.last_step or 0) > end.iteration else 0
    return count


def fails_again_at(entries: Sequence[Event]) -> int | None:
    """The step that the last two ends of this call failed at, where that is no accident."""
    own = _since_call(entries)
    last = [end for end in ends(own) if end.cause not in FREE][-2:]
    if len(last) < 2 or any(end.cause not in REPEATABLE for end in last):
        return None
    if all(end.last_step is None for end in last):  # no step's fault
        return None
    begun = {start.attempt: start.resumed_from for start in starts(own)}
    # Who fails in the first step after a checkpoint has done none.
    before, again = (end.last_step or begun.get(end.attempt) for end in last)
    return again + 1 if again and before == again else None


def avoided_nodes(entries: Sequence[Event], now: float, hours: float) -> dict[str, float]:
    """Nodes that failed under this run not long ago, each with the last time."""
    blamed = [
        entry
        for entry in entries
        if isinstance(entry, Unhealthy) or (isinstance(entry, AttemptEnd) and entry.cause in NODE_CAUSES)
    ]
    recent = [entry for entry in blamed if now - entry.time < hours * 3600]
    return {node: entry.time for entry in recent for node in entry.bad_nodes}


def left_in_a_row(entries: Sequence[Event]) -> int:
    """How often the run has just left nodes that it avoids, without having tried."""
    count = 0
    for entry in entries:
        count = count + 1 if isinstance(entry, Left) else count * (not isinstance(entry, AttemptStart))
    return count


def ran_on(entries: Sequence[Event]) -> list[RanOn]:
    """What the attempts of a run ran on, each once, in the order in which it came; nothing where nobody wrote it."""
    found: dict[str, RanOn] = {}
    for start in starts(entries):
        if start.ran_on:
            key = digest(plain(start.ran_on))
            same = found.get(key, start.ran_on)
            found[key] = replace(same, attempts=(*same.attempts, start.attempt))
    return list(found.values())


def set_aside_unread(entries: Sequence[Event]) -> Distrusted | None:
    """The checkpoint that was set aside because ranks failed to load it, if they have loaded none since."""
    found = None
    for entry in entries:
        if isinstance(entry, Trusted) or (isinstance(entry, AttemptEnd) and entry.last_step is not None):
            found = None
        elif isinstance(entry, Distrusted) and entry.unread:
            found = entry
    return found


def skipped_steps(entries: Sequence[Event]) -> list[Range]:
    """First and last step of every range whose batches are left out."""
    return [entry.steps for entry in entries if isinstance(entry, LeftOut)]


def _since_call(entries: Sequence[Event]) -> list[Event]:
    begin = max((number for number, entry in enumerate(entries) if isinstance(entry, Called)), default=-1)
    return list(entries[begin + 1 :])
