"""CUDA graphs, recomputation and offloading: which combinations are allowed."""

from __future__ import annotations

from megaboa.check.facts import Facts
from megaboa.check.rule import Broken, multiples, warning

IMPLEMENTATIONS = ("none", "local", "transformer_engine", "full_iteration")
ATTENTION_BLOCK = 128  # of cuDNN's kernels
RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out")
# Graphed parts, and what lies inside each of them: recorded, it would be calculated again inside the graph.
INSIDE = {
    "attn": {"core_attn", "mla_up_proj"},
    "mlp": {"mlp"},
    "moe": {"moe_act", "moe", "shared_experts"},
    "moe_router": {"moe", "shared_experts"},
}


def graph_implementation_is_known(f: Facts) -> Broken | None:
    """CUDA graphs are none, local, transformer_engine or full_iteration; transformer_config.py asserts it."""
    if f.kernels.graphs in IMPLEMENTATIONS:
        return None
    return Broken("model.cuda_graph_impl", f"there is no {f.kernels.graphs}", IMPLEMENTATIONS)


def graph_scope_fits_the_implementation(f: Facts) -> Broken | None:
    """local graphs record the full iteration alone and transformer_engine graphs everything but it, by Bridge's
    utils/cuda_graph.py; full_iteration takes no modules."""
    graphs, modules, key = f.kernels.graphs, f.kernels.graph_modules, "model.cuda_graph_modules"
    if graphs == "local" and modules != ("full_iteration",):
        return Broken("model.cuda_graph_impl", f"local with {list(modules)}", ("full_iteration", "transformer_engine"))
    if graphs == "transformer_engine" and "full_iteration" in modules:
        return Broken(key, "full_iteration with model.cuda_graph_impl: transformer_engine", ("[]",))
    if graphs == "full_iteration" and modules:
        return Broken(key, f"{list(modules)} with model.cuda_graph_impl: full_iteration", ("[]",))
    return None


def moe_is_graphed_once(f: Facts) -> Broken | None:
    """The graph of moe already includes the router: transformer_config.py refuses both."""
    if f.kernels.graphs == "none" or not {"moe", "moe_router"} <= set(f.kernels.graph_modules):
        return None
    return Broken("model.cuda_graph_modules", "has both moe and moe_router: keep one")


def moe_preprocessing_follows_the_router(f: Facts) -> Broken | None:
    """moe_preprocess can be graphed only together with moe_router; transformer_config.py asserts it."""
    modules = f.kernels.graph_modules
    if f.kernels.graphs == "none" or "moe_preprocess" not in modules or "moe_router" in modules:
        return None
    return Broken("model.cuda_graph_modules", "has moe_preprocess without moe_router", ([*modules, "moe_router"],))


def graphed_parts_are_there(f: Facts) -> Broken | None:
    """moe and moe_router are graphed in models with experts, mlp in layers without; transformer_config.py asserts
    it."""
    model, modules = f.model, set(f.kernels.graph_modules)
    if f.kernels.graphs == "none" or model.layers is None:
        return None
    all_sparse = model.is_sparse and (model.moe_layers is None or all(model.moe_layers))
    absent = {"moe", "moe_router"} & modules if not model.is_sparse else {"mlp"} & modules if all_sparse else set()
    if not absent:
        return None
    return Broken(
        "model.cuda_graph_modules", f"has {sorted(absent)}, which the model doesn't have", (sorted(modules - absent),)
    )


def graphed_experts_have_fixed_sizes(f: Facts) -> Broken | None:
    """A graph of moe needs experts that always get the same number of tokens: moe_expert_capacity_factor and
    moe_pad_expert_input_to_capacity; transformer_config.py asserts it."""
    fixed = f.kernels.expert_capacity is not None and f.kernels.pad_to_capacity
    if f.kernels.graphs == "none" or "moe" not in f.kernels.graph_modules or not f.model.is_sparse or fixed:
        return None
    return Broken("model.cuda_graph_modules", "has moe, and experts drop no tokens", ("moe_router",))


