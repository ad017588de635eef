"""What Megatron-FSDP holds whole for a moment, beside its shards: in parameters.

By megatron-core 0.19.2 (megatron_fsdp.py, param_and_grad_buffer.py), and by snapshots of two and four H200s' memory
(docs/memory.md).
"""

from __future__ import annotations

import math

from megaboa.estimate.parameters import Parameters

PREFETCHED = 500_000_000  # parameters that are gathered ahead of the layer that is calculated, by whole layers


def gathered_in_forward(sharding: str, held: Parameters) -> float:
    """Weights: those outside of layers always, and the layer that is calculated."""
    return held.outside + held.layer if sharding == "optim_grads_params" else 0.0


def gathered_in_backward(sharding: str, held: Parameters) -> float:
    """The same, and as many layers as are gathered ahead."""
    if sharding != "optim_grads_params":
        return 0.0
    layers = held.total - held.outside
    ahead = math.ceil(PREFETCHED / held.layer) * held.layer if held.layer else 0.0
    return held.outside + min(layers, held.layer + ahead)


def whole_gradients(sharding: str, held: Parameters) -> float:
    """Until they have been reduced: all in one bucket, or bucket by bucket where each layer is one."""
    if sharding == "optim_grads":
        return held.total
    return held.outside + held.layer if sharding == "optim_grads_params" else 0.0
