"""Troubles with nodes, remembered by all runs of a store: `<store>/nodes/<cluster>/<node>.jsonl`.

A trouble's weight halves every `recovery.node_memory_days`. A single failure may be chance or the run's own fault, so
only that run avoids the node; two recent ones are the node's fault.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaboa.files import append_line, make_folder
from megaboa.paths import RunFolder
from megaboa.records import NodeTrouble, line, read_node_troubles
from megaboa.run.gpu_troubles import troubles_of
from megaboa.run.gpu_use import use_of
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.registry import cluster
from megaboa.store_paths import AttemptFolder, NodesFolder

DAY = 86_400.0
USUAL_DAYS = 7.0  # the default of recovery.node_memory_days
# Weights of new troubles. "slow" (heat, power, low clocks) costs time but loses no work.
WEIGHTS = {"node_failure": 1.0, "gpu_failure": 1.0, "unhealthy": 1.0, "gpu": 0.5, "hang": 0.5, "slow": 0.25}
AVOIDED_FROM = 1.5
# Within these times, equal troubles count once: several runs meet the same event, and a slow node is slow in every
# attempt.
SAME_EVENT_SECONDS = {"slow": DAY}
USUAL_EVENT_SECONDS = 3600.0
AVOIDED_SHARE = 0.1  # of a partition's nodes; if more are bad, the cause lies elsewhere
FORGOTTEN = "forgotten"  # a person's note that earlier troubles are repaired


@dataclass(frozen=True)
class Remembered:
    """A node's troubles since it was last forgotten, oldest first, and their present score."""

    node: str
    troubles: tuple[NodeTrouble, ...]
    score: float

    @property
    def avoided(self) -> bool:
        return self.score >= AVOIDED_FROM

    def returns(self, days: float) -> float:
        """Days until the node is no longer avoided, if it has no new trouble."""
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
    """The remembered nodes by cluster, worst first."""
    found: dict[str, list[Remembered]] = {}
    for path in NodesFolder.of(store).all:
        with contextlib.suppress(OSError, ValueError):  # another user's file, or from a later version
            known = judge(path.stem, read_node_troubles(path), now, days)
            if known.troubles:
                found.setdefault(path.parent.name, []).append(known)
    return {name: sorted(nodes, key=lambda one: (-one.score, one.node)) for name, nodes in sorted(found.items())}


def here(folder: RunFolder) -> list[Remembered]:
    """The remembered nodes of this cluster.

    Empty if the memory is switched off, or the run wants nodes with a certain feature: it isn't known how many others
    have it.
    """
    days = folder.launch.recovery.node_memory_days
    if not days or not folder.launch.store or folder.launch.constraint:
        return []
    try:
        return of_store(Path(folder.launch.store), time.time(), days).get(cluster().cluster(), [])
    except (UnreachableError, OSError):
        return []


def bad(nodes: Sequence[Remembered], usable: set[str], kept: set[str], needed: int) -> set[str]:
    """The nodes to avoid in addition to `kept`, out of `nodes` (worst first).

    These are at most a tenth of the usable nodes, and at least one more than `needed` is left.
    """
    found: set[str] = set()
    most = max(1, int(AVOIDED_SHARE * len(usable)))
    for one in nodes:
        if one.avoided and len(found) < most and len(usable - kept - found - {one.node}) > needed:
            found.add(one.node)
    return found - kept


def remember(folder: RunFolder, nodes: Mapping[str, str], what: str, attempt: int | None = None) -> None:
    """Record a trouble for each node; `nodes`: descriptions by node. Failures to write are ignored."""
    if not folder.launch.store or not folder.launch.recovery.node_memory_days:
        return
    with contextlib.suppress(OSError, UnreachableError):
        place = NodesFolder.of(Path(folder.launch.store))
        for node, detail in nodes.items():
            if "/" in node:  # names may come from a log
                continue
            path = place.node(cluster().cluster(), node)
            make_folder(path.parent)
            run = f"{folder.experiment}/{folder.name}"
            append_line(path, line(NodeTrouble(what=what, detail=detail, run=run, attempt=attempt)))


def remember_gpus(folder: RunFolder, number: int, target: AttemptFolder, nodes: Sequence[str]) -> None:
    """Record the GPU troubles in an attempt's samples. Samplers use the host's own name, which may have a domain."""
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
