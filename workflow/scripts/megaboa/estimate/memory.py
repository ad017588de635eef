"""The most memory that tensors take on a rank, part by part.

Held against the peaks that were measured for GPT2-large on H200s (tests/estimate/test_memory.py), some of which also
gave the bytes for each logit: the largest error there is 2%. Other kinds were measured later (docs/memory.md): 15% is
stated for them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from megaboa.estimate import activations, megatron_fsdp, parameters
from megaboa.estimate.parameters import Parameters
from megaboa.estimate.stages import Stage, in_flight, stages
from megaboa.preflight.facts import Facts

GIB = 2**30
STATED_ERROR = 0.15
WORKSPACE = 0.17e9  # of cuBLAS, and small tensors: measured at rest
CONTEXT = 3 * GIB  # what CUDA and NCCL take beside PyTorch: 2.8 GiB measured on an H200
FRAGMENTATION = 0.05  # of PyTorch's own memory: 7.4 of 134 GiB measured where it ran out


@dataclass(frozen=True)
class Breakdown:
    """Bytes on one rank of a pipeline stage, at the moment when most are taken."""

    stage: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float  # or the gradients inside a layer, where these are more
    workspace: float = WORKSPACE

    @property
    def tensors(self) -> float:
        """What `torch.cuda.max_memory_allocated` would say."""
        return sum(getattr(self, one.name) for one in fields(self) if one.name != "stage")

    @property
    def total(self) -> float:
        """With what CUDA and NCCL take, and what PyTorch can't use for want of one large piece."""
        return self.tensors * (1 + FRAGMENTATION) + CONTEXT

    def gib(self) -> dict[str, float]:
        parts = {one.name: getattr(self, one.name) / GIB for one in fields(self) if one.name != "stage"}
        return {**parts, "tensors": self.tensors / GIB, "total": self.total / GIB}


def is_known(f: Facts) -> bool:
    """Whether enough is known of a model and its training."""
    model, training = f.model, f.training
    needed = (model.layers, model.hidden, model.heads, training.mbs, training.seq_length, training.precision)
    return (
        None not in needed
        and not model.hybrid
        and bool(model.layers and model.heads)
        and bool(parameters.vocabulary_rows(f))
        and f.layout.dp is not None
    )


def peak(f: Facts) -> Breakdown:
    """Of the stage that needs most."""
    return max(every_stage(f), key=lambda one: one.tensors)


def every_stage(f: Facts) -> list[Breakdown]:
    return [_stage(f, stage) for stage in stages(f)]


def _stage(f: Facts, stage: Stage) -> Breakdown:
    held = parameters.of_stage(f, stage)
    kept = activations.stage_bytes(f, stage) * in_flight(f, stage.number)
    logits = activations.logits_bytes(f) * (1 + stage.mtp) if stage.loss else 0.0
    inside = max(activations.backward_bytes(f, stage), activations.recomputed_bytes(f, stage))
    plain = Breakdown(stage.number, *_states(f, held), kept, max(logits, inside))
    if f.layout.fsdp != "megatron":
        return plain
    backward = max(inside, activations.logits_gradient_bytes(f) if stage.loss else 0.0)
    return max(_moments_of_fsdp(f, held, plain, backward), key=lambda one: one.tensors)


def _moments_of_fsdp(f: Facts, held: Parameters, shards: Breakdown, backward: float) -> list[Breakdown]:
    """At the end of the forward pass, at the beginning of the backward pass, and in the optimizer's step.

    Megatron-FSDP gathers weights, holds gradients whole until they are reduced, and copies 16-bit ones to fp32 for the
    optimizer.
    """
    weight, gradient, optimizer = bytes_per_parameter(f)
    sharding = f.layout.fsdp_sharding
    gathered = weight * megatron_fsdp.gathered_in_forward(sharding, held)
    gathered_again = weight * megatron_fsdp.gathered_in_backward(sharding, held)
    whole = gradient * megatron_fsdp.whole_gradients(sharding, held)
    copied = 4 * shards.optimizer / optimizer if gradient < 4 else 0.0
    return [
        replace(shards, weights=shards.weights + gathered),
        replace(shards, weights=shards.weights + gathered_again, gradients=shards.gradients + whole, logits=backward),
        replace(
            shards, weights=shards.weights + gathered, gradients=shards.gradients + copied, activations=0.0, logits=0.0
        ),
    ]


def _states(f: Facts, held: Parameters) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer."""
    copies = (f.layout.dp or 1) * f.layout.cp // f.layout.optimizer_instances or 1
    expert_copies = (f.layout.expert_dp or 1) // f.layout.optimizer_instances or 1
    dense, expert = _sharded(f, held.dense, copies), _sharded(f, held.expert, expert_copies)
    weights, gradients, optimizer = (one + other for one, other in zip(dense, expert, strict=True))
    if f.layout.fsdp == "torch":
        weight, gradient, _ = bytes_per_parameter(f)
        weights += 2 * held.layer * weight  # two layers are whole at a time
        gradients += held.layer * gradient
    return weights, gradients, optimizer


def _sharded(f: Facts, count: float, copies: int) -> tuple[float, float, float]:
    weight, gradient, optimizer = (count * size for size in bytes_per_parameter(f))
    layout = f.layout
    strategy = layout.fsdp_sharding if layout.fsdp == "megatron" else "optim_grads_params"
    if layout.fsdp == "none":
        return weight, gradient, optimizer / (copies if layout.distributed_optimizer else 1)
    return (
        weight / (copies if strategy == "optim_grads_params" else 1),
        gradient / (copies if strategy in ("optim_grads", "optim_grads_params") else 1),
        optimizer / (1 if strategy == "no_shard" else copies),
    )


def bytes_per_parameter(f: Facts) -> tuple[float, float, float]:
    """Weight, gradient and optimizer: fp32 copies of 16-bit weights, and Adam's two moments (or SGD's one)."""
    moments = 4 if f.training.optimizer == "sgd" else 8
    reduced = 2 if f.layout.fsdp == "megatron" else 4  # that one keeps gradients in the weights' precision
    match f.training.precision:
        case "fp32":
            return 4, 4, moments
        case "fp16_mixed":  # Bridge reduces its gradients in fp16
            return 2, 2, 4 + moments
        case str() as precision if "fp8_delayed" in precision or "subchannel" in precision or "mxfp8" in precision:
            return 2 + 2, reduced, 4 + moments  # and quantized weights, by rows and by columns
        case _:
            return 2, reduced, 4 + moments
