"""What preflight could only warn of: here it is known which cuDNN attention will be calculated with."""

from __future__ import annotations

from megaboa.bridge.wheels import is_installed
from megaboa.check.facts import Facts
from megaboa.check.graphs import full_graph_has_whole_blocks_of_attention
from megaboa.check.rule import finding
from megaboa.errors import InputError

REPLAYS_ALL_LENGTHS = (9, 15, 1)


def version() -> tuple[int, ...] | None:
    """Of the cuDNN that Transformer Engine has loaded, which may be another than PyTorch's."""
    if not is_installed("transformer_engine_torch"):
        return None
    from transformer_engine.pytorch.utils import get_cudnn_version

    return get_cudnn_version()


def refuse_lengths(facts: Facts, here: tuple[int, ...] | None) -> None:
    """With an older one a run would end in an illegal memory access, or with wrong gradients, which is worse."""
    broken = full_graph_has_whole_blocks_of_attention(facts)
    if broken and here and here < REPLAYS_ALL_LENGTHS:
        found = finding(full_graph_has_whole_blocks_of_attention, broken)
        raise InputError(f"{found}; here it is {'.'.join(map(str, here))}")
