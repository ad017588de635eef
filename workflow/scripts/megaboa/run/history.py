"""What happened to a run, in words: its ledger read for people. Standard library only.

An entry may be of an older form, without a cause, a job or nodes.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence

from megaboa.causes import CAUSES
from megaboa.records import AttemptEnd, AttemptStart, Called, Cancelled, Distrusted, Event, LeftOut, Trusted, Unhealthy


def last_event(entries: Sequence[Event]) -> tuple[str, float] | None:
    """The newest entry that says something, and when it was written."""
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
        case other:
            return _between(other)


def brief(nodes: Sequence[str]) -> str:
    """`login,n[1-3,7]`, as SLURM writes it."""
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
    detail = end.detail or _cause(end)
    return f"starts again: {detail}" if end.action == "resume" else f"stopped: {detail}"


def _cause(entry: Event) -> str:
    if not isinstance(entry, AttemptEnd):  # a start, whose end was never written
        return CAUSES["lost"].noun
    noun = CAUSES[entry.cause].noun if entry.cause in CAUSES else entry.cause or "failure"
    return f"{noun} of {brief(entry.bad_nodes)}" if entry.bad_nodes else noun
