"""Does a run fit into its GPUs' memory? If not, what is the cheapest change that makes it fit?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megaboa import peaks
from megaboa.check import memory
from megaboa.check.fact_sources import of_key, with_keys
from megaboa.check.facts import Facts
from megaboa.check.memory import GIB
from megaboa.check.rule import Broken, warning
from megaboa.records import Tree

USABLE = 0.99  # share of the nominal GiB: an H100 of 80 has 79.6, an H200 of 141 has 139.8
CALIBRATED = 0.05  # stated for models like those that were measured
DENSE = 0.07  # none of 31 dense runs on B200s reserved more (benchmarks/measured/simumax-b200.csv)
NOTHING_FITS = "no change of micro-batch, recomputation, tp, pp or ep on these GPUs fits"
RECOMPUTED = {  # everything but the layers' inputs
    "overrides.model.recompute_granularity": "full",
    "overrides.model.recompute_method": "uniform",
    "overrides.model.recompute_num_layers": 1,
}
SELECTIVE = {
    "dense": ("mlp",),
    "moe": ("layernorm", "moe_act", "shared_experts"),
    "latent": ("mla_up_proj",),
}
# Families with Megatron's own layers and gated SiLU, for which Bridge's converter doesn't enable the fused activation,
# although NVIDIA's recipes for Qwen3 do. Similar families have layers of their own, or haven't been tried.
UNFUSED = frozenset(("mistral", "olmoe", "qwen2", "qwen3", "qwen3_moe"))


@dataclass(frozen=True)
class Change:
    """New values of keys, and what they cost in a step."""

    values: Tree
    price: str
    facts: Facts

    def __str__(self) -> str:
        return ", ".join(f"{key}: {_shown(value)}" for key, value in self.values.items())


def capacity(gpu: str) -> float:
    """Bytes that a process can use on a GPU such as h100-80g."""
    found = peaks.memory_gib(gpu)
    if found is None:
        raise ValueError(f"{gpu!r} must be a name and its memory, as h100-80g")
    return found * GIB * USABLE


def taken(f: Facts, need: memory.Breakdown) -> float:
    """Bytes that a process takes on its device. Processors need no CUDA, no NCCL, and no allocator that reserves
    more."""
    return need.total if f.cluster.device == "cuda" else need.tensors


def stated_error(f: Facts) -> float:
    """Possible excess over the prediction: least for models like those that the numbers come from, without rotary
    positions; most if tokens may be spread unevenly over experts, or PyTorch's FSDP gathers."""
    if f.model.is_sparse or f.model.latent or f.layout.fsdp == "torch":
        return memory.STATED_ERROR
    return CALIBRATED if f.model.learned_positions and f.layout.fsdp == "none" else DENSE


def memory_suffices(f: Facts, is_legal: Callable[[Facts], bool]) -> Broken | None:
    """A rank's predicted memory is less than that of resources.gpu: otherwise an allocation fails."""
    if f.cluster.gpu is None or f.cluster.device != "cuda" or not memory.is_known(f):
        return None
    need, limit = memory.peak(f), capacity(f.cluster.gpu)
    if need.total <= limit:
        return _near(f, need, limit)
    change = cheapest(f, is_legal)
    text = f"{f.cluster.gpu} has {limit / GIB:.1f} GiB, {_described(need)}"
    if change is None:
        return Broken("resources.gpu", f"{text}; {NOTHING_FITS}")
    after = memory.peak(change.facts).total
    text += f"; {change} fits by prediction: {after / GIB:.1f} GiB ({change.price})"
    return Broken("resources.gpu", f"{text}; `megaboa advise` lists the fastest layouts that fit")


def may_not_fit(f: Facts, need: float) -> bool:
    """Whether a run that takes this many bytes by prediction may need more than its GPU has."""
    return need * (1 + stated_error(f)) > capacity(str(f.cluster.gpu))


def _near(f: Facts, need: memory.Breakdown, limit: float) -> Broken | None:
    if not may_not_fit(f, need.total):
        return None
    text = f"{f.cluster.gpu} has {limit / GIB:.1f} GiB, {_described(need)}: with the prediction's error of"
    return warning("resources.gpu", f"{text} {stated_error(f):.0%} it may not fit")


