"""The legal layouts of a model on a number of GPUs, as far as they fit into memory, ordered by predicted speed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from megaboa.check import calibration, fit, memory, speed, table
from megaboa.check.fact_sources import FIELDS, of_key, with_keys
from megaboa.check.facts import Facts
from megaboa.check.memory import GIB
from megaboa.formats import counted
from megaboa.layout import AXES, NAMES, Layout, words
from megaboa.records import Calibration, Tree

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
EVEN: Tree = {  # how layers are divided over pipeline stages
    "first_stage_layers": None,
    "last_stage_layers": None,
    "embedding_counts": False,
    "loss_counts": False,
    "stages": None,
}
SEARCHED = (  # keys of candidates
    *(f"parallel.{name}" for name in (*NAMES, "sp", "fsdp", "distributed_optimizer")),
    *(f"overrides.{FIELDS[f'layout.{name}']}" for name in EVEN),
    *("training.micro_batch_size", *fit.RECOMPUTED),
)
MOST_NODES = 64  # times the nodes that were asked for, tried where nothing fits


@dataclass(frozen=True)
class Advice:
    facts: Facts
    step: speed.Step
    need: float  # bytes on the rank with the most

    @property
    def name(self) -> str:
        """Tensor ranks always have sequence parallelism here."""
        return name_of(self.facts)


def name_of(f: Facts, with_sp: bool = False) -> str:
    """Short name such as `tp2-sp-mbs4-recompute`; axes of size 1 are left out."""
    switches = {"sp": with_sp and f.layout.sp, "fsdp": f.layout.fsdp != "none"}
    parts = [*words(vars(f.layout)), *(name for name, is_on in switches.items() if is_on), f"mbs{f.training.mbs}"]
    return "-".join([*parts, *(["recompute"] if f.kernels.recompute else [])])


def advise(f: Facts, top: int = 8, known: Calibration | None = None) -> list[Advice]:
    """The fastest layouts, each with its best micro-batch, and with recomputation only if that is faster.

    Layouts with FSDP are among them if the experiment has it, or if no other fits. `known`: the calibration to use;
    default: the GPU's.
    """
    known = known or calibration.of(f.cluster.gpu)
    plain = list(candidates(f))
    found = _fastest(plain, known)
    if f.layout.fsdp != "none" or not found:
        found += _fastest(sharded(plain), known)
    return sorted(found, key=lambda one: one.step.seconds)[:top]


def _fastest(given: Iterable[Facts], known: Calibration | None) -> list[Advice]:
    """The fastest candidate of each layout, if one fits."""
    best: dict[tuple[Any, ...], Advice] = {}
    for candidate in given:
        need = memory.peak(candidate).total
        if need > fit.capacity(str(candidate.cluster.gpu)):
            continue
        found = Advice(candidate, speed.of_step(candidate, known), need)
        key = dataclasses.astuple(candidate.layout)
        if key not in best or found.step.seconds < best[key].step.seconds:
            best[key] = found
    return list(best.values())


def why_none(f: Facts) -> str:
    """Why `advise` lists nothing for these nodes, and what would help."""
    gpus = f"{counted(f.cluster.nodes * f.cluster.gpus_per_node, 'GPU')} of {f.cluster.gpu}"
    plain = list(candidates(f))
    needs = [memory.peak(candidate).total for candidate in (*plain, *sharded(plain))]
    if not needs:
        # Without parallelism the batch is divided by all GPUs; had it come out even, this layout would be a candidate.
        alone = dataclasses.replace(f, layout=_plain(f), training=dataclasses.replace(f.training, mbs=1))
        broken = "; ".join(str(found) for found in table.check(alone) if found.level == "error")
        return f"no layout is legal on {gpus}; without parallelism: {broken}"
    text = f"no layout fits on {gpus}: the smallest of {len(needs):,} that were tried takes {min(needs) / GIB:.1f}"
    text += f" of {fit.capacity(str(f.cluster.gpu)) / GIB:.1f} GiB"
    more = (nodes for nodes in _more_nodes(f) if advise(on_nodes(f, nodes), 1))
    if (nodes := next(more, None)) is not None:
        return f"{text}; {nodes:,} nodes suffice: --nodes {nodes}"
    return f"{text}; nor does one fit on up to {MOST_NODES} times as many nodes: take GPUs with more memory"


def _more_nodes(f: Facts) -> list[int]:
    return [f.cluster.nodes * factor for factor in _powers(MOST_NODES)[1:]]


def on_nodes(f: Facts, nodes: int) -> Facts:
    return dataclasses.replace(f, cluster=dataclasses.replace(f.cluster, nodes=nodes))


def _plain(f: Facts) -> Layout:
    """The layout without parallelism, apart from copies; what no key of a candidate sets stays as the experiment has
    it."""
    sizes = {axis.name: axis.default for axis in AXES}
    world = f.cluster.nodes * f.cluster.gpus_per_node
    return dataclasses.replace(
        f.layout, world_size=world, **sizes, **EVEN, sp=False, fsdp="none", distributed_optimizer=f.training.has_shards
    )


def candidates(f: Facts, shortest: int = 4096) -> Iterator[Facts]:
    """Every legal layout, with tensor ranks inside a node. `shortest`: minimum number of tokens on a context rank."""
    gpus, world = f.cluster.gpus_per_node, f.cluster.nodes * f.cluster.gpus_per_node
    layers = f.model.layers or 1
    tensor = [tp for tp in _powers(gpus) if gpus % tp == 0]
    stages = [pp for pp in range(1, min(layers, world) + 1) if world % pp == 0]
    context = [cp for cp in _powers(world) if cp == 1 or (f.training.seq_length or 0) // cp >= shortest]
    experts = _powers(f.model.experts or 1)
    plain = _plain(f)
    for tp, pp, cp, ep in product(tensor, stages, context, experts):
        for change in _divided(layers, pp):
            layout = dataclasses.replace(plain, tp=tp, pp=pp, cp=cp, ep=ep, sp=tp > 1, **change)
            yield from _filled(dataclasses.replace(f, layout=layout))


def sharded(plain: Iterable[Facts]) -> Iterator[Facts]:
    """Those of these candidates that have no pipeline, with Megatron-FSDP, as far as that is legal."""
    for one in plain:
        if one.layout.pp == 1:
            changed = dataclasses.replace(one, layout=dataclasses.replace(one.layout, fsdp="megatron"))
            if table.is_legal(changed):
                yield changed


def _filled(f: Facts) -> Iterator[Facts]:
    """The layout with every micro-batch size that divides the batch, with and without recomputation."""
    for mbs, recomputed in product(MICRO_BATCHES, (dict.fromkeys(fit.RECOMPUTED), fit.RECOMPUTED)):
        found = with_keys(f, {"training.micro_batch_size": mbs, **recomputed})
        if found.microbatches and table.is_legal(found):
            yield found


def _powers(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length()) if 2**power <= limit]


def _divided(layers: int, pp: int) -> list[Tree]:
    """How stages share the layers: evenly, with virtual stages too; if that isn't possible, with the embedding and the
    loss counted as a layer each, or the loss alone; or else with fewer layers at the ends."""
    if pp == 1:
        return [{}]
    for counted_too in ({}, {"embedding_counts": True, "loss_counts": True}, {"loss_counts": True}):
        each, rest = divmod(layers + len(counted_too), pp)
        if not rest and each > len(counted_too):
            return [{**counted_too, "vpp": vpp} for vpp in (None, 2, 4) if not each % (vpp or 1)]
    each = -(-layers // pp)
    ends = layers - each * (pp - 2)
    return [{"first_stage_layers": ends - ends // 2, "last_stage_layers": ends // 2}] if ends >= 2 else []


def differences(facts: Facts, own: Facts) -> Tree:
    """The keys of the experiment in which a setting differs from the user's run."""
    found = {key: value for key in SEARCHED if (value := of_key(facts, key)) != of_key(own, key)}
    for name in ("nodes", "gpu"):
        if getattr(facts.cluster, name) != getattr(own.cluster, name):
            found[f"resources.{name}"] = getattr(facts.cluster, name)
    return found


