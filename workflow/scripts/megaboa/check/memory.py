"""The peak of tensors' memory on a rank, part by part.

Compared with measured peaks in tests/check/test_memory.py and tests/benchmarks/test_predictions.py: dense models are
within 2%. The bytes per logit of Bridge's loss were fitted to GPT2-large (docs/explanation/memory.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from megaboa.check import activations, adapters, graph_memory, parameters, work
from megaboa.check.facts import Facts
from megaboa.check.parameters import Parameters, is_sparse
from megaboa.check.stages import Stage, in_flight, stages
from megaboa.model_kinds import BY_NAME

GIB = 2**30
STATED_ERROR = 0.15
WORKSPACE = 0.17e9  # for cuBLAS and small tensors: measured at rest
CONTEXT = 3 * GIB  # for CUDA and NCCL, outside of PyTorch: 2.8 GiB measured on an H200
FRAGMENTATION = 0.05  # share of PyTorch's own memory: 7.4 of 134 GiB measured when it ran out
# For Megatron-FSDP, from megatron-core 0.19.2 (megatron_fsdp.py, param_and_grad_buffer.py), and from snapshots of two
# and four H200s' memory (docs/explanation/memory.md).
GATHERED_AHEAD = 500_000_000  # parameters gathered in advance, by whole layers, besides the current layer's
QUEUED = 1_000_000_000  # parameters whose gradients may be queued for reduction before the oldest are waited for
MOMENT = 4  # bytes of one of Adam's moments, or of Muon's momentum
ORTHOGONALIZED = 12  # bytes per value of Muon's matrix: the result in fp32, and both steps of its scaling


@dataclass(frozen=True)
class Breakdown:
    """Bytes on one rank of a pipeline stage, at the peak."""

    stage: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float  # or the gradients inside a layer, if these are larger
    workspace: float = WORKSPACE
    graphs: float = 0.0  # what another moment needs more, as graphs keep memory where PyTorch counts no tensors

    @property
    def tensors(self) -> float:
        """The equivalent of `torch.cuda.max_memory_allocated`."""
        return sum(getattr(self, one.name) for one in fields(self) if one.name not in ("stage", "graphs"))

    @property
    def fragmentation(self) -> float:
        return self.tensors * FRAGMENTATION

    @property
    def total(self) -> float:
        """Including CUDA, NCCL and PyTorch's fragmentation."""
        return self.tensors + self.fragmentation + self.graphs + CONTEXT

    def gib(self) -> dict[str, float]:
        parts = {one.name: getattr(self, one.name) / GIB for one in fields(self) if one.name != "stage"}
        return {**parts, "tensors": self.tensors / GIB, "total": self.total / GIB}


def is_known(f: Facts) -> bool:
    """Whether enough is known about a model and its training."""
    model, training = f.model, f.training
    needed = (model.layers, model.hidden, model.heads, training.mbs, training.seq_length, training.precision)
    return (
        None not in needed
        and not model.hybrid
        and BY_NAME[model.kind].predicted
        and bool(model.layers and model.heads)
        and bool(parameters.vocabulary_rows(f))
        and f.layout.dp is not None
    )


def peak(f: Facts) -> Breakdown:
    """The breakdown of the stage that needs most."""
    return max(every_stage(f), key=lambda one: one.total)


def every_stage(f: Facts) -> list[Breakdown]:
    return [_stage(f, stage) for stage in stages(f)]


def _stage(f: Facts, stage: Stage) -> Breakdown:
    held = parameters.of_stage(f, stage)
    trained = Parameters(adapters.of_stage(f, stage), 0.0) if f.is_frozen else held
    states = _frozen_states(f, held, trained) if f.is_frozen else _states(f, held)
    kept = activations.stage_bytes(f, stage) * in_flight(f, stage.number) + activations.left_bytes(f, stage)
    logits = activations.logits_bytes(f) * (1 + stage.mtp) if stage.loss else 0.0
    inside = activations.backward_bytes(f, stage) + activations.recomputed_bytes(f, stage)
    workspace = WORKSPACE + _unused_gradients(f, stage)
    weights, *states = states
    weights += _quantized_copies(f, stage, held)
    plain = Breakdown(stage.number, weights, *states, kept, max(logits, inside), workspace)
    if f.layout.fsdp == "megatron":
        return _highest(_moments_of_fsdp(f, stage, held, plain, inside))
    moments = [plain, _optimizer_step(f, stage, trained, plain)]
    if f.kernels.graphs == "transformer_engine":
        moments += _graph_moments(f, stage, *moments)
    return _highest(moments)


