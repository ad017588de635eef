"""The legal layouts of a model on a number of GPUs, as far as they fit into memory, ordered by predicted speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from megaboa.check import calibration, fit, memory, speed, table
from megaboa.check.facts import Facts
from megaboa.check.memory import GIB
from megaboa.layout import NAMES
from megaboa.records import Calibration, Tree

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
FULL = {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}


@dataclass(frozen=True)
class Advice:
    facts: Facts
    step: speed.Step
    gib: float

    @property
    def values(self) -> Tree:
        """The keys of the experiment for this layout."""
        layout, kernels = self.facts.layout, self.facts.kernels
        sizes = {name: getattr(layout, name) for name in NAMES}
        found: Tree = {f"parallel.{name}": size for name, size in sizes.items() if size not in (1, None)}
        if layout.sp:
            found["parallel.sp"] = True
        found["training.micro_batch_size"] = self.facts.training.mbs
        if kernels.recompute:
            found["overrides.model.recompute_granularity"] = kernels.recompute
            found["overrides.model.recompute_method"] = kernels.recompute_method
            found["overrides.model.recompute_num_layers"] = kernels.recompute_layers
        return found

    @property
    def name(self) -> str:
        short = {"training.micro_batch_size": "mbs", "parallel.sp": ""}
        words = [f"{short.get(key, key.rpartition('.')[2])}{value}" for key, value in self.values.items()]
        kept = [word for word in words if word != "True" and not word.startswith("recompute")]
        return "-".join([*kept, *(["recompute"] if self.facts.kernels.recompute else [])])


def advise(f: Facts, top: int = 8, known: Calibration | None = None) -> list[Advice]:
    """The fastest layouts, each with its best micro-batch, and with recomputation only if that is faster.

    `known`: the calibration to use; default: the GPU's.
    """
    best: dict[tuple[Any, ...], Advice] = {}
    limit = fit.capacity(str(f.cluster.gpu))
    known = known or calibration.of(f.cluster.gpu)
    for candidate in candidates(f):
        need = memory.peak(candidate).total
        if need > limit:
            continue
        found = Advice(candidate, speed.of_step(candidate, known), need / GIB)
        key = dataclasses.astuple(candidate.layout)
        if key not in best or found.step.seconds < best[key].step.seconds:
            best[key] = found
    return sorted(best.values(), key=lambda found: found.step.seconds)[:top]


def candidates(f: Facts, shortest: int = 4096) -> Iterator[Facts]:
    """Every legal layout, with tensor ranks inside a node. `shortest`: minimum number of tokens on a context rank."""
    gpus, world = f.cluster.gpus_per_node, f.cluster.nodes * f.cluster.gpus_per_node
    layers = f.model.layers or 1
    tensor = [tp for tp in _powers(gpus) if gpus % tp == 0]
    stages = [pp for pp in range(1, min(layers, world) + 1) if world % pp == 0 and (layers % pp == 0 or pp == 1)]
    context = [cp for cp in _powers(world) if cp == 1 or (f.training.seq_length or 0) // cp >= shortest]
    experts = _powers(f.model.experts or 1)
    for tp, pp, cp, ep in product(tensor, stages, context, experts):
        for vpp in _interleaved(layers, pp):
            layout = dataclasses.replace(
                f.layout, world_size=world, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, sp=tp > 1, distributed_optimizer=True
            )
            yield from _filled(dataclasses.replace(f, layout=layout))


def _filled(f: Facts) -> Iterator[Facts]:
    """The layout with every micro-batch size that divides the batch, with and without recomputation."""
    for mbs, kernels in product(MICRO_BATCHES, ({}, FULL)):
        training = dataclasses.replace(f.training, mbs=mbs)
        found = dataclasses.replace(f, training=training, kernels=dataclasses.replace(f.kernels, **kernels))
        if found.microbatches and table.is_legal(found):
            yield found


def _powers(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length()) if 2**power <= limit]


def _interleaved(layers: int, pp: int) -> list[int | None]:
    if pp == 1 or layers % pp:
        return [None]
    return [None, *(chunks for chunks in (2, 4) if (layers // pp) % chunks == 0)]


def yaml(found: list[Advice]) -> str:
    """A sweep over the layouts, to be pasted into an experiment."""
    lines = ["sweep:", "  runs:"]
    for one in found:
        values = ", ".join(f"{key}: {_scalar(value)}" for key, value in one.values.items())
        lines.append(f"    {one.name}: {{{values}}}")
    return "\n".join(lines)


def _scalar(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def text(found: list[Advice]) -> str:
    lines = [f"{'layout':32} {'s/step':>8} {'of it':>6} {'GiB':>6}  spent on"]
    for one in found:
        slower = one.step.seconds / found[0].step.seconds
        lines.append(f"{one.name:32} {one.step.seconds:8.3g} {slower:6.2f} {one.gib:6.1f}  {one.step.shares(0.02)}")
    return "\n".join(lines)
