"""Nodes that are well but slow, by what their health check measured: below the site's pass marks, far below the
others, or far below what their GPUs are made for. Between nodes nobody can be told apart: that mark is one for all.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaboa.paths import stores
from megaboa.peaks import peak_of
from megaboa.records import NodeHealth, PassMarks, Unhealthy, read_ledger
from megaboa.run import health

SLOW_SHARE = 0.8  # of the other nodes' median
SLOW_PEAK_SHARE = 0.4  # of the GPUs' published peak: healthy ones reach 0.5 to 0.8
ENOUGH_OTHERS = 3
MARGIN = 0.9  # good nodes differ by some percent, and one node from one check to the next
UNITS = {
    "tflops": "TFLOP/s in a product of matrices",
    "sm_mhz": "MHz of a GPU at work",
    "memory_gb_per_second": "GB/s in a GPU's memory",
    "host_gb_per_second": "GB/s between a GPU and the host's memory",
    "node_gb_per_second": "GB/s in the all-reduce over its GPUs",
    "node_all_to_all_gb_per_second": "GB/s in the all-to-all over its GPUs",
    "nodes_gb_per_second": "GB/s in the all-reduce over the nodes",
    "nodes_all_to_all_gb_per_second": "GB/s in the all-to-all over the nodes",
}
OF_ALL_NODES = ("nodes_gb_per_second", "nodes_all_to_all_gb_per_second")
ALONE = tuple(name for name in UNITS if name not in OF_ALL_NODES)


def slow(results: Mapping[str, NodeHealth], marks: PassMarks | None) -> dict[str, list[str]]:
    """By node; the lowest of a node's GPUs counts. Processors are compared with marks only: other work shares them.

    What is slow between the nodes is said only if no node is slow by itself, which is the usual reason.
    """
    return _slow_in(ALONE, results, marks) or _slow_in(OF_ALL_NODES, results, marks)


def checks_of(store: Path) -> dict[str, list[NodeHealth]]:
    """All health checks of fit nodes by a store's runs, by the nodes' GPUs as in `8 x NVIDIA H200`."""
    kinds: dict[str, list[NodeHealth]] = {}
    for run in stores(store):
        refused = [entry.bad_nodes for entry in read_ledger(run.ledger) if isinstance(entry, Unhealthy)]
        unfit = set(itertools.chain.from_iterable(refused))  # also the slow ones, which don't know that
        for folder in (folder for attempt in run.attempts for folder in (attempt.health, attempt.next_health)):
            for one in health.results_in(folder):
                if one.ok and one.node not in unfit and (gpus := Counter(_gpus(one))):
                    name = ", ".join(f"{count} x {kind}" for kind, count in sorted(gpus.items()))
                    kinds.setdefault(name, []).append(one)
    return dict(sorted(kinds.items()))


def of_good_nodes(good: Sequence[NodeHealth]) -> PassMarks:
    """What nine tenths of these checks pass with a margin. How fast it is between nodes depends on how many there are:
    no mark is made of that."""
    reached = {name: sorted(filter(None, (_lowest(one.measured.get(name)) for one in good))) for name in ALONE}
    tenths = {name: values[len(values) // 10] for name, values in reached.items() if values}
    return PassMarks(**{name: float(f"{MARGIN * value:.3g}") for name, value in tenths.items()})


def _slow_in(names: Sequence[str], results: Mapping[str, NodeHealth], marks: PassMarks | None) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        unit = UNITS[name]
        values = {
            node: value for node, one in results.items() if (value := _lowest(one.measured.get(name))) is not None
        }
        mark = getattr(marks, name) if marks else None
        for node, value in values.items():
            if mark is not None and value < mark:
                found.setdefault(node, []).append(f"{value:.3g} {unit}, and launch.pass_marks.{name} is {mark:g}")
            elif name not in OF_ALL_NODES and (usual := _usual(results, values, node)) and value < SLOW_SHARE * usual:
                found.setdefault(node, []).append(f"{value:.3g} {unit}, and the other nodes have {usual:.3g}")
            elif name == "tflops" and value < SLOW_PEAK_SHARE * (peak := _peak(results[node])):
                found.setdefault(node, []).append(f"{value:.3g} {unit}, and the published peak is {peak:.0f}")
    return found


def _lowest(measured: Any) -> float | None:
    known = [one for one in (measured if isinstance(measured, list) else [measured]) if one is not None]
    return min(known, default=None)


def _usual(results: Mapping[str, NodeHealth], values: Mapping[str, float], node: str) -> float | None:
    """The median of nodes with the same GPUs."""
    kind = _gpus(results[node])
    others = [value for other, value in values.items() if other != node and kind and _gpus(results[other]) == kind]
    return statistics.median(others) if len(others) >= ENOUGH_OTHERS else None


def _peak(one: NodeHealth) -> float:
    """0 where it isn't known."""
    return next((found[0] for kind in _gpus(one) if (found := peak_of(kind))), 0.0)


def _gpus(one: NodeHealth) -> list[Any]:
    return [gpu.get("name") if isinstance(gpu, dict) else gpu for gpu in one.measured.get("gpus") or []]
