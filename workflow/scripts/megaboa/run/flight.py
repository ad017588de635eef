"""Which ranks the others waited for when nothing went on, by what each has written of its last collectives.

Files are ours (JSON, `megaboa.bridge.flight`), or NCCL's own at a time-out (pickled), which knows no stacks. Ranks that
have written nothing could not: their process is frozen, or their host is.
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

# slow: collectives still ended while they wrote, so nothing hangs. frozen: they wrote nothing. stalled: their GPUs have
# not completed what others have. halted: their GPUs have not completed what takes no other rank. unbegun: their GPUs
# have not begun what others have, and are in no other collective. missing: they have not come. mismatch: they called
# another collective than the others. deadlock: ranks wait for each other. joined: all have come, and it completes
# nowhere: the network, or a GPU.
Kind = Literal["slow", "frozen", "stalled", "halted", "unbegun", "missing", "mismatch", "deadlock", "joined"]
BLAMES_NODE: tuple[Kind, ...] = ("frozen", "stalled", "halted", "unbegun")
# GPUs that wait for others in what nobody records (a CUDA graph, a kernel that sends by itself) look like that as well.
BLAMES_ONE_NODE: tuple[Kind, ...] = ("halted", "unbegun")
# Of NCCL's, those that complete nowhere before every rank has come: the root of a broadcast may be done before.
TOGETHER = re.compile(r"^nccl:_?(?:all|reduce_scatter|coalesced)", re.IGNORECASE)
MOST_BYTES = 1 << 30
LIBRARIES = ("/torch/", "/megatron/core/", "/threading.py", "/contextlib.py")  # whose frames say little


@dataclass(frozen=True)
class Call:
    """A collective as one rank has called it."""

    number: int
    name: str
    sizes: str
    done: bool
    begun: bool = False  # by its GPU, which torch knows where TORCH_NCCL_ENABLE_TIMING is set

    def __str__(self) -> str:
        return f"{self.name.split(':')[-1]} {self.number}" + (f" of {self.sizes}" if self.sizes else "")


@dataclass(frozen=True)
class Dump:
    """Of one rank: its calls by group and number, who is in its groups, and its main thread's frames."""

    calls: Mapping[str, Mapping[int, Call]]
    groups: Mapping[str, frozenset[int]] = field(default_factory=dict)
    stack: tuple[str, ...] = ()
    ended: Mapping[str, int] = field(default_factory=dict)  # by group the last that has ended
    moved: bool = False  # calls began or ended while it was written
    between_stages: bool = False  # it is sending or receiving, which no verdict counts
    halted: bool = False  # the first that its GPU has not completed is of a group that has no other rank

    def last(self, group: str) -> int:
        return max(self.calls.get(group, {}), default=0)

    def waiting(self, group: str) -> Call | None:
        """The oldest that hasn't ended."""
        return min((call for call in self.calls.get(group, {}).values() if not call.done), key=_number, default=None)


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    ranks: tuple[int, ...]  # the ones to look at; none where all have joined
    group: str
    call: Call
    waiting: tuple[int, ...]
    doing: str = ""  # the first of those ranks

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
    """Of the nodes that its ranks are on. Most of a run's nodes at once are not broken: what they share is."""
    named = tuple(dict.fromkeys(nodes)) if verdict.kind in BLAMES_NODE else ()
    most = min(of // 2, 1) if verdict.kind in BLAMES_ONE_NODE else of // 2
    return named if len(named) <= most else ()


def judge(dumps: Mapping[int, Dump], world_size: int) -> Verdict | None:
    """None where nobody waits, or where nobody has written anything."""
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
    # Only now: who waits for a missing rank may have called something else before that.
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
    differ: frozenset[int]  # who called something else than most
    stalled: frozenset[int] = frozenset()  # where it has not ended, though it has elsewhere
    begun: frozenset[int] = frozenset()  # on whose GPUs it runs


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
        # Who called something else may have left it already.
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
    """What most have called."""
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
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


# The files


def read(prefix: str, world_size: int) -> dict[int, Dump]:
    """What there is; a file that can't be read is none. Nothing where there is too much to read in time."""
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
    """From torch's own form, of version 2."""
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
    for one in values.get("pg_config", {}).values():  # NCCL's own
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
    """A collective of NCCL's in a group of one rank."""
    if entry is None or entry.get("is_p2p") or not entry["profiling_name"].startswith("nccl:"):
        return False
    return len(groups.get(str(entry["process_group"][0]), ())) == 1


def ended_by_group(values: Mapping[str, Any]) -> dict[str, int]:
    """By the number of a group its last collective that has ended. Where there are sends nothing: that number may be
    a send's, and these are counted apart.
    """
    sends = {str(entry["pg_id"]) for entry in values["entries"] if entry.get("is_p2p")}
    found = {str(number): int(one["last_completed_collective"]) for number, one in values["pg_status"].items()}
    return {number: last for number, last in found.items() if number not in sends}


def has_ended(entry: Mapping[str, Any], ended: Mapping[str, int]) -> bool:
    """Gloo's say so by their number alone."""
    return entry["state"] == "completed" or int(entry["collective_seq_id"]) <= ended.get(str(entry["pg_id"]), 0)


def _sizes(entry: Mapping[str, Any]) -> str:
    sizes = entry.get("input_sizes") or []
    kinds = entry.get("input_dtypes") or []
    return ", ".join(f"{kind} {size}" for size, kind in zip(sizes[:2], kinds, strict=False))


class _Plain(pickle.Unpickler):
    """Lists, dicts, texts and numbers: nothing that a file could run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump has no {module}.{name}")


def _unpickled(data: bytes) -> Any:
    return _Plain(io.BytesIO(data)).load()
