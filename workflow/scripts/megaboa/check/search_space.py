"""Every legal setting of a run: layouts, micro-batches, recomputation, FSDP; most promising first by prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from megaboa.check import adviser, calibration, fit, memory, speed, table
from megaboa.check.facts import Facts
from megaboa.check.memory import GIB
from megaboa.records import Tree

SHORTEST = {"cuda": 4096, "cpu": 2}  # tokens per context rank: fewer are never worthwhile on GPUs


@dataclass(frozen=True)
class Candidate:
    facts: Facts
    seconds: float | None  # predicted step time; None if nothing is known about this device, or precision on it
    gib: float | None

    @property
    def name(self) -> str:
        return adviser.name_of(self.facts, with_sp=True)


def candidates(f: Facts) -> list[Candidate]:
    """The legal candidates that fit the GPU by prediction, fastest first; without predicted times, by layout."""
    limit = fit.capacity(f.cluster.gpu) if f.cluster.device == "cuda" and f.cluster.gpu else None
    found = [Candidate(one, *predicted(one)) for one in _legal(f)]
    fitting = [one for one in found if limit is None or one.gib is None or one.gib * GIB <= limit]
    return sorted(fitting, key=lambda one: one.seconds or 0.0)


def predicted(f: Facts) -> tuple[float | None, float | None]:
    """Predicted step time, and GiB per rank; None if the device or the model isn't known."""
    if f.model.layers is None:
        return None, None
    known = calibration.of(f.cluster.gpu if f.cluster.device == "cuda" else "cpu")
    seconds = speed.of_step(f, known).seconds if known and speed.is_known(f, known) else None
    return seconds, fit.taken(f, memory.peak(f)) / GIB if memory.is_known(f) else None


def _legal(f: Facts) -> Iterator[Facts]:
    """The adviser's layouts with their micro-batches and recomputation, plus variants with FSDP and tensor parallel
    experts."""
    for one in adviser.candidates(f, SHORTEST[f.cluster.device]):
        yield one
        for change in _further(one):
            changed = dataclasses.replace(one, layout=dataclasses.replace(one.layout, **change))
            if changed.microbatches and table.is_legal(changed):
                yield changed


def _further(f: Facts) -> Iterator[Tree]:
    layout = f.layout
    if f.cluster.device == "cuda" and layout.pp == layout.cp == layout.ep == 1 and layout.dp != 1:
        yield {"fsdp": "megatron"}
    if layout.ep > 1 and layout.tp > 1:
        yield {"etp": layout.tp}
