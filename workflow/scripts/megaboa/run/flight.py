"""Which ranks the others waited for when the run hung, from each rank's record of its last collectives.

The dumps are ours (JSON, `megaboa.bridge.flight`), or NCCL's own at a time-out (pickled), which have no stacks. Ranks
without a dump were unable to write one: their process, or their host, is frozen.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megaboa.formats import some_of

# slow: collectives still completed during the dump, so nothing hangs. frozen: the ranks wrote nothing. stalled: their
# GPUs have not completed what others have. halted: their GPUs have not completed a collective that involves no other
# rank. unbegun: their GPUs have not begun what others have, and are in no other collective. missing: the ranks have not
# joined. mismatch: they called another collective than the others. deadlock: ranks wait for each other. joined: all
# ranks have joined, but no rank completes: the network, or a GPU, is to blame.
Kind = Literal["slow", "frozen", "stalled", "halted", "unbegun", "missing", "mismatch", "deadlock", "joined"]
BLAMES_NODE: tuple[Kind, ...] = ("frozen", "stalled", "halted", "unbegun")
# These also fit GPUs that wait for others in something unrecorded: a CUDA graph, or a kernel that communicates itself.
BLAMES_ONE_NODE: tuple[Kind, ...] = ("halted", "unbegun")
# NCCL's collectives that no rank completes before all have joined; a broadcast isn't one, as its root may finish early.
TOGETHER = re.compile(r"^nccl:_?(?:all|reduce_scatter|coalesced)", re.IGNORECASE)
MOST_BYTES = 1 << 30
LIBRARIES = ("/torch/", "/megatron/core/", "/threading.py", "/contextlib.py")  # their frames say little


@dataclass(frozen=True)
class Call:
    """A collective as called by one rank."""

    number: int
    name: str
    sizes: str
    done: bool
    begun: bool = False  # on the rank's GPU; torch knows that if TORCH_NCCL_ENABLE_TIMING is set

    def __str__(self) -> str:
        return f"{self.name.split(':')[-1]} {self.number}" + (f" of {self.sizes}" if self.sizes else "")


@dataclass(frozen=True)
class Dump:
    """One rank's dump: its calls by group and number, the members of its groups, and the frames of its main thread."""

    calls: Mapping[str, Mapping[int, Call]]
    groups: Mapping[str, frozenset[int]] = field(default_factory=dict)
    stack: tuple[str, ...] = ()
    ended: Mapping[str, int] = field(default_factory=dict)  # by group: number of the last call that ended
    moved: bool = False  # calls began or ended while the dump was written
    between_stages: bool = False  # the rank waits in a send or receive, which `calls` leaves out
    halted: bool = False  # the first call that its GPU has not completed belongs to a group without other ranks

    def last(self, group: str) -> int:
        return max(self.calls.get(group, {}), default=0)

    def waiting(self, group: str) -> Call | None:
        """The oldest call of a group that hasn't ended."""
        return min((call for call in self.calls.get(group, {}).values() if not call.done), key=_number, default=None)


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    ranks: tuple[int, ...]  # the suspects; empty if all ranks have joined
    group: str
    call: Call
    waiting: tuple[int, ...]
    doing: str = ""  # what the first suspect was doing

    def __str__(self) -> str:
        who, there = f"rank {_brief(self.ranks)}", f"{self.call} (group {self.group})"
        wait = f"rank {_brief(self.waiting)} waited in {there}"
        was = f", which was in {self.doing}" if self.doing else ""
        for_whom = f" for {who}{was}" if self.ranks else ""
        gpu = "whose GPU" if len(self.ranks) == 1 else "one of whose GPUs"
        return {
            "halted": f"{wait}{for_whom},{' and' if was else ''} {gpu} stands still",
            "slow": f"{wait}{for_whom}, and collectives ended meanwhile: slow, not hung",
            "frozen": f"{wait} for {who}, which did not even answer",
            "unbegun": f"{there} began on rank {_brief(self.waiting)} and not on the GPU of {who}",
            "stalled": f"{there} ended on rank {_brief(self.waiting)} and not on the GPU of {who}",
            "missing": f"{wait} for {who}{was}",
            "mismatch": f"{wait}, where {who} called something else{was}",
            "deadlock": f"{wait} for {who}, which waited for others in turn{was}",
            "joined": f"{wait}, which all had joined: the network between them, or a GPU, is to blame",
        }[self.kind]