def graphed_preprocessing_has_no_shared_expert_overlap(f: Facts) -> Broken | None:
    """A shared expert that overlaps the alltoall dispatcher begins in moe_preprocess. A graph that records only this
    beginning leaves the expert marked as begun, so that the next recording fails in shared_experts.py:
    `pre_forward_comm must be called from IDLE state` (megatron-core 0.19.2 on an H200)."""
    kernels = f.kernels
    graphed = kernels.graphs == "transformer_engine" and "moe_preprocess" in kernels.graph_modules
    overlapped = kernels.shared_expert_overlap and f.model.shared_ffn and kernels.dispatcher in ("alltoall", None)
    if not graphed or not overlapped:
        return None
    return Broken("model.moe_shared_expert_overlap", "true with a graph of moe_preprocess", (False,))


def recomputation_is_outside_graphs(f: Facts) -> Broken | None:
    """A graphed part can't be partly recomputed: megatron-core refuses moe with moe_router, and dropout
    inside; CloudAI refuses all of attn with core_attn or mla_up_proj, mlp with mlp, moe with moe_act, moe or
    shared_experts, moe_router with moe or shared_experts, and layernorm across them. In graphs of whole layers, or of
    an iteration, only dropout is refused."""
    kernels = f.kernels
    if kernels.graphs == "none" or kernels.recompute != "selective":
        return None
    named = set() if kernels.is_graphed_whole else set(kernels.graph_modules)
    recomputed, graphed = set(kernels.recompute_modules), named or {"attn", "mlp", "moe"}
    clashes = {
        part: sorted(INSIDE[part] & recomputed) for part in INSIDE if part in graphed and INSIDE[part] & recomputed
    }
    if "layernorm" in recomputed and {"attn", "mlp"} <= named and named & {"moe", "moe_router"}:
        clashes["attn, mlp and moe"] = ["layernorm"]
    if not clashes:
        return None
    said = "; ".join(f"{', '.join(inner)} with the graph of {part}" for part, inner in clashes.items())
    left = sorted(recomputed - {name for inner in clashes.values() for name in inner})
    text = f"recomputes {said}"
    if _is_refused(f, clashes):
        return Broken("model.recompute_modules", text, (left,))
    return warning("model.recompute_modules", text, (left,)) if named else None


def _is_refused(f: Facts, clashes: dict[str, list[str]]) -> bool:
    router = f.kernels.graphs == "transformer_engine" and "moe" in clashes.get("moe_router", [])
    attention = f.kernels.attention_dropout > 0 and "core_attn" in clashes.get("attn", [])
    hidden = f.model.dropout > 0 and ("mlp" in clashes.get("mlp", []) or "moe" in clashes.get("moe", []))
    return router or attention or hidden


def full_recomputation_needs_a_full_graph(f: Facts) -> Broken | None:
    """Whole layers are recomputed under a graph of the full iteration only; transformer_config.py asserts it."""
    if f.kernels.recompute != "full" or f.kernels.graphs in ("none", "full_iteration"):
        return None
    text = f"{f.kernels.graphs} with full recomputation"
    return Broken("model.cuda_graph_impl", text, ("none", "full_iteration"))


def full_graph_has_no_nan_check(f: Facts) -> Broken | None:
    """A graph of the full iteration can't inspect values: ConfigContainer.validate asserts that the check for NaN
    is off."""
    if not f.kernels.is_graphed_whole or not f.kernels.nan_check:
        return None
    return Broken("rerun_state_machine.check_for_nan_in_loss", "true with a graph of the full iteration", (False,))


def full_graph_waits_for_no_message(f: Facts) -> Broken | None:
    """Stages of a pipeline without vpp wait for the GPU after every message (p2p_communication.py), which is not
    allowed while a graph is recorded.
    """
    if not f.kernels.is_graphed_whole or f.layout.pp == 1 or f.layout.vpp or not f.kernels.waits_for_messages:
        return None
    return Broken("model.batch_p2p_sync", f"true with a graph of the full iteration and pp: {f.layout.pp}", (False,))


