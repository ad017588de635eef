"""What happened to a run, in words: its ledger read for people. Standard library only.

An entry may be of an older form, without a cause, a job or nodes, or of a kind that is not known here.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from megaboa.causes import CAUSES

Entry = dict[str, Any]


def last_event(entries: Sequence[Entry]) -> tuple[str, float] | None:
    """The newest entry that says something, and when it was written."""
    for number in reversed(range(len(entries))):
        if text := _TEXTS.get(entries[number]["event"], _nothing)(entries, number):
            return text, entries[number]["time"]
    return None


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


def _start(entries: Sequence[Entry], number: int) -> str:
    step = entries[number].get("resumed_from")
    ended = max((place for place in range(number) if entries[place]["event"] in ("start", "end")), default=None)
    parent = entries[number].get("parent")
    beginning = (
        f"goes on from {parent}"
        if parent
        else f"resumed from {step}"
        if step
        else "started"
        if ended is None
        else "started from the beginning"
    )
    since = entries[0 if ended is None else ended + 1 : number]
    notes = [text for entry in since if (text := _between(entry))]
    if ended is None:
        why = ""
    elif any(entry["event"] == "call" for entry in since):
        why = " by a new call"
    else:
        why = f" after {_cause(entries[ended])}"
    return "; ".join([beginning + why, *notes])


def _between(entry: Entry) -> str:
    if entry["event"] == "skip":
        first, last = entry["steps"]
        return f"steps {first} to {last} are left out"
    if entry["event"] == "distrust":
        return f"checkpoint {entry['iteration']} was set aside"
    if entry["event"] == "trust":
        return f"checkpoint {entry['iteration']} was put back"
    return ""


def _end(entries: Sequence[Entry], number: int) -> str:
    end = entries[number]
    if end["outcome"] == "completed":
        return "finished"
    if end.get("action") == "requeue":
        return f"queued again: {_cause(end)}"
    detail = end.get("detail") or _cause(end)
    return f"starts again: {detail}" if end.get("action") == "resume" else f"stopped: {detail}"


def _cause(entry: Entry) -> str:
    if entry["event"] == "start":  # its end was never written
        return CAUSES["lost"].noun
    cause = entry.get("cause") or "failure"
    noun = CAUSES[cause].noun if cause in CAUSES else cause
    return f"{noun} of {brief(entry['bad_nodes'])}" if entry.get("bad_nodes") else noun


def _unhealthy(entries: Sequence[Entry], number: int) -> str:
    return f"unhealthy: {entries[number].get('detail') or brief(entries[number].get('bad_nodes', ()))}"


def _called(entries: Sequence[Entry], number: int) -> str:
    return "called again" if number else "called"


def _nothing(entries: Sequence[Entry], number: int) -> str:
    return ""


_TEXTS = {
    "start": _start,
    "end": _end,
    "unhealthy": _unhealthy,
    "call": _called,
    "cancelled": lambda entries, number: f"stopped: {entries[number].get('detail') or CAUSES['cancelled'].noun}",
    "skip": lambda entries, number: _between(entries[number]),
    "distrust": lambda entries, number: _between(entries[number]),
    "trust": lambda entries, number: _between(entries[number]),
}
