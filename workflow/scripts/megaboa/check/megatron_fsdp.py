"""When Megatron-FSDP takes most: moments of a step, and what is whole then beside the shards.

By megatron-core 0.19.2 (megatron_fsdp.py, param_and_grad_buffer.py), and by snapshots of two and four H200s' memory
(docs/explanation/memory.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megaboa.check.parameters import Parameters

GATHERED_AHEAD = 500_000_000  # parameters, beside the layer that is calculated: by whole layers
QUEUED = 1_000_000_000  # parameters whose gradients wait to be reduced, before the oldest are waited for


@dataclass(frozen=True)
class Moment:
    """Parameters whose weights and gradients are whole, and the share of activations that is still kept."""

    weights: float = 0.0
    gradients: float = 0.0
    kept: float = 1.0


def forward(sharding: str, held: Parameters) -> Moment:
    """At the loss. What lies outside of layers stays whole from the first step on."""
    return Moment(held.outside + held.layer) if sharding == "optim_grads_params" else Moment()


def backward(sharding: str, held: Parameters, layers: int) -> list[Moment]:
    """At every layer, from the last to the first."""
    if sharding == "optim_grads":
        return [Moment(gradients=held.total)]  # one bucket, where Bridge is given no size of them
    if sharding != "optim_grads_params" or not held.layer:
        return [Moment()]
    ahead = 1 + math.ceil(GATHERED_AHEAD / held.layer)
    queued = 2 + math.floor(QUEUED / held.layer)
    return [
        Moment(
            held.outside + min(layers - done, ahead) * held.layer,
            held.outside + min(done + 1, queued) * held.layer,
            (layers - done) / layers,
        )
        for done in range(layers)
    ]
