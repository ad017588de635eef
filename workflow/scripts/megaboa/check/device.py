"""What a run can't be on a device for, whatever else is right with it."""

from __future__ import annotations

from megaboa.check.facts import Facts
from megaboa.check.rule import Broken


def machine_has_the_gpus(f: Facts) -> Broken | None:
    """Where `device: auto` takes this machine's GPUs, a run asks for no more than there are: each rank has its own."""
    has, wants = f.cluster.machine_gpus, f.cluster.gpus_per_node
    if has is None or wants <= has:
        return None
    return Broken(
        "resources.gpus_per_node", f"{wants}, and this machine has {has} GPU{'' if has == 1 else 's'}", (has,)
    )


def context_ranks_have_attention(f: Facts) -> Broken | None:
    """On GPUs, attention over context parallel ranks is Transformer Engine's fused one, which takes 16 bits or fewer:
    for fp32 it finds no backend, in the first step."""
    if f.cluster.device != "cuda" or f.layout.cp == 1 or f.training.precision != "fp32":
        return None
    return Broken("training.precision", f"fp32 with parallel.cp: {f.layout.cp} on GPUs", ("bf16_mixed",))


RULES = (machine_has_the_gpus, context_ranks_have_attention)
