"""Ranks and batches: divisibility that is required before any tensor is looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megaboa.check.facts import Facts
from megaboa.check.rule import Broken, divisors, multiples, warning
from megaboa.layout import DENSE, EXPERTS, Layout


def ranks_fill_the_layout(f: Facts) -> Broken | None:
    """The number of ranks is a multiple of tp * pp * cp; parallel_state.py stops every rank otherwise."""
    world, size = f.layout.world_size, f.layout.model_ranks
    if world is None or world < size or world % size == 0:
        return None
    return Broken(
        "resources.gpus_per_node",
        f"nodes * gpus_per_node = {world} is not a multiple of {_product(f.layout, DENSE)}",
        multiples(world, size),
    )


def one_copy_of_the_model_at_least(f: Facts) -> Broken | None:
    """There are at least tp * pp * cp ranks: with fewer, the data parallel size would be 0."""
    world, size = f.layout.world_size, f.layout.model_ranks
    if world is None or world >= size:
        return None
    return Broken(
        "resources.gpus_per_node",
        f"nodes * gpus_per_node = {world} is less than {_product(f.layout, DENSE)}",
        (size,),
    )


def ranks_fill_the_expert_layout(f: Facts) -> Broken | None:
    """The number of ranks is a multiple of etp * ep * pp; parallel_state.py refuses to build the experts' groups
    otherwise."""
    world, layout = f.layout.world_size, f.layout
    size = layout.expert_ranks
    if world is None or not f.model.is_sparse or world % size == 0:
        return None
    legal = divisors(world // layout.pp // layout.expert_tp, layout.ep) if world % layout.pp == 0 else ()
    return Broken(
        "parallel.ep",
        f"nodes * gpus_per_node = {world} is not a multiple of {_product(layout, EXPERTS[::-1])}",
        legal,
    )


def batch_fills_the_ranks(f: Facts) -> Broken | None:
    """The global batch is a multiple of micro_batch_size * dp; num_microbatches_calculator.py asserts it."""
    dp, gbs, mbs = f.layout.dp, f.training.gbs, f.training.mbs
    if not dp or gbs is None or not mbs or gbs % (mbs * dp) == 0:
        return None
    return Broken(
        "training.global_batch_size",
        f"{gbs} is not a multiple of micro_batch_size * dp = {mbs} * {dp} = {mbs * dp}",
        multiples(gbs, mbs * dp),
    )


def batch_has_one_size(f: Facts) -> Broken | None:
    """The batch has one size from the first step to the last: Megatron-Core 0.19 ignores train.rampup_batch_size, and
    tokens, learning rates, epochs and resumes are planned for one size."""
    if not f.training.rampup:
        return None
    return Broken(
        "train.rampup_batch_size",
        f"{f.training.rampup} would change nothing, as Megatron-Core 0.19 ignores it: leave it out; for a smaller "
        "batch at first, train a run with it, and another one from its checkpoint (continue_from)",
        ("null",),
    )


def batch_fills_the_optimizer_instances(f: Facts) -> Broken | None:
    """Under FSDP a global batch that is a multiple of micro_batch_size * dp * instances gives all instances equal work;
    CloudAI refuses others, Bridge 0.6.2 accepts them."""
    dp, gbs, mbs, instances = f.layout.dp, f.training.gbs, f.training.mbs, f.layout.optimizer_instances
    if f.layout.fsdp == "none" or instances < 2 or not dp or gbs is None or not mbs or gbs % (mbs * dp):
        return None
    unit = mbs * dp * instances
    if gbs % unit == 0:
        return None
    text = f"{gbs} is not a multiple of micro_batch_size * dp * optimizer instances = {mbs} * {dp} * {instances} = "
    text += str(unit)
    return warning("training.global_batch_size", text, multiples(gbs, unit))


def evaluation_batch_fills_the_ranks(f: Facts) -> Broken | None:
    """A separate evaluation batch size is a multiple of eval_micro_batch_size * dp; ConfigContainer.validate asserts
    it."""
    dp, gbs, mbs = f.layout.dp, f.training.eval_gbs, f.training.eval_mbs or f.training.mbs
    if not dp or gbs is None or not mbs or gbs % (mbs * dp) == 0:
        return None
    return Broken(
        "validation.eval_global_batch_size",
        f"{gbs} is not a multiple of eval_micro_batch_size * dp = {mbs} * {dp} = {mbs * dp}",
        multiples(gbs, mbs * dp),
    )


def optimizer_instances_share_the_ranks(f: Facts) -> Broken | None:
    """dp * cp is a multiple of ddp.num_distributed_optimizer_instances; parallel_state.py asserts it."""
    dp, instances = f.layout.dp, f.layout.optimizer_instances
    if not dp or (dp * f.layout.cp) % instances == 0:
        return None
    return Broken(
        "ddp.num_distributed_optimizer_instances",
        f"dp * cp = {dp} * {f.layout.cp} can't be divided over {instances} instances",
        divisors(dp * f.layout.cp, instances),
    )


def tensor_ranks_stay_in_a_node(f: Facts) -> Broken | None:
    """Tensor parallel ranks communicate several times per layer: across nodes they wait for the network. Megatron
    accepts it.
    """
    tp, gpus = f.layout.tp, f.cluster.gpus_per_node
    if f.cluster.device != "cuda" or f.cluster.nodes == 1 or gpus % tp == 0:
        return None
    where = (
        f"spreads over {-(-tp // gpus)} nodes"
        if tp > gpus
        else "doesn't divide a node's GPUs: groups straddle two nodes"
    )
    return warning("parallel.tp", f"{tp} {where} (gpus_per_node: {gpus})", divisors(gpus, tp))


def tasks_are_ranks(f: Facts) -> Broken | None:
    """The scheduler gives each node resources.gpus_per_node tasks and GPUs."""
    asked = f.cluster.tasks_per_node
    if asked is None or asked == f.cluster.gpus_per_node:
        return None
    return Broken(
        "resources.slurm_extra",
        f"asks for {asked} tasks or GPUs per node, resources.gpus_per_node for {f.cluster.gpus_per_node}: remove it",
    )


def _product(layout: Layout, axes: Sequence[str]) -> str:
    """`tp * pp * cp = 2 * 1 * 2 = 4`"""
    sizes = [layout.size(name) for name in axes]
    return f"{' * '.join(axes)} = {' * '.join(map(str, sizes))} = {math.prod(sizes)}"


RULES = (
    ranks_fill_the_layout,
    one_copy_of_the_model_at_least,
    ranks_fill_the_expert_layout,
    batch_fills_the_ranks,
    batch_has_one_size,
    batch_fills_the_optimizer_instances,
    evaluation_batch_fills_the_ranks,
    optimizer_instances_share_the_ranks,
    tensor_ranks_stay_in_a_node,
    tasks_are_ranks,
)
