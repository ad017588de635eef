"""Ranks that calculate more slowly than others, by measurements of all ranks after each save (`bridge/pace.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megaboa.causes import Cause, Failure
from megaboa.records import Pace, read_paces
from megaboa.run import checkpoints, ledger, node_memory, progress
from megaboa.run.call import Call
from megaboa.store_paths import AttemptFolder

CAUSE: Cause = "slow"  # also the kind of trouble in run/node_memory.py
SINCE_THE_LAST_LOOK = 10  # upper bound for saves between two looks


@dataclass(frozen=True)
class Straggler:
    rank: int
    times: float  # lowest factor over these saves, relative to the others
    saves: int

    def __str__(self) -> str:
        return f"calculates {self.times:.2f} times as long as the others, or longer, at {self.saves} saves in a row"


def scores(pace: Pace) -> list[float]:
    """Each rank's time relative to the median of the other ranks; 1.0 if its own, or every other, is unknown."""
    known = sorted(one for one in pace.seconds if math.isfinite(one) and one > 0)
    if len(known) < 2:
        return [1.0] * len(pace.seconds)
    others = len(known) - 1

    def median_without(place: int) -> float:
        low, high = (known[at + (at >= place)] for at in ((others - 1) // 2, others // 2))
        return (low + high) / 2

    score = {one: one / median_without(place) for place, one in enumerate(known)}
    return [score.get(one, 1.0) for one in pace.seconds]


def find(paces: Sequence[Pace], factor: float, saves: int) -> list[Straggler]:
    """Ranks above the factor at `saves` consecutive saves, among the newest saves."""
    found: dict[int, Straggler] = {}
    every = [scores(pace) for pace in paces[-saves - SINCE_THE_LAST_LOOK :]]
    for end in range(saves, len(every) + 1):
        for rank, least in enumerate(map(min, zip(*every[end - saves : end], strict=True))):
            if least > factor:
                found.setdefault(rank, Straggler(rank, least, saves))
    return [found[rank] for rank in sorted(found)]


class Stragglers:
    """Stragglers of an attempt, each reported once. Can be called often: files are only read after a save."""

    def __init__(self, call: Call, target: AttemptFolder):
        self._call, self._target = call, target
        self._size, self._told = 0, set[int]()

    def reason(self) -> tuple[Cause, str] | None:
        """The reason to stop the ranks, if stragglers' nodes are to be replaced."""
        call, settings = self._call, self._call.recovery.stragglers
        if not call.site.job and call.folder.run.device == "cpu":
            return None  # other work on this machine may take a rank's processor, so no node is to blame
        size = self._target.paces.stat().st_size if settings and self._target.paces.exists() else 0
        if size == self._size:
            return None
        found = _newest(call, self._target)
        self._size = size
        for one in found:
            if one.rank not in self._told:
                self._told.add(one.rank)
                self._tell(one)
        failure = _to_replace(call, found)
        return (failure.cause, failure.evidence) if failure else None

    def _tell(self, one: Straggler) -> None:
        call, node = self._call, _node(self._call, one.rank)
        call.say(f"WARNING: rank {one.rank}{f' on {node}' if node else ''} {one}")
        if node:
            node_memory.remember(call.folder, {node: f"rank {one.rank} {one}"}, CAUSE, self._target.number)


def _newest(call: Call, target: AttemptFolder) -> list[Straggler]:
    settings = call.recovery.stragglers
    if not settings:
        return []
    paces = read_paces(target.paces, settings.saves + SINCE_THE_LAST_LOOK)
    return find(paces, settings.factor, settings.saves)


def to_replace(call: Call, target: AttemptFolder) -> Failure | None:
    return _to_replace(call, _newest(call, target))


def _to_replace(call: Call, slow: Sequence[Straggler]) -> Failure | None:
    """The failure that names the nodes to replace, or None.

    Each node is replaced once, only if others can take its place, and never more than half of the nodes at once: then
    the fault is in something that they share.
    """
    settings, site = call.recovery.stragglers, call.site
    if not (settings and settings.replace and site.job):
        return None
    last = progress.last_step(call.payload)
    if last is not None and checkpoints.latest(call.payload.checkpoints) >= last:
        return None  # nothing is left but the end
    nodes = {_node(call, one.rank) for one in slow}
    if 2 * len(nodes) > len(site.nodes):
        return None
    nodes -= {node for end in ledger.ends(call.entries) if end.cause == CAUSE for node in end.bad_nodes}
    if not nodes or (len(nodes) > len(site.spares) and not site.job.can_requeue):
        return None
    slow = [one for one in slow if _node(call, one.rank) in nodes]
    evidence = "; ".join(f"rank {one.rank} on {_node(call, one.rank)} {one}" for one in slow)
    return Failure(CAUSE, evidence, slow[0].rank, tuple(sorted(nodes)))


def _node(call: Call, rank: int) -> str | None:
    return call.site.nodes[rank // call.folder.launch.gpus_per_node] if call.site.job else None