def yaml(found: list[Advice], own: Facts, model: str | None = None) -> str:
    """A sweep over the layouts, to be pasted into the experiment that `own` is from. `model`: its name, if the
    experiment doesn't choose one itself."""
    # All runs of an experiment share the device: it can't be a key of the sweep.
    lines = ["device: cuda", ""] if own.cluster.device != "cuda" else []
    lines += ["sweep:", "  runs:"]
    for one in found:
        # Every run of a sweep needs a key: the micro-batch is always there.
        keys = {"model": model} if model else {}
        keys |= differences(one.facts, own) | {"training.micro_batch_size": one.facts.training.mbs}
        values = ", ".join(f"{key}: {json.dumps(value)}" for key, value in keys.items())
        lines.append(f"    {one.name}: {{{values.replace('"', '')}}}")
    return "\n".join(lines)


def text(found: list[Advice]) -> str:
    lines = [f"{'layout':32} {'s/step':>8} {'of it':>6} {'GiB':>6}  spent on"]
    tight = False
    for one in found:
        slower = one.step.seconds / found[0].step.seconds
        is_tight = fit.may_not_fit(one.facts, one.need)
        tight = tight or is_tight
        gib = f"{one.need / GIB:6.1f}{'!' if is_tight else ' '}"
        lines.append(f"{one.name:32} {one.step.seconds:8.3g} {slower:6.2f} {gib} {one.step.shares(0.02)}")
    if tight:
        f = found[0].facts
        has = f"{f.cluster.gpu} has {fit.capacity(str(f.cluster.gpu)) / GIB:.1f} GiB"
        lines.append(f"!: {has}; with the prediction's error of {fit.stated_error(f):.0%} it may not fit")
    return "\n".join(lines)