def blamed(verdict: Verdict, nodes: Sequence[str], of: int) -> tuple[str, ...]:
    """The nodes to blame, out of those of the suspects.

    Empty unless the verdict blames nodes. Also empty if they are more than half of the run's nodes, or for
    BLAMES_ONE_NODE more than one: then the fault is in something that they share.
    """
    named = tuple(dict.fromkeys(nodes)) if verdict.kind in BLAMES_NODE else ()
    most = min(of // 2, 1) if verdict.kind in BLAMES_ONE_NODE else of // 2
    return named if len(named) <= most else ()


def judge(dumps: Mapping[int, Dump], world_size: int) -> Verdict | None:
    """The verdict on a hang; None if no rank waits, or none has written a dump."""
    silent = set(range(world_size)) - set(dumps)
    stuck = list(_stuck(dumps, silent))
    if not stuck:
        return None
    if any(dump.moved for dump in dumps.values()):
        first = max(stuck, key=lambda one: len(one.waiting))
        return _verdict("slow", first.missing, first, dumps)
    if frozen := [one for one in stuck if silent.intersection(one.missing)]:
        first = max(frozen, key=lambda one: len(one.waiting))
        return _verdict("frozen", silent.intersection(*[set().union(*(one.missing for one in frozen))]), first, dumps)
    if stalled := [one for one in stuck if one.stalled]:
        first = min(stalled, key=lambda one: (-len(one.stalled), one.call.number))
        return _verdict("stalled", set().union(*(one.stalled for one in stalled)), first, dumps)
    still = {rank for rank, dump in dumps.items() if dump.halted}
    if halted := [one for one in stuck if one.waiting - still and one.members & still]:
        first = max(halted, key=lambda one: len(one.waiting - still))
        return _verdict("halted", set().union(*(one.members & still for one in halted)), first, dumps)
    inside = {rank for one in stuck for rank in one.begun} | {rank for rank, one in dumps.items() if one.between_stages}
    if unbegun := [one for one in stuck if one.begun and one.waiting - inside]:
        first = max(unbegun, key=lambda one: len(one.begun))
        return _verdict("unbegun", set().union(*(one.waiting for one in unbegun)) - inside, first, dumps)
    absent = {rank: one for one in stuck for rank in one.missing}
    waits = {rank for one in stuck for rank in one.waiting}
    if roots := set(absent) - waits:
        first = max((one for one in stuck if roots.intersection(one.missing)), key=lambda one: len(one.waiting))
        return _verdict("missing", roots, first, dumps)
    # Checked only now: a rank that waits for a missing one may have called something else before.
    if other := next((one for one in stuck if one.differ), None):
        return _verdict("mismatch", other.differ, other, dumps)
    if joined := [one for one in stuck if not one.missing]:
        return _verdict("joined", (), max(joined, key=lambda one: len(one.waiting)), dumps)
    return _verdict("deadlock", stuck[0].missing, stuck[0], dumps)


@dataclass(frozen=True)
class _Stuck:
    """A group's oldest collective that hasn't ended."""

    group: str
    call: Call
    members: frozenset[int]
    waiting: frozenset[int]
    missing: frozenset[int]
    differ: frozenset[int]  # ranks whose call differs from that of most
    stalled: frozenset[int] = frozenset()  # ranks where it has not ended, although it has elsewhere
    begun: frozenset[int] = frozenset()  # ranks on whose GPUs it is running


def _stuck(dumps: Mapping[int, Dump], silent: set[int]) -> Iterator[_Stuck]:
    names = {group for dump in dumps.values() for group in dump.calls}
    for group in sorted(names):
        members = {rank for rank, dump in dumps.items() if group in dump.calls}
        known = [ranks for dump in dumps.values() for name, ranks in dump.groups.items() if name == group]
        members |= set().union(*known)
        oldest = {rank: call for rank, dump in dumps.items() if (call := dump.waiting(group))}
        if not oldest:
            continue
        number = min(call.number for call in oldest.values())
        here = {rank: call for rank, call in oldest.items() if call.number == number}
        missing = {rank for rank in members if rank in silent or dumps[rank].last(group) < number}
        # Ranks that called something else may have completed it.
        called = {rank: call for rank in members - missing if (call := dumps[rank].calls[group].get(number))}
        usual = _usual(called.values())
        beyond = {rank for rank in members - missing if rank not in here and _has_ended(dumps[rank], group, number)}
        stalled = frozenset(here if beyond and TOGETHER.match(usual.name) else ())
        waiting = frozenset(beyond if stalled else here)
        begun = frozenset(rank for rank, call in here.items() if call.begun)
        differ = frozenset(_differ(called))
        yield _Stuck(group, usual, frozenset(members), waiting, frozenset(missing), differ, stalled, begun)


def _has_ended(dump: Dump, group: str, number: int) -> bool:
    return dump.ended.get(group, 0) >= number


def _usual(calls: Iterable[Call]) -> Call:
    """The call that most ranks agree on."""
    every = list(calls)
    return max(every, key=lambda call: sum(_same(call, other) for other in every))


def _differ(calls: Mapping[int, Call]) -> set[int]:
    usual = _usual(calls.values())
    return {rank for rank, call in calls.items() if not _same(call, usual)}


def _same(one: Call, other: Call) -> bool:
    return (one.name, one.sizes) == (other.name, other.sizes)


def _number(call: Call) -> int:
    return call.number


def _verdict(kind: Kind, ranks: Iterable[int], stuck: _Stuck, dumps: Mapping[int, Dump]) -> Verdict:
    named = tuple(sorted(ranks))
    waiting = tuple(sorted(stuck.waiting - set(named)))
    stack = dumps[named[0]].stack if named and named[0] in dumps else ()
    doing = next((frame for frame in stack if not any(part in frame for part in LIBRARIES)), "")
    return Verdict(kind, named, stuck.group, stuck.call, waiting, doing)


def _brief(ranks: Sequence[int]) -> str:
    return some_of(list(map(str, ranks)), 8)


# The files


def read(prefix: str, world_size: int) -> dict[int, Dump]:
    """The readable dumps by rank; empty if there is too much to read in time."""
    found, size = {}, 0
    for rank in range(world_size):
        for path, parse in ((Path(f"{prefix}{rank}.json"), json.loads), (Path(f"{prefix}{rank}"), _unpickled)):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, pickle.UnpicklingError, EOFError):
                size += path.stat().st_size
                if size > MOST_BYTES:
                    return {}
                found[rank] = dump_of(parse(path.read_bytes()))
                break
    return found