def _quantized_copies(f: Facts, stage: Stage, held: Parameters) -> float:
    """Bytes of the copies that 16-bit weights are cast to once a step, by rows and by columns.

    Transformer Engine keeps both (module/base.py, get_weight_workspace), and they are unsharded even under
    Megatron-FSDP. This is for current and delayed scaling, in layers that calculate in FP8. Other kinds of FP8 are in
    `bytes_per_parameter`, copies of its joined operations in `activations`.
    """
    cast = sum(activations.casts_weights(f, layer) for layer in stage.layers) / (len(stage.layers) or 1)
    joined = sum(not is_sparse(f.model, layer) for layer in stage.layers) * activations.joined_weights(f)
    return cast * 2 * (held.total - held.outside - joined)


def _share_in_current_scaling(f: Facts, stage: Stage) -> float:
    """Share of the stage's layers that calculate in FP8 with current scaling."""
    if "fp8_current" not in (f.training.precision or ""):
        return 0.0
    return sum(activations.in_low_precision(f, layer) for layer in stage.layers) / (len(stage.layers) or 1)


def _unused_gradients(f: Facts, stage: Stage) -> float:
    """Bytes of dummy gradients for autograd, if products accumulate into the gradient themselves.

    Transformer Engine keeps an unused tensor for every shape of weights (module/base.py, get_dummy_wgrad), shared by
    all layers and experts; this includes the output layer's (megatron-core, tensor_parallel/layers.py).
    """
    if not f.kernels.gradient_fusion or f.is_frozen or f.layout.fsdp != "none":
        return 0.0
    shapes = _shapes(f, stage)
    if stage.loss:
        shapes |= {(one.columns, one.depth) for one in work.loss(f).products}
    return sum(2 * columns * depth for columns, depth in shapes)


def _shapes(f: Facts, stage: Stage) -> set[tuple[float, float]]:
    """Of the layers' weights, all but the router's."""
    kinds = {is_sparse(f.model, layer) for layer in stage.layers}
    parts = [work.attention(f), *(work.experts(f) if sparse else work.feed_forward(f) for sparse in kinds)]
    return {(one.columns, one.depth) for part in parts for one in part.products if one.low}


def _moments_of_fsdp(f: Facts, stage: Stage, held: Parameters, shards: Breakdown, inside: float) -> list[Breakdown]:
    """Breakdowns at the loss, at the start of the backward pass, at each of its layers, and in the optimizer's step."""
    sharding, (weight, gradient, _) = f.layout.fsdp_sharding, bytes_per_parameter(f)
    cut = _cut_by_fsdp(f, held)

    def at(moment: _Moment, work: float) -> Breakdown:
        return replace(
            shards,
            weights=shards.weights + weight * moment.weights,
            gradients=shards.gradients + gradient * moment.gradients,
            activations=shards.activations * moment.kept,
            logits=work,
        )

    loss, backward, layers = _fsdp_moments(sharding, cut, len(stage.layers) or 1)
    gradient_of_logits = activations.logits_gradient_bytes(f) if stage.loss else 0.0
    return [
        at(loss, shards.logits),
        at(backward, gradient_of_logits),
        *(at(moment, inside) for moment in layers),
        _optimizer_step(f, stage, held, at(loss, 0.0)),
    ]


