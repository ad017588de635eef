"""Nodes that are healthy but slow, by the measurements of their health check: below the site's pass marks, far below
other nodes, or far below their GPUs' published performance. Rates between nodes can't be attributed to one of them, so
there is a single mark for all."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaboa.peaks import peak_of
from megaboa.records import NodeHealth, PassMarks, Unhealthy, read_ledger
from megaboa.run import health
from megaboa.store_paths import stores

SLOW_SHARE = 0.8  # of the other nodes' median
SLOW_PEAK_SHARE = 0.4  # of the GPUs' published peak; healthy GPUs reach 0.5 to 0.8
ENOUGH_OTHERS = 3
MARGIN = 0.9  # good nodes differ by a few percent, and so do checks of the same node
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
    """The slow nodes, each judged by its slowest GPU. Processors are only compared with marks, because other work
    shares them.

    Slow rates between nodes are only reported if no node is slow by itself, which is the usual cause.
    """
    return _slow_in(ALONE, results, marks) or _slow_in(OF_ALL_NODES, results, marks)


def checks_of(store: Path) -> dict[str, list[NodeHealth]]:
    """All health checks of fit nodes by a store's runs, grouped by the nodes' GPUs, such as `8 x NVIDIA H200`."""
    kinds: dict[str, list[NodeHealth]] = {}
    for run in stores(store):
        refused = [entry.bad_nodes for entry in read_ledger(run.ledger) if isinstance(entry, Unhealthy)]
        unfit = set(itertools.chain.from_iterable(refused))  # includes slow nodes, whose own results are ok
        for folder in (folder for attempt in run.attempts for folder in (attempt.health, attempt.next_health)):
            for one in health.results_in(folder):
                if one.ok and one.node not in unfit and (gpus := Counter(_gpus(one))):
                    name = ", ".join(f"{count} x {kind}" for kind, count in sorted(gpus.items()))
                    kinds.setdefault(name, []).append(one)
    return dict(sorted(kinds.items()))


def of_good_nodes(good: Sequence[NodeHealth]) -> PassMarks:
    """Marks that nine tenths of these checks pass, with a margin. There are none for rates between nodes, which depend
    on the number of nodes."""
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
    """The median of other nodes with the same GPUs; None if there are too few."""
    kind = _gpus(results[node])
    others = [value for other, value in values.items() if other != node and kind and _gpus(results[other]) == kind]
    return statistics.median(others) if len(others) >= ENOUGH_OTHERS else None


def _peak(one: NodeHealth) -> float:
    """The published peak of a node's GPUs; 0 if unknown."""
    return next((found[0] for kind in _gpus(one) if (found := peak_of(kind))), 0.0)


def _gpus(one: NodeHealth) -> list[Any]:
    return [gpu.get("name") if isinstance(gpu, dict) else gpu for gpu in one.measured.get("gpus") or []]
