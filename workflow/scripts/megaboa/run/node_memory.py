"""What nodes did wrong, remembered by all runs of a store: `<store>/nodes/<cluster>/<node>.jsonl`.

A trouble counts half after `recovery.node_memory_days`, a quarter after twice that. One failure can be chance or the
run's own fault, and only the run that met it avoids the node; two recent ones are the node's.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaboa.files import append_line
from megaboa.paths import AttemptFolder, NodesFolder, RunFolder
from megaboa.records import NodeTrouble, line, read_node_troubles
from megaboa.run.gpu_troubles import troubles_of
from megaboa.run.gpu_use import use_of
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.registry import cluster

DAY = 86_400.0
USUAL_DAYS = 7.0  # the default of recovery.node_memory_days
# How much one counts when it is new. "slow": heat, power, lower clocks: it costs time and loses nothing.
WEIGHTS = {"node_failure": 1.0, "gpu_failure": 1.0, "unhealthy": 1.0, "gpu": 0.5, "hang": 0.5, "slow": 0.25}
AVOIDED_FROM = 1.5
# Several runs meet the same event, and a slow node is slow in every attempt: that counts once.
SAME_EVENT_SECONDS = {"slow": DAY}
USUAL_EVENT_SECONDS = 3600.0
AVOIDED_SHARE = 0.1  # of a partition's nodes; where more are bad, something else is
FORGOTTEN = "forgotten"  # a person says that what came before is repaired


@dataclass(frozen=True)
class Remembered:
    """A node's troubles since it was last forgotten, oldest first, and what they count now."""

    node: str
    troubles: tuple[NodeTrouble, ...]
    score: float

    @property
    def avoided(self) -> bool:
        return self.score >= AVOIDED_FROM

    def returns(self, days: float) -> float:
        """In how many days it is no longer avoided, if nothing happens."""
        return days * math.log2(self.score / AVOIDED_FROM) if self.avoided else 0.0


def judge(node: str, troubles: Iterable[NodeTrouble], now: float, days: float) -> Remembered:
    since: list[NodeTrouble] = []
    counted: list[NodeTrouble] = []
    for trouble in sorted(troubles, key=lambda one: one.time):
        if trouble.what == FORGOTTEN:
            since, counted = [], []
            continue
        since.append(trouble)
        span = SAME_EVENT_SECONDS.get(trouble.what, USUAL_EVENT_SECONDS)
        if not any(trouble.what == one.what and trouble.time - one.time < span for one in counted):
            counted.append(trouble)
    counts = (WEIGHTS.get(one.what, 0.0) * 0.5 ** (max(now - one.time, 0.0) / (days * DAY)) for one in counted)
    return Remembered(node, tuple(since), sum(counts))


def of_store(store: Path, now: float, days: float) -> dict[str, list[Remembered]]:
    """By cluster, the worst nodes first."""
    found: dict[str, list[Remembered]] = {}
    for path in NodesFolder.of(store).all:
        with contextlib.suppress(OSError, ValueError):  # another user's, or of a later version
            known = judge(path.stem, read_node_troubles(path), now, days)
            if known.troubles:
                found.setdefault(path.parent.name, []).append(known)
    return {name: sorted(nodes, key=lambda one: (-one.score, one.node)) for name, nodes in sorted(found.items())}


def here(folder: RunFolder) -> list[Remembered]:
    """The nodes of this cluster that the store's runs have met with trouble; none where that is switched off, or the
    run wants nodes with a feature: how many others have it isn't known."""
    days = folder.launch.recovery.node_memory_days
    if not days or not folder.launch.store or folder.launch.constraint:
        return []
    try:
        return of_store(Path(folder.launch.store), time.time(), days).get(cluster().cluster(), [])
    except (UnreachableError, OSError):
        return []


def bad(nodes: Sequence[Remembered], usable: set[str], kept: set[str], needed: int) -> set[str]:
    """Of nodes, worst first, those to be avoided besides `kept`: a tenth at most, and never so many that less than one
    more than needed is left."""
    found: set[str] = set()
    most = max(1, int(AVOIDED_SHARE * len(usable)))
    for one in nodes:
        if one.avoided and len(found) < most and len(usable - kept - found - {one.node}) > needed:
            found.add(one.node)
    return found - kept


def remember(folder: RunFolder, nodes: Mapping[str, str], what: str, attempt: int | None = None) -> None:
    """`nodes`: each with what is said of it. That it can't be written stops nothing."""
    if not folder.launch.store or not folder.launch.recovery.node_memory_days:
        return
    with contextlib.suppress(OSError, UnreachableError):
        place = NodesFolder.of(Path(folder.launch.store))
        for node, detail in nodes.items():
            if "/" in node:  # it may come from a log
                continue
            path = place.node(cluster().cluster(), node)
            path.parent.mkdir(parents=True, exist_ok=True)
            run = f"{folder.experiment}/{folder.name}"
            append_line(path, line(NodeTrouble(what=what, detail=detail, run=run, attempt=attempt)))


def remember_gpus(folder: RunFolder, number: int, target: AttemptFolder, nodes: Sequence[str]) -> None:
    """What the samples of an attempt's GPUs show; samplers know a host's own name, which may be longer."""
    found = use_of({number: target})
    if found is None:
        return
    by_host = {node.split(".")[0]: node for node in nodes}
    said: dict[tuple[str, str], list[str]] = {}
    for one, serious, text in troubles_of(found):
        if node := by_host.get(one.host.split(".")[0]):
            said.setdefault(("gpu" if serious else "slow", node), []).append(f"GPU {one.index} {text}")
    for (what, node), texts in said.items():
        remember(folder, {node: "; ".join(texts)}, what, number)
