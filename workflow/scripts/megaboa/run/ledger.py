"""The ledger of a run's attempts: a line for every start and end, on disk before anything continues.

It is append-only. If a killed supervisor could not write an end, the next one adds it, with the cause `lost` or the
scheduler's. The end of this module formats the ledger for people; entries of older versions may lack a cause, a job or
nodes.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megaboa.causes import CAUSES, FREE, NODE_CAUSES, REPEATABLE
from megaboa.files import append_line, digest
from megaboa.records import (
    AttemptEnd,
    AttemptStart,
    Called,
    Cancelled,
    Distrusted,
    Event,
    GaveUp,
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
from megaboa.store_paths import RunStore


def append(ledger: Path, event: Event) -> None:
    text = line(event)
    patiently(lambda: append_line(ledger, text))  # nothing may go on without this line


def next_attempt(store: RunStore) -> int:
    """Number of the next attempt. Existing folders count too, because a ledger may have lost lines."""
    told = (event.attempt for event in read_ledger(store.ledger) if isinstance(event, AttemptStart | AttemptEnd))
    return max(max(told, default=0), store.newest_attempt) + 1


def starts(entries: Sequence[Event]) -> list[AttemptStart]:
    return [entry for entry in entries if isinstance(entry, AttemptStart)]


def ends(entries: Sequence[Event]) -> list[AttemptEnd]:
    return [entry for entry in entries if isinstance(entry, AttemptEnd)]


def last_step(entries: Sequence[Event], before: int) -> int:
    """The last step of the latest earlier attempt that did any; 0 if none."""
    done = [end.last_step for end in ends(entries) if end.attempt < before and end.last_step is not None]
    return done[-1] if done else 0


def open_attempt(entries: Sequence[Event]) -> AttemptStart | None:
    """The start of an attempt whose end is not recorded."""
    begun, ended = starts(entries), {end.attempt for end in ends(entries)}
    return begun[-1] if begun and begun[-1].attempt not in ended else None


def failures_in_a_row(entries: Sequence[Event]) -> int:
    """Number of ends that use up the budget, since the last progress (a newer checkpoint, or newer copies to start
    from) or the last call by a person."""
    count, reached = 0, 0
    for entry in entries:
        if isinstance(entry, Called):
            count = 0
        count += isinstance(entry, Unhealthy)
        if not isinstance(entry, AttemptEnd):
            continue
        newest = max(entry.iteration, entry.local or 0)
        progressed = newest > reached
        reached = max(reached, newest)
        spends = entry.outcome == "failed" and entry.cause not in FREE
        count = (0 if progressed else count) + spends
    return count


def links_without_progress(entries: Sequence[Event]) -> int:
    """Number of consecutive jobs in the chain that ended without a newer checkpoint than they started from."""
    begun = {start.attempt: start.resumed_from for start in starts(entries)}
    count = 0
    for end in ends(entries):
        idle = end.cause == "time_limit" and end.iteration <= begun.get(end.attempt, 0)
        count = count + 1 if idle else 0
    return count


def links_without_save(entries: Sequence[Event]) -> int:
    """Number of consecutive jobs in the chain whose wall time ended before their last step was saved."""
    count = 0
    for end in ends(entries):
        if end.cause == "time_limit":
            count = count + 1 if (end.last_step or 0) > end.iteration else 0
    return count


def fails_again_at(entries: Sequence[Event]) -> int | None:
    """The step at which the last two attempts of this call both failed, if that is reproducible."""
    own = _since_call(entries)
    # Without attempts that did no step after loading copies: the copies may be at fault, and the next uses the
    # checkpoint.
    judged = [end for end in ends(own) if end.cause not in FREE and not (end.local and end.last_step is None)]
    last = judged[-2:]
    if len(last) < 2 or any(end.cause not in REPEATABLE for end in last):
        return None
    if all(end.last_step is None for end in last):  # not a step's fault
        return None
    if set.intersection(*(set(end.bad_nodes) for end in last)):  # a node's fault
        return None
    begun = {start.attempt: start.resumed_from for start in starts(own)}
    # An attempt that fails in the first step after a checkpoint has no last step.
    before, again = (end.last_step or begun.get(end.attempt) for end in last)
    return again + 1 if again and before == again else None


def avoided_nodes(entries: Sequence[Event], now: float, hours: float) -> dict[str, float]:
    """Nodes that failed recently under this run, with the time of the last failure.

    If ranks froze on a node, that may be chance, so the node is only avoided after the second time.
    """
    blamed = [entry for entry in entries if isinstance(entry, Unhealthy | AttemptEnd) and entry.bad_nodes]
    recent = [entry for entry in blamed if now - entry.time < hours * 3600]
    found, froze = {}, set()
    for entry in recent:
        certain = isinstance(entry, Unhealthy) or entry.cause in NODE_CAUSES
        found |= {node: entry.time for node in entry.bad_nodes if certain or node in froze}
        froze |= set() if certain else set(entry.bad_nodes)
    return found


def left_in_a_row(entries: Sequence[Event]) -> int:
    """How often in a row the run has left its nodes because it avoids them, without starting an attempt."""
    count = 0
    for entry in entries:
        count = count + 1 if isinstance(entry, Left) else count * (not isinstance(entry, AttemptStart))
    return count


def ran_on(entries: Sequence[Event]) -> list[RanOn]:
    """The distinct software of a run's attempts, in order; empty if not recorded."""
    found: dict[str, RanOn] = {}
    for start in starts(entries):
        if start.ran_on:
            key = digest(plain(start.ran_on))
            same = found.get(key, start.ran_on)
            found[key] = replace(same, attempts=(*same.attempts, start.attempt))
    return list(found.values())