def _optimizer_step(f: Facts, stage: Stage, trained: Parameters, before: Breakdown) -> Breakdown:
    """The breakdown in the optimizer's step.

    16-bit gradients are copied to fp32 (distrib_optimizer.py, _copy_model_grads_to_main_grads). Weights stored in FP8
    are all cast to 16 bits before the first is written (Transformer Engine, quantize_master_weights).
    """
    _, gradient, _ = bytes_per_parameter(f)
    copied = 4 * _owned(f, trained).total if gradient < 4 and not _reads_16_bits(f) else 0.0
    cast = 0.0
    if f.training.fp8_weights and not f.is_frozen and f.layout.distributed_optimizer and f.layout.fsdp == "none":
        copies, expert_copies = _copies(f)
        in_layers = (trained.dense - trained.outside) / copies + trained.expert / expert_copies
        cast = 2 * _share_in_current_scaling(f, stage) * in_layers
    weights, gradients = before.weights + cast, before.gradients + copied
    workspace = before.workspace + _muon_workspace(f, stage, trained)
    return replace(before, weights=weights, gradients=gradients, activations=0.0, logits=0.0, workspace=workspace)


def _muon_workspace(f: Facts, stage: Stage, trained: Parameters) -> float:
    """Bytes that Muon needs for its largest matrix or, layer-wise, for gathering all weights afterwards
    (layer_wise_optimizer.py, allgather_params)."""
    if not f.training.is_muon or f.is_frozen:
        return 0.0
    largest = max((columns * depth for columns, depth in _shapes(f, stage)), default=0.0)
    gathered = 2 * max(trained.dense, trained.expert) if f.training.is_layer_wise else 0.0
    return max(ORTHOGONALIZED * largest, gathered)


def _graph_moments(f: Facts, stage: Stage, plain: Breakdown, optimizer_step: Breakdown) -> list[Breakdown]:
    """The breakdowns while graphs of parts of layers are recorded, and afterwards.

    They are recorded after an optimizer's step, whose copies of gradients are still there. A pool keeps their memory.
    """
    found = graph_memory.of_stage(f, stage)
    pool, tensors = found.kept - found.inputs + found.working, found.inputs + found.masks
    ungraphed = plain.activations - found.kept_anyway
    return [
        replace(optimizer_step, weights=plain.weights, activations=found.kept + found.masks, logits=found.working),
        replace(plain, activations=ungraphed + tensors, graphs=pool),
        replace(optimizer_step, activations=tensors, graphs=pool),
    ]


def _highest(moments: Sequence[Breakdown]) -> Breakdown:
    """The breakdown with the most tensors. What another moment needs more is in `graphs`."""
    found = max(moments, key=lambda one: one.tensors)
    more = max(one.total for one in moments) - found.total
    return replace(found, graphs=found.graphs + more) if more > 0 else found


@dataclass(frozen=True)
class _Moment:
    """A moment in a step: parameters with unsharded weights and gradients, in addition to the shards, and the share of
    activations that is still kept."""

    weights: float = 0.0
    gradients: float = 0.0
    kept: float = 1.0


def _fsdp_moments(sharding: str, held: Parameters, layers: int) -> tuple[_Moment, _Moment, list[_Moment]]:
    """The moments at the loss, at the output layer's gradient, and at each layer of the backward pass, from last to
    first.

    Parameters outside of layers stay unsharded from the first step on.
    """
    shards = _Moment()
    if sharding == "optim_grads":
        whole = _Moment(gradients=held.total)  # a single bucket, because Bridge gets no bucket size
        return shards, whole, [whole]
    if sharding != "optim_grads_params":
        return shards, shards, [shards]
    loss, backward = _Moment(held.outside), _Moment(held.outside, held.outside)
    if not held.layer:
        return loss, backward, [shards]
    ahead = 1 + math.ceil(GATHERED_AHEAD / held.layer)
    queued = 2 + math.floor(QUEUED / held.layer)
    each = [
        _Moment(
            held.outside + min(layers - done, ahead) * held.layer,
            held.outside + min(done + 1, queued) * held.layer,
            (layers - done) / layers,
        )
        for done in range(layers)
    ]
    return loss, backward, each


def _cut_by_fsdp(f: Facts, held: Parameters) -> Parameters:
    """The parameters that FSDP gathers. A group of one rank has nothing to gather."""
    copies, expert_copies = _copies(f)
    if copies == 1:
        return Parameters(0.0, 0.0)
    return held if expert_copies > 1 else held.without_experts()


