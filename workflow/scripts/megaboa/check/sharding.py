"""Combinations with FSDP and the distributed optimizer, and what Muon needs, which reads whole gradients."""

from __future__ import annotations

from megaboa.check.facts import Facts
from megaboa.check.rule import Broken, warning
from megaboa.formats import counted

WEIGHTS_IN_FP8 = ("fp8_delayed", "fp8_current", "mxfp8")  # scalings with which Bridge keeps them so


def fsdp_has_no_pipeline(f: Facts) -> Broken | None:
    """FSDP with pipeline or context parallelism is refused by CloudAI; Bridge 0.6.2 accepts it, but no such training is
    known.
    """
    layout = f.layout
    sizes = {"parallel.pp": layout.pp, "parallel.cp": layout.cp, "parallel.vpp": layout.chunks}
    key = next((key for key, size in sizes.items() if size > 1), None)
    if layout.fsdp == "none" or key is None:
        return None
    return warning(key, f"{sizes[key]} with parallel.fsdp: {layout.fsdp}", (1,))


def fsdp_has_no_layer_graphs(f: Facts) -> Broken | None:
    """FSDP gathers weights between layers: with experts' overlap mcore_fsdp_adapter.py refuses graphs of single
    layers. CloudAI refuses all graphs under FSDP; Bridge 0.6.2 accepts the others."""
    if f.layout.fsdp == "none" or f.kernels.graphs == "none":
        return None
    text = f"{f.kernels.graphs} with parallel.fsdp: {f.layout.fsdp}"
    if f.kernels.expert_overlap and f.kernels.graphs != "full_iteration" and f.layout.fsdp == "megatron":
        return Broken("model.cuda_graph_impl", f"{text} and overlap_moe_expert_parallel_comm", ("none",))
    return warning("model.cuda_graph_impl", text, ("none",))


def optimizer_instances_need_fsdp(f: Facts) -> Broken | None:
    """Several optimizer instances are intended for hybrid FSDP; CloudAI refuses them without it, Bridge 0.6.2 accepts
    them."""
    if f.layout.optimizer_instances == 1 or f.layout.fsdp != "none":
        return None
    text = f"{f.layout.optimizer_instances} without parallel.fsdp"
    return warning("ddp.num_distributed_optimizer_instances", text, (1,))


def fsdp_checkpoints_are_dtensors(f: Facts) -> Broken | None:
    """Megatron-FSDP saves only fsdp_dtensor, and nothing else saves that format; ConfigContainer.validate asserts
    both, when a run saves or loads."""
    written, is_fsdp = f.training.checkpoint_format, f.layout.fsdp == "megatron"
    if written is None or f.training.save_interval == 0 or is_fsdp == (written == "fsdp_dtensor"):
        return None
    return Broken(
        "checkpoint.ckpt_format",
        f"{written} with parallel.fsdp: {f.layout.fsdp}",
        ("fsdp_dtensor" if is_fsdp else "torch_dist",),
    )


def fsdp_without_shards_is_not_saved(f: Facts) -> Broken | None:
    """Saving splits the weights of gated layers, and core 0.19.2 then fails on those that FSDP didn't shard
    (fsdp_dtensor_checkpoint.py, split_swiglu_linear_fc1; seen on two H200s)."""
    unsharded = f.layout.fsdp == "megatron" and f.layout.fsdp_sharding == "no_shard"
    if not unsharded or not f.model.gated or f.training.save_interval == 0:
        return None
    text = "no_shard of a model with gated layers can't be saved; or set checkpoint.save_interval: 0"
    return Broken("parallel.fsdp_sharding", text, ("optim", "optim_grads", "optim_grads_params"))


def twins_have_whole_weights(f: Facts) -> Broken | None:
    """A twin begins with one weight moved by a unit in the last place, and FSDP holds the weights in pieces."""
    if not f.training.nudge or f.layout.fsdp == "none":
        return None
    text = "moves whole weights, and FSDP holds them in pieces: remove twins, or parallel.fsdp"
    return Broken("training.nudge", text, (0,))


def fsdp_has_several_connections(f: Facts) -> Broken | None:
    """FSDP gathers weights during computation: CUDA_DEVICE_MAX_CONNECTIONS must not be 1, as
    ConfigContainer.validate asserts."""
    if f.layout.fsdp == "none" or f.cluster.max_connections != "1":
        return None
    return Broken("launch.environment", "CUDA_DEVICE_MAX_CONNECTIONS is 1 with FSDP: remove it", (32,))


def fsdp_shards_the_optimizer(f: Facts) -> Broken | None:
    """Megatron-FSDP always shards the optimizer: Bridge turns the distributed optimizer back on, with only a line in
    the log.
    """
    if f.layout.fsdp != "megatron" or f.layout.distributed_optimizer:
        return None
    return warning("parallel.distributed_optimizer", "false is turned to true under parallel.fsdp: megatron", (True,))


def sgd_has_nothing_to_shard(f: Facts) -> Broken | None:
    """SGD keeps no state, and Megatron's distributed optimizer fails on that during startup."""
    if f.training.optimizer != "sgd" or not f.layout.distributed_optimizer:
        return None
    text = "sgd has no state to distribute: set parallel.distributed_optimizer: false, or take adam"
    return Broken("optimizer.name", text, ("adam",))


