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
from collections import Counter
from pathlib import Path
from typing import Any

from megaboa.scheduler.ranks import STACKS_SIGNAL

PREFIX = "TORCH_FR_DUMP_TEMP_FILE"  # where dumps go: the rank's number follows
CALLS = 50  # of each group
FRAMES = 12  # of the main thread, innermost first


def on_signal() -> None:
    """Write the stacks of all threads to the log, and the record to its file, when the supervisor asks for them."""
    hears, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(STACKS_SIGNAL, lambda number, frame: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    faulthandler.register(STACKS_SIGNAL, all_threads=True, chain=True)  # then the handler above, which wakes the thread

    def listen() -> None:
        while numbers := os.read(hears, 64):
            if STACKS_SIGNAL in numbers:
                write()

    threading.Thread(target=listen, daemon=True, name="flight").start()


def write() -> None:
    """Whatever is wrong with it: the rank has other troubles now."""
    prefix, torch = os.environ.get(PREFIX), sys.modules.get("torch")
    if not prefix or torch is None or "RANK" not in os.environ:
        return
    try:
        path = Path(f"{prefix}{os.environ['RANK']}.json")
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(_dump()), encoding="utf-8")
        temporary.replace(path)
    except Exception as error:
        print(f"the flight recorder's dump could not be written: {error!r}", file=sys.stderr, flush=True)


def _dump() -> dict[str, Any]:
    from torch._C import _distributed_c10d as c10d
    from torch.distributed import distributed_c10d

    dump = pickle.loads(c10d._dump_fr_trace(True, False, False))  # without stacks, whose names take seconds to find
    world = distributed_c10d._world
    groups = {name: sorted(world.pg_group_ranks.get(group, ())) for group, name in world.pg_names.items()}
    return {**dump, "entries": _last(dump["entries"]), "groups": groups, "stack": _main_stack()}


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
