"""The ledger of a run's attempts: a line when one starts and a line when it ends, on disk before anything goes on.

Append-only. What a killed supervisor could not write, the next one adds (`cause` lost, or what SLURM says of it).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from megaboa.causes import FREE, NODE_CAUSES, REPEATABLE, Cause
from megaboa.files import append_line, read_jsonl
from megaboa.results import RunStore
from megaboa.run.patience import patiently

Outcome = Literal["completed", "failed", "interrupted"]
Entry = dict[str, Any]


def record_start(
    ledger: Path,
    attempt: int,
    resumed_from: int,
    world_size: int,
    *,
    parent: str | None = None,
    job: str | None = None,
    restarts: int | None = None,
    nodes: Sequence[str] = (),
    image: str | None = None,
    skipped: Sequence[Sequence[int]] = (),
    ran_on: dict[str, Any] | None = None,
) -> None:
    _append(
        ledger,
        event="start",
        attempt=attempt,
        host=socket.gethostname(),
        pid=os.getpid(),
        job=job,
        restarts=restarts,
        nodes=list(nodes),
        image=image,
        resumed_from=resumed_from,
        parent=parent,
        world_size=world_size,
        skipped=[list(steps) for steps in skipped],
        ran_on=ran_on,
    )


def record_end(
    ledger: Path,
    attempt: int,
    outcome: Outcome,
    iteration: int,
    detail: str,
    *,
    cause: Cause | None = None,
    action: str | None = None,
    bad_nodes: Sequence[str] = (),
    first_step: int | None = None,
    last_step: int | None = None,
    **more: Any,
) -> None:
    _append(
        ledger,
        event="end",
        attempt=attempt,
        outcome=outcome,
        cause=cause,
        action=action,
        detail=detail,
        bad_nodes=list(bad_nodes),
        first_step=first_step,
        last_step=last_step,
        iteration=iteration,
        **more,
    )


def record(ledger: Path, event: str, **fields: Any) -> None:
    """Something between attempts: a node that is avoided, a checkpoint that is no longer trusted."""
    _append(ledger, event=event, **fields)


def next_attempt(store: RunStore) -> int:
    """Never the number of a folder that is there: a ledger may have lost lines."""
    told = (entry["attempt"] for entry in read_jsonl(store.ledger) if "attempt" in entry)
    return max(max(told, default=0), store.newest_attempt) + 1


def starts(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry["event"] == "start"]


def ends(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry["event"] == "end"]


def open_attempt(entries: Sequence[Entry]) -> Entry | None:
    """The start of an attempt whose end nobody wrote down."""
    begun, ended = starts(entries), {entry["attempt"] for entry in ends(entries)}
    return begun[-1] if begun and begun[-1]["attempt"] not in ended else None


def failures_in_a_row(entries: Sequence[Entry]) -> int:
    """Ends that use up the budget, since the last one that left a newer checkpoint, or since a person called again."""
    count, reached = 0, 0
    for entry in entries:
        if entry["event"] == "call":
            count = 0
        count += entry["event"] == "unhealthy"
        if entry["event"] != "end":
            continue
        progressed = entry["iteration"] > reached
        reached = max(reached, entry["iteration"])
        spends = entry["outcome"] == "failed" and entry.get("cause") not in FREE
        count = (0 if progressed else count) + spends
    return count


def links_without_progress(entries: Sequence[Entry]) -> int:
    """Jobs of a chain that ended, one after the other, with the checkpoint that they began with."""
    begun = {start["attempt"]: start["resumed_from"] for start in starts(entries)}
    count = 0
    for end in ends(entries):
        idle = end.get("cause") == "time_limit" and end["iteration"] <= begun.get(end["attempt"], 0)
        count = count + 1 if idle else 0
    return count


def links_without_save(entries: Sequence[Entry]) -> int:
    """Jobs of a chain whose wall time ended, one after the other, before the save of their last step was over."""
    count = 0
    for end in ends(entries):
        if end.get("cause") == "time_limit":
            count = count + 1 if (end.get("last_step") or 0) > end["iteration"] else 0
    return count


def fails_again_at(entries: Sequence[Entry]) -> int | None:
    """The step that the last two ends of this call failed at, where that is no accident."""
    own = _since_call(entries)
    last = [entry for entry in ends(own) if entry.get("cause") not in FREE][-2:]
    if len(last) < 2 or any(entry.get("cause") not in REPEATABLE for entry in last):
        return None
    if all(entry.get("last_step") is None for entry in last):  # no step's fault
        return None
    begun = {start["attempt"]: start["resumed_from"] for start in starts(own)}
    # Who fails in the first step after a checkpoint has done none.
    before, again = (entry.get("last_step") or begun.get(entry["attempt"]) for entry in last)
    return again + 1 if again and before == again else None


def avoided_nodes(entries: Sequence[Entry], now: float, hours: float) -> dict[str, float]:
    """Nodes that failed under this run not long ago, each with the last time."""
    blamed = [entry for entry in entries if entry["event"] == "unhealthy" or entry.get("cause") in NODE_CAUSES]
    recent = [entry for entry in blamed if now - entry["time"] < hours * 3600]
    return {node: entry["time"] for entry in recent for node in entry.get("bad_nodes", ())}


def left_in_a_row(entries: Sequence[Entry]) -> int:
    """How often the run has just left nodes that it avoids, without having tried."""
    count = 0
    for entry in entries:
        count = count + 1 if entry["event"] == "left" else count * (entry["event"] != "start")
    return count


def ran_on(entries: Sequence[Entry]) -> list[Entry]:
    """What the attempts of a run ran on, each once, in the order in which it came; nothing where nobody wrote it."""
    found: list[Entry] = []
    for start in starts(entries):
        known = start.get("ran_on")
        same = next((kind for kind in found if known and all(kind.get(name) == known[name] for name in known)), None)
        if same:
            same["attempts"].append(start["attempt"])
        elif known:
            found.append({**known, "attempts": [start["attempt"]]})
    return found


def set_aside_unread(entries: Sequence[Entry]) -> Entry | None:
    """The checkpoint that was set aside because ranks failed to load it, if they have loaded none since."""
    found = None
    for entry in entries:
        if entry["event"] == "trust" or (entry["event"] == "end" and entry.get("last_step") is not None):
            found = None
        elif entry["event"] == "distrust" and entry.get("unread"):
            found = entry
    return found


def skipped_steps(entries: Sequence[Entry]) -> list[list[int]]:
    """First and last step of every range whose batches are left out."""
    return [entry["steps"] for entry in entries if entry["event"] == "skip"]


def _since_call(entries: Sequence[Entry]) -> list[Entry]:
    begin = max((number for number, entry in enumerate(entries) if entry["event"] == "call"), default=-1)
    return list(entries[begin + 1 :])


def _append(ledger: Path, **entry: Any) -> None:
    line = json.dumps({"time": time.time(), **entry}, sort_keys=True)
    patiently(lambda: append_line(ledger, line))  # what follows relies on this line
