"""A rank's dump of what it waits for, written when its supervisor asks or when it fails: torch's record of its
collectives, the members of its groups, and the stack of its main thread. `megaboa.run.flight` reads it.

A rank that hangs in a collective runs no Python signal handlers, so the signal's C handler wakes a thread of its own.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from megaboa import files
from megaboa.run.flight import ended_by_group, has_ended
from megaboa.scheduler.ranks import STACKS_SIGNAL

PREFIX = "TORCH_FR_DUMP_TEMP_FILE"  # prefix of the dumps; the rank's number follows
CALLS = 50  # per group, half of them after the first unfinished one
FRAMES = 12  # frames of the main thread, innermost first
WANTED = (True, False, False)  # with collectives and finished calls, but no stacks, which take seconds to symbolize
OTHER = " (not NCCL)"  # suffix for groups of other backends, if NCCL calls are recorded too
MOVES_SECONDS = 2.0  # between the two dumps that distinguish slow ranks from hung ones


def on_signal() -> None:
    """When the supervisor asks, write the stacks of all threads to the log, and the record to its file."""
    hears, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(STACKS_SIGNAL, lambda number, frame: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    faulthandler.register(STACKS_SIGNAL, all_threads=True, chain=True)  # then the handler above, which wakes the thread

    def listen() -> None:
        while numbers := os.read(hears, 64):
            if STACKS_SIGNAL in numbers and (first := answer()):
                time.sleep(MOVES_SECONDS)
                write(first)

    threading.Thread(target=listen, daemon=True, name="flight").start()


def answer() -> dict[str, Any] | None:
    """Write a dump immediately, as the rank may be ended at any time: first without NCCL, then with it.

    NCCL's recorder queries the GPU, which may not answer. The first dump shows that at least the host is alive.
    """
    write(also_nccl=False)
    return write()


def write(before: dict[str, Any] | None = None, also_nccl: bool = True) -> dict[str, Any] | None:
    """Write a dump and return it. Errors are only printed: the rank has other troubles now.

    `before`: an earlier dump; the new one then says whether there was progress since.
    """
    prefix, torch = os.environ.get(PREFIX), sys.modules.get("torch")
    if not prefix or torch is None or "RANK" not in os.environ:
        return None
    try:
        path = Path(f"{prefix}{os.environ['RANK']}.json")
        dump = _dump(also_nccl)
        if before:
            dump["moved"] = _states(dump) != _states(before)
        files.write_bytes(path, json.dumps(dump).encode(), durable=False)
        return dump
    except Exception as error:
        print(f"the flight recorder's dump could not be written: {error!r}", file=sys.stderr, flush=True)
        return None


def _states(dump: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The state of the last calls; any change is progress."""
    return [(entry["process_group"][0], entry["collective_seq_id"], entry["state"]) for entry in dump["entries"]]


def _dump(also_nccl: bool) -> dict[str, Any]:
    from torch._C import _distributed_c10d as c10d

    nccl = getattr(c10d, "_dump_nccl_trace", None) if also_nccl else None  # a build without NCCL has none
    dump = merged(*(pickle.loads(ask(*WANTED)) for ask in (c10d._dump_fr_trace, nccl) if ask))
    entries = _last(dump)
    return {**dump, "entries": entries, "groups": _groups(entries), "stack": _main_stack()}


def merged(record: dict[str, Any], nccl: dict[str, Any] | None = None) -> dict[str, Any]:
    """The records of torch's two recorders, one for NCCL and one for other backends, in one.

    Both number their groups from 0, and each numbers calls separately in groups that have two backends. So groups of
    the other backends get a suffix.
    """
    if not nccl or not nccl["entries"]:
        return record
    others = [
        {**entry, "pg_id": f"{entry['pg_id']}{OTHER}", "process_group": (f"{name}{OTHER}", *about)}
        for entry in record["entries"]
        for name, *about in [entry["process_group"]]
    ]
    status = {f"{number}{OTHER}": one for number, one in record["pg_status"].items()}
    return {**nccl, "entries": [*others, *nccl["entries"]], "pg_status": {**status, **nccl["pg_status"]}}


def _groups(entries: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The members of each group, by the names in the entries."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    groups = {name: sorted(world.pg_group_ranks.get(group, ())) for group, name in world.pg_names.items()}
    also = {entry["process_group"][0] for entry in entries} - groups.keys()
    return groups | {name: groups.get(name.removesuffix(OTHER), []) for name in also}


def _last(dump: dict[str, Any]) -> list[dict[str, Any]]:
    """For each group, the calls around the oldest unfinished one.

    Hundreds of calls may be queued behind it for the GPU, and with thousands of ranks, all of them would take too long
    to read.
    """
    ended = ended_by_group(dump)
    by_group: dict[str, list[int]] = defaultdict(list)
    for place, entry in enumerate(dump["entries"]):
        by_group[entry["process_group"][0]].append(place)
    kept: set[int] = set()
    for places in by_group.values():
        waits = (number for number, place in enumerate(places) if not has_ended(dump["entries"][place], ended))
        end = min(next(waits, len(places)) + CALLS // 2, len(places))
        kept.update(places[max(0, end - CALLS) : end])
    return [dump["entries"][place] for place in sorted(kept)]


def _main_stack() -> list[str]:
    frame, found = sys._current_frames().get(threading.main_thread().ident), []
    while frame and len(found) < FRAMES:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return found