def full_graph_has_whole_blocks_of_attention(f: Facts) -> Broken | None:
    """cuDNN up to 9.15.0 fails in attention's backward pass if a graph is replayed and the sequence is not a multiple
    of 128 (with context parallelism: half a rank's part): an illegal memory access, or wrong gradients. Transformer
    Engine checks for it, but can't see that Megatron records a full iteration.
    """
    heads = set(f.layout.exchanges) == {"a2a"}  # all-to-all exchanges heads instead
    cut = 1 if f.layout.cp == 1 or heads else 2 * f.layout.cp
    length, unit = f.training.seq_length, ATTENTION_BLOCK * cut
    if not f.kernels.is_graphed_whole or not _may_be_cudnn(f) or length is None or length % unit == 0:
        return None
    text = f"{length} with a graph of the full iteration needs cuDNN 9.15.1 or later, or other attention"
    return warning("training.seq_length", f"{text} (model.attention_backend: flash, unfused)", multiples(length, unit))


def _may_be_cudnn(f: Facts) -> bool:
    """It calculates in 16 bits and fewer. Of a precision by name bf16 and fp16 know nothing before it is validated."""
    training = f.training
    unnamed = training.precision is None and (training.bf16, training.fp16) == (False, False)
    full_precision = training.precision == "fp32" or unnamed
    return f.cluster.device == "cuda" and not full_precision and f.kernels.attention in ("auto", "fused")


def full_graph_has_no_straggler_detector(f: Facts) -> Broken | None:
    """Megatron's straggler detector reads the start and end times of forward passes from CUDA events, which a graph
    can't provide.
    """
    if not f.kernels.is_graphed_whole or not f.kernels.stragglers:
        return None
    return Broken("straggler.log_straggler", "true with a graph of the full iteration", (False,))


def graphs_leave_expert_overlap_alone(f: Facts) -> Broken | None:
    """Experts whose communication is hidden run in pieces: transformer_config.py refuses transformer_engine graphs
    of moe and mlp; CloudAI refuses every graph."""
    if not f.kernels.expert_overlap or f.kernels.graphs == "none":
        return None
    text = f"{f.kernels.graphs} {list(f.kernels.graph_modules)} with overlap_moe_expert_parallel_comm"
    if f.kernels.graphs == "transformer_engine" and {"moe", "mlp"} & set(f.kernels.graph_modules):
        return Broken("model.cuda_graph_modules", text, ("attn",))
    return warning("model.cuda_graph_impl", text, ("none",))


def recomputation_is_complete(f: Facts) -> Broken | None:
    """Full recomputation says how (uniform or block) and how many layers, selective says neither;
    transformer_config.py refuses anything else."""
    kernels = f.kernels
    if kernels.recompute is None:
        return None
    if kernels.recompute not in ("full", "selective"):
        return Broken("model.recompute_granularity", f"there is no {kernels.recompute}", ("full", "selective"))
    if kernels.recompute == "selective":
        if kernels.recompute_layers is None:
            return None
        return Broken(
            "model.recompute_num_layers", f"{kernels.recompute_layers} with selective recomputation", ("null",)
        )
    if kernels.recompute_method not in ("uniform", "block"):
        return Broken(
            "model.recompute_method", f"{kernels.recompute_method} with full recomputation", ("uniform", "block")
        )
    if kernels.recompute_layers is None:
        return Broken("model.recompute_num_layers", "is null with full recomputation", (1,))
    return None


def recomputed_predictions_are_one_by_one(f: Facts) -> Broken | None:
    """Layers for multi-token prediction are recomputed one at a time: multi_token_prediction.py asserts it in the first
    step, and leaves them alone where blocks of layers are recomputed."""
    kernels = f.kernels
    if not f.model.mtp_layers or (kernels.recompute, kernels.recompute_method) != ("full", "uniform"):
        return None
    if kernels.recompute_layers in (None, 1):
        return None
    return Broken(
        "model.recompute_num_layers", f"{kernels.recompute_layers} with layers for multi-token prediction", (1,)
    )