def dump_of(values: Mapping[str, Any]) -> Dump:
    """A dump from torch's flight recorder format, version 2."""
    ended = ended_by_group(values)
    calls: dict[str, dict[int, Call]] = defaultdict(dict)
    last: dict[str, int] = {}
    waits = [entry for entry in values["entries"] if not has_ended(entry, ended)]
    for entry in values["entries"]:
        if entry.get("is_p2p"):
            continue
        number, group = int(entry["collective_seq_id"]), str(entry["process_group"][0])
        last[group] = ended.get(str(entry["pg_id"]), 0)
        done, begun = has_ended(entry, ended), entry["state"] == "started"
        calls[group][number] = Call(number, entry["profiling_name"], _sizes(entry), done, begun)
    groups = {name: frozenset(ranks) for name, ranks in values.get("groups", {}).items()}
    for one in values.get("pg_config", {}).values():  # in NCCL's own dumps
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if ranks := json.loads(one["ranks"]):
                groups.setdefault(str(one["name"]), frozenset(ranks))
    return Dump(
        calls=calls,
        groups=groups,
        stack=tuple(values.get("stack", ())),
        ended=last,
        moved=values.get("moved", False),
        between_stages=any(entry.get("is_p2p") for entry in waits),
        halted=_takes_no_other(min(waits, key=_created, default=None), groups),
    )


def _created(entry: Mapping[str, Any]) -> int:
    return entry.get("time_created_ns", 0)


def _takes_no_other(entry: Mapping[str, Any] | None, groups: Mapping[str, frozenset[int]]) -> bool:
    """Whether an entry is a collective of NCCL's in a group of one rank."""
    if entry is None or entry.get("is_p2p") or not entry["profiling_name"].startswith("nccl:"):
        return False
    return len(groups.get(str(entry["process_group"][0]), ())) == 1


def ended_by_group(values: Mapping[str, Any]) -> dict[str, int]:
    """The number of the last ended collective, by group id. Groups with sends are left out: that number may be a
    send's, which are counted separately."""
    sends = {str(entry["pg_id"]) for entry in values["entries"] if entry.get("is_p2p")}
    found = {str(number): int(one["last_completed_collective"]) for number, one in values["pg_status"].items()}
    return {number: last for number, last in found.items() if number not in sends}


def has_ended(entry: Mapping[str, Any], ended: Mapping[str, int]) -> bool:
    """Whether a call has ended. For gloo, only the number of its group's last ended call says so."""
    return entry["state"] == "completed" or int(entry["collective_seq_id"]) <= ended.get(str(entry["pg_id"]), 0)


def _sizes(entry: Mapping[str, Any]) -> str:
    sizes = entry.get("input_sizes") or []
    kinds = entry.get("input_dtypes") or []
    return ", ".join(f"{kind} {size}" for size, kind in zip(sizes[:2], kinds, strict=False))


class _Plain(pickle.Unpickler):
    """Unpickler for lists, dicts, strings and numbers only, so that a file can't execute anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump has no {module}.{name}")


def _unpickled(data: bytes) -> Any:
    return _Plain(io.BytesIO(data)).load()