def _copies(f: Facts) -> tuple[int, int]:
    """Numbers of ranks that states are divided among: for all parameters but experts', and for experts'."""
    instances = f.layout.optimizer_instances
    return (f.layout.dp or 1) * f.layout.cp // instances or 1, (f.layout.expert_dp or 1) // instances or 1


def _states(f: Facts, held: Parameters) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer."""
    weights, gradients, optimizer = _sharded(f, held)
    if f.layout.fsdp == "torch":
        weight, gradient, _ = bytes_per_parameter(f)
        weights += 2 * held.layer * weight  # two layers are unsharded at a time
        gradients += held.layer * gradient
    return weights, gradients, optimizer


def _frozen_states(f: Facts, held: Parameters, trained: Parameters) -> tuple[float, float, float]:
    """Bytes of a frozen model's weights, and of all adapters' states."""
    weights, gradients, optimizer = _sharded(f, trained)
    return weights + bytes_per_parameter(f)[0] * held.total, gradients, optimizer


def _sharded(f: Facts, trained: Parameters) -> tuple[float, float, float]:
    weight, gradient, _ = bytes_per_parameter(f)
    owned, sharding = _owned(f, trained), f.layout.sharding
    return (
        weight * (owned if sharding == "optim_grads_params" else trained).total,
        gradient * (owned if sharding in ("optim_grads", "optim_grads_params") else trained).total,
        optimizer_bytes(f, owned),
    )


def _owned(f: Facts, trained: Parameters) -> Parameters:
    """The parameters that a rank updates.

    A layer-wise optimizer gives each tensor to one rank, about evenly by size: here the rank with the embedding and the
    output layer, which is the most that a rank may have, but for a matrix or two.
    """
    if not f.divides_optimizer:
        return trained
    copies, expert_copies = _copies(f)
    tables = trained.tables if f.training.is_layer_wise else trained.tables / copies
    dense = (trained.dense - trained.tables) / copies + tables
    return Parameters(dense, trained.expert / expert_copies, tables=tables)


def optimizer_bytes(f: Facts, updated: Parameters) -> float:
    """Bytes of an optimizer's states. Muon has one moment of its matrices."""
    return bytes_per_parameter(f)[2] * updated.total - (MOMENT * updated.matrices if f.training.is_muon else 0.0)


def bytes_per_parameter(f: Facts) -> tuple[float, float, float]:
    """Bytes for weight, gradient and optimizer: fp32 copies of 16-bit weights, and Adam's two moments (SGD: one)."""
    moments = 4 if f.training.optimizer == "sgd" else 8
    copy = 2 if _reads_16_bits(f) and f.training.remainders else 4
    # Megatron-FSDP keeps gradients in the weights' precision.
    reduced = 2 if f.layout.fsdp == "megatron" or not f.kernels.fp32_gradients else 4
    match f.training.precision:
        case "fp32":  # Megatron-FSDP also copies fp32 weights
            return 4, 4, moments + (4 if f.layout.fsdp == "megatron" else 0)
        case "fp16_mixed":  # Bridge reduces gradients in fp16 then
            return 2, 2, 4 + moments
        case str() as precision if "subchannel" in precision or "mxfp8" in precision:
            return 2 + 2, reduced, copy + moments  # plus quantized weights, by rows and by columns
        case _:
            return 2, reduced, copy + moments


def _reads_16_bits(f: Facts) -> bool:
    """Whether Transformer Engine's Adam reads gradients in 16 bits, and keeps the fp32 weights: by default only the
    bits of them that the bf16 weights lack.

    With other scalings than delayed megatron-core keeps them itself (optimizer_config.py,
    use_precision_aware_optimizer_no_fp8_or_ds_fp8), and Bridge names `tensorwise` in bf16 without FP8, too.
    """
    precision = f.training.precision or ""
    scaling = f.training.fp8_recipe or ("delayed" if "fp8_delayed" in precision else "tensorwise")
    is_delayed = precision.startswith("bf16") and scaling == "delayed"
    return f.training.precision_aware and f.layout.fsdp == "none" and is_delayed