def _described(need: memory.Breakdown) -> str:
    parts = {name: size for name, size in need.gib().items() if name not in ("tensors", "total")}
    parts |= {"fragmentation": need.fragmentation / GIB, "CUDA and NCCL": memory.CONTEXT / GIB}
    listed = ", ".join(f"{name} {size:.1f}" for name, size in parts.items() if size or name != "graphs")
    return f"and stage {need.stage} takes {need.total / GIB:.1f} by prediction ({listed})"


def cheapest(f: Facts, is_legal: Callable[[Facts], bool]) -> Change | None:
    """The first legal change that fits, in order of cost."""
    limit = capacity(str(f.cluster.gpu))
    fitting = (one for one in changes(f) if is_legal(one.facts) and memory.peak(one.facts).total <= limit)
    return next(fitting, None)


def changes(f: Facts) -> Iterator[Change]:
    """Changes in order of cost; all keep the batch and the number of GPUs."""
    free: Tree = {}
    if not f.layout.distributed_optimizer and f.layout.fsdp == "none" and f.training.has_shards:
        free["parallel.distributed_optimizer"] = True
    if f.layout.tp > 1 and not f.layout.sp:
        free["parallel.sp"] = True
    if f.model.family in UNFUSED and f.model.has_swiglu and not f.kernels.activates_at_once:
        free["overrides.model.bias_activation_fusion"] = True
    if free:
        yield _change(f, free, "free")
    for mbs in _halves(f.training.mbs or 1):
        yield _change(f, {**free, "training.micro_batch_size": mbs}, "smaller matrix products")
    smallest = {**free, "training.micro_batch_size": 1}
    for kind, parts in SELECTIVE.items():
        modules = tuple(part for part in parts if _is_recomputable(f, part))
        if {"dense": not f.model.is_sparse, "moe": f.model.is_sparse, "latent": f.model.latent}[kind]:
            yield _change(f, {**smallest, **_selective(modules)}, "part of the model is computed twice")
    wider = list(_more_expert_ranks(f))
    for spread in wider:
        yield _change(f, {**smallest, **spread}, "tokens are sent to experts")
    yield _change(f, {**smallest, **RECOMPUTED}, "a third more calculation")
    for spread in wider:
        yield _change(
            f, {**smallest, **RECOMPUTED, **spread}, "tokens are sent to experts, and a third more calculation"
        )
    for recomputed, price in (
        ({}, "more communication"),
        (RECOMPUTED, "more communication, and a third more calculation"),
    ):
        for spread in (*reversed(wider), {}):  # tensor ranks make small products of small experts even smaller
            yield from _splits(f, {**smallest, **recomputed, **spread}, price)


def _is_recomputable(f: Facts, part: str) -> bool:
    match part:
        case "mlp":
            return not f.model.bias
        case "shared_experts":
            return bool(f.model.shared_ffn) and not f.kernels.shared_expert_overlap
        case _:
            return True


def _more_expert_ranks(f: Facts) -> Iterator[Tree]:
    """Changes to more expert ranks; the legal ones divide the experts and the ranks."""
    ep = f.layout.ep * 2
    while f.model.is_sparse and ep <= min(f.model.experts or 1, f.layout.world_size or 1):
        yield {"parallel.ep": ep}
        ep *= 2


def _halves(mbs: int) -> Iterator[int]:
    while mbs > 1:
        mbs //= 2
        yield mbs


def _selective(modules: tuple[str, ...]) -> Tree:
    return {"overrides.model.recompute_granularity": "selective", "overrides.model.recompute_modules": modules}


def _splits(f: Facts, given: Tree, price: str) -> Iterator[Change]:
    """Changes to more tensor ranks inside a node, then those to more pipeline stages."""
    tp, pp, gpus = f.layout.tp, f.layout.pp, f.cluster.gpus_per_node
    for factor in (2, 4, 8):
        if tp * factor <= gpus:
            yield _change(f, {**given, "parallel.tp": tp * factor, "parallel.sp": True}, price)
    for factor in (2, 4, 8, 16):
        yield _change(f, {**given, "parallel.pp": pp * factor}, price)
        if tp < gpus and gpus % 2 == 0:
            wide = {"parallel.tp": min(8, gpus), "parallel.sp": True, "parallel.pp": pp * factor}
            yield _change(f, {**given, **wide}, price)


def _change(f: Facts, values: Tree, price: str) -> Change:
    told = {key: value for key, value in values.items() if of_key(f, key) != value}
    return Change(told, price, with_keys(f, values))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)
