"""The cuDNN that is loaded, and the sequence lengths that it can't replay in a graph."""

from __future__ import annotations

from megaboa.bridge import wheels
from megaboa.check.facts import Facts
from megaboa.check.graphs import full_graph_has_whole_blocks_of_attention
from megaboa.check.rule import finding
from megaboa.errors import InputError

REPLAYS_ALL_LENGTHS = (9, 15, 1)


def version() -> tuple[int, ...] | None:
    """Version of the cuDNN that Transformer Engine has loaded, which may differ from PyTorch's."""
    if not wheels.is_installed("transformer_engine_torch"):
        return None
    from transformer_engine.pytorch.utils import get_cudnn_version

    return get_cudnn_version()


def refuse_lengths(facts: Facts, here: tuple[int, ...] | None) -> None:
    """Refuse sequence lengths that this cuDNN can't replay. Preflight could only warn, because it doesn't know the
    version.

    With an older one the run would end in an illegal memory access or, even worse, train with wrong gradients.
    """
    broken = full_graph_has_whole_blocks_of_attention(facts)
    if broken and here and here < REPLAYS_ALL_LENGTHS:
        found = finding(full_graph_has_whole_blocks_of_attention, broken)
        raise InputError(f"{found}; here it is {'.'.join(map(str, here))}")