def recomputed_parts_are_there(f: Facts) -> Broken | None:
    """Selective recomputation names parts that the model has: moe_act needs grouped GEMMs, mla_up_proj latent
    attention, shared_experts a shared expert that overlaps nothing, and delayed FP8 scaling leaves moe_act and
    layernorm alone; transformer_config.py refuses the others."""
    kernels, key = f.kernels, "model.recompute_modules"
    if kernels.recompute != "selective":
        return None
    unknown = sorted(set(kernels.recompute_modules) - set(RECOMPUTED))
    if unknown:
        return Broken(key, f"there is no {', '.join(unknown)}", RECOMPUTED)
    if "moe_act" in kernels.recompute_modules and not kernels.grouped_gemm:
        return Broken(key, "moe_act without model.moe_grouped_gemm")
    if "mla_up_proj" in kernels.recompute_modules and not f.model.latent:
        return Broken(key, "mla_up_proj without latent attention")
    if "shared_experts" in kernels.recompute_modules and f.model.shared_ffn and kernels.shared_expert_overlap:
        return Broken(key, "shared_experts with model.moe_shared_expert_overlap: true")
    if "fp8_delayed" in (f.training.precision or "") and {"moe_act", "layernorm"} & set(kernels.recompute_modules):
        return Broken(key, "moe_act or layernorm with delayed FP8 scaling")
    if "layernorm" in kernels.recompute_modules and not f.model.latent and not f.model.is_sparse:
        return warning(key, "layernorm has no effect: Transformer Engine's norms are part of the products after them")
    return None


def recomputed_feed_forward_has_no_bias(f: Facts) -> Broken | None:
    """A feed-forward part with biases can't be recomputed: megatron-core 0.19.2 returns its last bias from the
    checkpointed function, so autograd takes that parameter for a result of it and recomputes forever."""
    kernels, model = f.kernels, f.model
    if kernels.recompute != "selective" or "mlp" not in kernels.recompute_modules or not model.bias:
        return None
    if model.is_sparse and all(model.moe_layers or (True,)):  # no layer has it
        return None
    left = [part for part in kernels.recompute_modules if part != "mlp"]
    return Broken("model.recompute_modules", "mlp, with model.add_bias_linear: true", (left,) if left else ())


def offloading_has_no_pipeline(f: Facts) -> Broken | None:
    """Offloading to the CPU works without pipeline and without recomputation, and for fewer layers than there are;
    transformer_config.py refuses anything else."""
    if not f.kernels.cpu_offloading:
        return None
    if f.layout.pp > 1:
        return Broken("model.cpu_offloading", f"true with parallel.pp: {f.layout.pp}", (False,))
    if f.kernels.recompute is not None:
        return Broken("model.cpu_offloading", f"true with {f.kernels.recompute} recomputation", (False,))
    if f.model.layers is not None and not 0 <= f.kernels.offloaded_layers < f.model.layers:
        text = f"{f.kernels.offloaded_layers} of {f.model.layers} layers"
        return Broken("model.cpu_offloading_num_layers", text, (f.model.layers - 1,))
    return None


def offloading_has_no_graphs(f: Facts) -> Broken | None:
    """Offloaded tensors move, but a graph's memory doesn't: transformer_config.py refuses graphs of layers with
    offloading, CloudAI also that of the full iteration."""
    if not f.kernels.cpu_offloading or f.kernels.graphs == "none":
        return None
    text = f"{f.kernels.graphs} with model.cpu_offloading"
    if f.kernels.graphs == "full_iteration":
        return warning("model.cuda_graph_impl", text, ("none",))
    return Broken("model.cuda_graph_impl", text, ("none",))


RULES = (
    graph_implementation_is_known,
    graph_scope_fits_the_implementation,
    moe_is_graphed_once,
    moe_preprocessing_follows_the_router,
    graphed_parts_are_there,
    graphed_experts_have_fixed_sizes,
    graphed_preprocessing_has_no_shared_expert_overlap,
    recomputation_is_outside_graphs,
    full_recomputation_needs_a_full_graph,
    full_graph_has_no_nan_check,
    full_graph_waits_for_no_message,
    full_graph_has_whole_blocks_of_attention,
    full_graph_has_no_straggler_detector,
    graphs_leave_expert_overlap_alone,
    recomputation_is_complete,
    recomputed_predictions_are_one_by_one,
    recomputed_parts_are_there,
    recomputed_feed_forward_has_no_bias,
    offloading_has_no_pipeline,
    offloading_has_no_graphs,
)