def muon_reads_whole_gradients(f: Facts) -> Broken | None:
    """Muon needs every gradient whole: megatron/training/arguments.py turns the distributed optimizer off, Bridge 0.6.2
    does not, and then a rank has reduced only its own shard of the gradients. It refuses FSDP, which Bridge accepts."""
    training, layout = f.training, f.layout
    if training.is_emerging and layout.fsdp != "none":
        return Broken("parallel.fsdp", f"{layout.fsdp}: {training.optimizer} reads whole gradients", ("none",))
    if not training.is_emerging or training.has_shards or not layout.distributed_optimizer:
        return None
    text = f"{training.optimizer} reads whole gradients: set parallel.distributed_optimizer: false, or take adam"
    return Broken("optimizer.name", text, ("adam",))


def muon_orthogonalizes_whole_matrices(f: Facts) -> Broken | None:
    """With muon_tp_mode: blockwise, Bridge's default, each tensor rank orthogonalizes its own block of a matrix, and
    scales it by the block's size: losses depend on tp. Queries, keys and values are orthogonalized one by one only
    where every tensor rank has whole groups of them; elsewhere they are one matrix, without a message."""
    tp, experts, mode = f.layout.tp, f.layout.expert_tp, f.training.muon_tp_mode
    if not f.training.is_muon or max(tp, experts) == 1:
        return None
    if mode == "blockwise":
        text = f"blockwise with {max(tp, experts)} tensor ranks: each orthogonalizes its own block of a matrix, and"
        return warning("optimizer.muon_tp_mode", f"{text} losses depend on tp", ("duplicated",))
    groups = f.model.kv_groups or f.model.heads
    if groups is None or groups >= tp or f.model.latent or not f.training.muon_split_qkv:
        return None
    text = f"true has no effect with {tp} tensor ranks and {counted(groups, 'group')} of keys: losses depend on tp"
    return warning("optimizer.muon_split_qkv", text, (False,))


def muon_trains_in_the_precision(f: Facts) -> Broken | None:
    """megatron-core refuses Muon in fp16, and layer by layer (dist_muon) it fails in fp32: without this rule, ranks
    find that. Weights in FP8 without shards are refused by megatron/training/arguments.py, not by Bridge 0.6.2, whose
    own recipes have them: a warning."""
    training, precision = f.training, f.training.precision or ""
    if not training.is_emerging:
        return None
    text = f"{precision} with the optimizer {training.optimizer}"
    if precision.startswith("fp16") or training.fp16 or (precision == "fp32" and training.is_layer_wise):
        return Broken("training.precision", text, ("bf16_mixed",))
    if training.fp8_weights and any(name in precision for name in WEIGHTS_IN_FP8):
        return warning("mixed_precision.fp8_param_gather", f"true, Bridge's default for {text}: never tried", (False,))
    return None


def muon_stays_on_the_gpu(f: Facts) -> Broken | None:
    """megatron-core offloads the optimizer of embeddings, norms and biases alone, next to Muon, and then Bridge 0.6.2
    fails when it has loaded a checkpoint."""
    if not f.training.is_emerging or not f.training.offloaded:
        return None
    text = f"true with the optimizer {f.training.optimizer}, whose own states stay on the GPU"
    return Broken("optimizer.optimizer_cpu_offload", text, (False,))


def overlapped_gather_needs_overlapped_reduction(f: Facts) -> Broken | None:
    """Weights are gathered bucket by bucket, and there is only one bucket where gradients aren't reduced early:
    megatron/training/arguments.py refuses the pair; Bridge 0.6.2 accepts it, and gains nothing."""
    if not f.kernels.gather_overlap or f.kernels.grad_overlap is not False:
        return None
    return warning("parallel.overlap_param_gather", "true without parallel.overlap_grad_reduce", (False,))


def overlapped_gather_needs_shards(f: Facts) -> Broken | None:
    """Only what the distributed optimizer, Megatron-FSDP or a layer-wise optimizer has divided is gathered:
    megatron/training/arguments.py refuses the rest."""
    if not f.kernels.gather_overlap or f.layout.distributed_optimizer or f.layout.fsdp == "megatron":
        return None
    if f.training.is_layer_wise:
        return None
    return Broken("parallel.overlap_param_gather", "true without parallel.distributed_optimizer", (False,))


def torch_fsdp_has_no_overlap_of_megatrons(f: Facts) -> Broken | None:
    """PyTorch's FSDP2 overlaps by itself; Bridge's loop looks for the hooks of Megatron's own data parallelism."""
    if f.layout.fsdp != "torch":
        return None
    wanted = {"grad_reduce": f.kernels.grad_overlap, "param_gather": f.kernels.gather_overlap}
    name = next((name for name, value in wanted.items() if value), None)
    return Broken(f"parallel.overlap_{name}", "true with parallel.fsdp: torch", (False,)) if name else None


RULES = (
    fsdp_has_no_pipeline,
    fsdp_has_no_layer_graphs,
    optimizer_instances_need_fsdp,
    fsdp_checkpoints_are_dtensors,
    fsdp_without_shards_is_not_saved,
    twins_have_whole_weights,
    fsdp_has_several_connections,
    fsdp_shards_the_optimizer,
    sgd_has_nothing_to_shard,
    muon_reads_whole_gradients,
    muon_orthogonalizes_whole_matrices,
    muon_trains_in_the_precision,
    muon_stays_on_the_gpu,
    overlapped_gather_needs_overlapped_reduction,
    overlapped_gather_needs_shards,
    torch_fsdp_has_no_overlap_of_megatrons,
)
