"""Which code allocated the tensors that existed at the peak, from memory snapshots (`profile: {tool: memory}`).

    python benchmarks/memory_peak.py FILE.pickle

A snapshot has allocations since the first captured step, and the newest million of them. What was there before
(weights, optimizer) isn't listed. With each place of the code its bytes, and the number of tensors.
"""

from __future__ import annotations

import argparse
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

GIB = 2**30
FRAMES = 4  # number of Python frames shown, innermost first
OWN = ("/torch/", "/threading.py", "/contextlib.py")  # code that allocates on behalf of others, and is skipped
Event = Mapping[str, Any]


class Plain(pickle.Unpickler):
    """Unpickles plain data only. It refuses classes and functions, because unpickling would call them."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a snapshot has no {module}.{name}")


@dataclass(frozen=True)
class Kept:
    place: str
    bytes: int
    tensors: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("snapshots", type=Path, nargs="+")
    parser.add_argument("--least", type=float, default=0.05, help="GiB of a place that is listed")
    asked = parser.parse_args()
    for path in asked.snapshots:
        with path.open("rb") as stream:
            snapshot = Plain(stream).load()
        for device, trace in enumerate(snapshot["device_traces"]):
            if trace:
                print("\n".join(told(f"{path}, GPU {device}", at_peak(trace), asked.least)))


def at_peak(trace: Iterable[Event]) -> list[Kept]:
    """The allocations at the peak, largest first."""
    events = [event for event in trace if event["action"] in ("alloc", "free_completed")]
    # memory that is freed here may have been allocated before the trace
    changes = (event["size"] if event["action"] == "alloc" else -event["size"] for event in events)
    taken = list(accumulate(changes, initial=0))
    kept: dict[int, Event] = {}
    for event in events[: taken.index(max(taken))]:
        if event["action"] == "alloc":
            kept[event["addr"]] = event
        else:
            kept.pop(event["addr"], None)
    places = defaultdict(list)
    for event in kept.values():
        places[place(event.get("frames", ()))].append(event["size"])
    found = [Kept(name, sum(sizes), len(sizes)) for name, sizes in places.items()]
    return sorted(found, key=lambda one: one.bytes, reverse=True)


def place(frames: Iterable[Event]) -> str:
    """The Python frames of an allocation. In the backward pass there may be none."""
    python = [frame for frame in frames if frame["filename"].endswith(".py")]
    others = [frame for frame in python if not any(part in frame["filename"] for part in OWN)] or python
    calls = [f"{Path(one['filename']).name}:{one['line']} {one['name']}" for one in others[:FRAMES]]
    return " < ".join(calls) or "(no Python)"


def told(what: str, found: list[Kept], least: float) -> list[str]:
    listed = [one for one in found if one.bytes >= least * GIB]
    rest = sum(one.bytes for one in found) - sum(one.bytes for one in listed)
    lines = [f"{what}: {sum(one.bytes for one in found) / GIB:.2f} GiB since the first captured step", ""]
    lines += ["| GiB | tensors | where |", "|---:|---:|---|"]
    lines += [f"| {one.bytes / GIB:.2f} | {one.tensors} | {one.place} |" for one in listed]
    return [*lines, f"| {rest / GIB:.2f} | | less than {least:g} GiB each |"]


if __name__ == "__main__":
    main()
