"""What a rank waits for, written when its supervisor asks, or when it fails: torch's record of its collectives, who
is in which group, and where its main thread stands. `megaboa.run.flight` reads it.

A rank that hangs in a collective runs no Python handler. So the signal's C handler wakes a thread of its own.
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
from collections import Counter
from pathlib import Path
from typing import Any

from megaboa.scheduler.ranks import STACKS_SIGNAL

PREFIX = "TORCH_FR_DUMP_TEMP_FILE"  # where dumps go: the rank's number follows
CALLS = 50  # of each group
FRAMES = 12  # of the main thread, innermost first
WANTED = (True, False, False)  # collectives, but not their stacks, whose names take seconds to find; ended ones too
OTHER = "other "  # before the number of a group that isn't NCCL's
MOVES_SECONDS = 2.0  # between two looks, that tell ranks that are slow from those that hang


def on_signal() -> None:
    """Write the stacks of all threads to the log, and the record to its file, when the supervisor asks for them."""
    hears, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(STACKS_SIGNAL, lambda number, frame: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    faulthandler.register(STACKS_SIGNAL, all_threads=True, chain=True)  # then the handler above, which wakes the thread

    def listen() -> None:
        while numbers := os.read(hears, 64):
            if STACKS_SIGNAL in numbers and (first := write()):  # at once, as the rank may be ended at any time
                time.sleep(MOVES_SECONDS)
                write(first)

    threading.Thread(target=listen, daemon=True, name="flight").start()


def write(before: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """What was written. Whatever is wrong with it: the rank has other troubles now.

    `before`: what was written some time ago; whether there was progress since then is told, too.
    """
    prefix, torch = os.environ.get(PREFIX), sys.modules.get("torch")
    if not prefix or torch is None or "RANK" not in os.environ:
        return None
    try:
        path = Path(f"{prefix}{os.environ['RANK']}.json")
        dump = _dump()
        if before:
            dump["moved"] = _states(dump) != _states(before)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(dump), encoding="utf-8")
        temporary.replace(path)
        return dump
    except Exception as error:
        print(f"the flight recorder's dump could not be written: {error!r}", file=sys.stderr, flush=True)
        return None


def _states(dump: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Of the last calls; another one, or one that has ended, is progress."""
    return [(entry["process_group"][0], entry["collective_seq_id"], entry["state"]) for entry in dump["entries"]]


def _dump() -> dict[str, Any]:
    from torch._C import _distributed_c10d as c10d
    from torch.distributed import distributed_c10d

    nccl = getattr(c10d, "_dump_nccl_trace", None)  # a build without NCCL has none
    records = [pickle.loads(ask(*WANTED)) for ask in (c10d._dump_fr_trace, nccl) if ask]
    dump, world = merged(*records), distributed_c10d._world
    groups = {name: sorted(world.pg_group_ranks.get(group, ())) for group, name in world.pg_names.items()}
    return {**dump, "entries": _last(dump["entries"]), "groups": groups, "stack": _main_stack()}


def merged(record: dict[str, Any], nccl: dict[str, Any] | None = None) -> dict[str, Any]:
    """Torch has one recorder for NCCL and one for all other backends. Both number their groups from 0.

    Of a group that has two backends only NCCL's calls are kept: each backend numbers them for itself.
    """
    if not nccl or not nccl["entries"]:
        return record
    both = {entry["process_group"][0] for entry in nccl["entries"]}
    others = [entry for entry in record["entries"] if entry["process_group"][0] not in both]
    renumbered = [{**entry, "pg_id": f"{OTHER}{entry['pg_id']}"} for entry in others]
    status = {f"{OTHER}{number}": one for number, one in record["pg_status"].items()}
    return {**nccl, "entries": [*renumbered, *nccl["entries"]], "pg_status": {**status, **nccl["pg_status"]}}


def _last(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last calls of each group: of thousands of ranks everything would be too much to read."""
    kept, seen = [], Counter()
    for entry in reversed(entries):
        seen[entry["process_group"][0]] += 1
        if seen[entry["process_group"][0]] <= CALLS:
            kept.append(entry)
    return kept[::-1]


def _main_stack() -> list[str]:
    frame, found = sys._current_frames().get(threading.main_thread().ident), []
    while frame and len(found) < FRAMES:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return found