def set_aside_unread(entries: Sequence[Event]) -> Distrusted | None:
    """The checkpoint set aside because ranks failed to load it, unless ranks have loaded a checkpoint since."""
    found = None
    for entry in entries:
        if isinstance(entry, Trusted) or (isinstance(entry, AttemptEnd) and entry.last_step is not None):
            found = None
        elif isinstance(entry, Distrusted) and entry.unread:
            found = entry
    return found


def skipped_steps(entries: Sequence[Event]) -> list[Range]:
    """First and last step of every range whose batches are skipped."""
    return [entry.steps for entry in entries if isinstance(entry, LeftOut)]


def _since_call(entries: Sequence[Event]) -> list[Event]:
    begin = max((number for number, entry in enumerate(entries) if isinstance(entry, Called)), default=-1)
    return list(entries[begin + 1 :])


def last_event(entries: Sequence[Event]) -> tuple[str, float] | None:
    """The text and time of the newest entry that has a text."""
    for number in reversed(range(len(entries))):
        if text := _text(entries, number):
            return text, entries[number].time
    return None


def _text(entries: Sequence[Event], number: int) -> str:
    match entries[number]:
        case AttemptStart() as start:
            return _start(entries, number, start)
        case AttemptEnd() as end:
            return _end(end)
        case Unhealthy() as refused:
            return f"unhealthy: {refused.detail or brief(refused.bad_nodes)}"
        case Called():
            return "called again" if number else "called"
        case Cancelled() as cancelled:
            return f"stopped: {cancelled.detail or CAUSES['cancelled'].noun}"
        case GaveUp() as gave_up:
            return f"stopped: {gave_up.detail}"
        case other:
            return _between(other)


def brief(nodes: Sequence[str]) -> str:
    """A short form of node names as schedulers write it: `login,n[1-3,7]`."""
    split = {node: re.fullmatch(r"(.*?)(\d+)", node) for node in nodes}
    padded = {found[1] for found in split.values() if found and found[2].startswith("0")}
    parts, numbers = [node for node, found in split.items() if not found], defaultdict(list)
    for found in filter(None, split.values()):
        width = len(found[2]) if found[1] in padded else 1
        numbers[found[1], width].append(int(found[2]))
    for (prefix, width), group in numbers.items():
        spans = [f"{first:0{width}}" + (f"-{last:0{width}}" if last > first else "") for first, last in _spans(group)]
        parts.append(prefix + (spans[0] if len(group) == 1 else f"[{','.join(spans)}]"))
    return ",".join(parts)


def _spans(numbers: list[int]) -> list[tuple[int, int]]:
    groups = itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in group] for _, group in groups]
    return [(span[0], span[-1]) for span in spans]


def _start(entries: Sequence[Event], number: int, start: AttemptStart) -> str:
    before = (place for place in range(number) if isinstance(entries[place], AttemptStart | AttemptEnd))
    ended = max(before, default=None)
    beginning = (
        f"continues from {start.parent}"
        if start.parent
        else f"resumed from {start.resumed_from}"
        if start.resumed_from
        else "started"
        if ended is None
        else "started from the beginning"
    )
    since = entries[0 if ended is None else ended + 1 : number]
    notes = [text for entry in since if (text := _between(entry))]
    if ended is None:
        why = ""
    elif any(isinstance(entry, Called) for entry in since):
        why = " by a new call"
    else:
        why = f" after {_cause(entries[ended])}"
    return "; ".join([beginning + why, *notes])


def _between(entry: Event) -> str:
    match entry:
        case LeftOut(steps=(first, last)):
            return f"steps {first} to {last} are left out"
        case Distrusted(iteration=iteration):
            return f"checkpoint {iteration} was set aside"
        case Trusted(iteration=iteration):
            return f"checkpoint {iteration} was put back"
    return ""


def _end(end: AttemptEnd) -> str:
    if end.outcome == "completed":
        return "finished"
    if end.action == "requeue":
        return f"queued again: {_cause(end)}"
    detail = why(end) or _cause(end)
    return f"starts again: {detail}" if end.action == "resume" else f"stopped: {detail}"


def why(end: AttemptEnd) -> str | None:
    """An end's detail. Of one that isn't a failure, without the name of its cause: the state says that it was
    stopped."""
    cause = CAUSES.get(end.cause)
    if end.detail is None or cause is None or not cause.interrupts:
        return end.detail
    return end.detail.removeprefix(f"{str(end.cause).replace('_', ' ')}: ")


def _cause(entry: Event) -> str:
    if not isinstance(entry, AttemptEnd):  # a start whose end was never recorded
        return CAUSES["lost"].noun
    noun = CAUSES[entry.cause].noun if entry.cause in CAUSES else entry.cause or "failure"
    return f"{noun} of {brief(entry.bad_nodes)}" if entry.bad_nodes else noun
