"""Mixtures of experts: how experts are divided, and how tokens reach them."""

from __future__ import annotations

from megaboa import peaks
from megaboa.check.facts import Facts
from megaboa.check.rule import Broken, divisors, warning
from megaboa.peaks import Generation

DEEPEP_NODE = 8  # GPUs that DeepEP lets talk over NVLink (NUM_MAX_NVL_PEERS)
DEEPEP_NODES = 20  # and nodes over RDMA (NUM_MAX_RDMA_PEERS)
NOT_FOR_DEEPEP = ("gb200", "gb300")


def expert_parallelism_needs_experts(f: Facts) -> Broken | None:
    """Expert parallelism divides experts: transformer_config.py refuses ep above 1 for a dense model."""
    if f.layout.ep == 1 or f.model.layers is None or f.model.experts:
        return None
    return Broken("parallel.ep", f"{f.layout.ep} for a model without experts", (1,))


def experts_divide(f: Facts) -> Broken | None:
    """Every expert parallel rank has the same number of experts; moe_layer.py asserts it when the model is built."""
    experts, ep = f.model.experts, f.layout.ep
    if not experts or experts % ep == 0:
        return None
    return Broken("parallel.ep", f"{ep} doesn't divide {experts} experts", divisors(experts, ep))


def expert_width_divides(f: Facts) -> Broken | None:
    """An expert's width is cut into etp pieces; core/utils.py asserts that nothing is left over."""
    width, etp = f.model.moe_ffn, f.layout.expert_tp
    if not f.model.is_sparse or width is None or width % etp == 0:
        return None
    key = "parallel.etp" if f.layout.etp else "parallel.tp"
    return Broken(key, f"{etp} doesn't divide the experts' width {width}", divisors(width, etp))


def expert_tensor_parallelism_needs_experts(f: Facts) -> Broken | None:
    """Expert tensor parallelism splits experts: Megatron silently ignores it for a dense model."""
    if f.layout.etp is None or f.model.layers is None or f.model.experts or f.layout.etp in (1, f.layout.tp):
        return None
    return warning("parallel.etp", f"{f.layout.etp} for a model without experts", ("null",))


def biased_experts_are_not_cut(f: Facts) -> Broken | None:
    """Experts with biases need etp 1; transformer_config.py asserts it."""
    if not f.model.is_sparse or not f.model.bias or f.layout.expert_tp == 1:
        return None
    return Broken("parallel.etp", f"{f.layout.expert_tp} for experts with biases", (1,))


def experts_with_tensor_parallelism_need_sequence_parallelism(f: Facts) -> Broken | None:
    """A model with experts trains under tensor parallelism only with sequence parallelism; moe_layer.py stops in the
    first step, and validation only warns."""
    if not f.model.is_sparse or f.layout.tp == 1 or f.layout.sp:
        return None
    return Broken("parallel.sp", f"false with experts and tp = {f.layout.tp}", (True,))


def tokens_have_enough_experts(f: Facts) -> Broken | None:
    """A token goes to topk different experts: the model must have at least that many."""
    experts, topk = f.model.experts, f.model.topk
    if not experts or topk is None or topk <= experts:
        return None
    return Broken("model.moe_router_topk", f"{topk} of {experts} experts", (experts,))


def every_layer_is_sparse_or_dense(f: Facts) -> Broken | None:
    """A list of sparse and dense layers has an entry for each layer; gpt_layer_specs.py asserts it when the model is
    built."""
    layers, listed = f.model.layers, f.model.moe_layers
    if not f.model.is_sparse or listed is None or layers is None or len(listed) == layers:
        return None
    return Broken("model.moe_layer_freq", f"{len(listed)} entries for {layers} layers")


def flex_dispatcher_has_a_backend(f: Facts) -> Broken | None:
    """The flex dispatcher needs a backend (token_dispatcher.py refuses it without), and NCCL EP the flex dispatcher
    (transformer_config.py); other dispatchers don't use other backends."""
    kernels = f.kernels
    if kernels.dispatcher == "flex" and kernels.flex_backend is None:
        return Broken("model.moe_flex_dispatcher_backend", "is null for the flex dispatcher", ("deepep", "hybridep"))
    if kernels.flex_backend == "ncclep" and kernels.dispatcher not in ("flex", None):
        text = f"{kernels.dispatcher} with model.moe_flex_dispatcher_backend: ncclep"
        return Broken("model.moe_token_dispatcher_type", text, ("flex",))
    return None


def deepep_reaches_all_ranks(f: Facts) -> Broken | None:
    """DeepEP serves etp * ep ranks: more than one (token_dispatcher.py asserts it), and either one node's 8 at most,
    or whole nodes of 8, 20 at most (its own limits)."""
    if not _deepep(f):
        return None
    ranks = f.layout.expert_tp * f.layout.ep
    if ranks == 1:
        return Broken(
            "model.moe_flex_dispatcher_backend", "deepep needs etp * ep above 1: set alltoall, or parallel.ep"
        )
    per_node = f.cluster.gpus_per_node
    if ranks > DEEPEP_NODE and (ranks % DEEPEP_NODE or ranks > DEEPEP_NODE * DEEPEP_NODES or per_node % DEEPEP_NODE):
        text = f"etp * ep = {ranks} on nodes of {per_node} GPUs: DeepEP wants up to {DEEPEP_NODE}, or whole nodes of 8"
        return Broken("parallel.ep", text, divisors(f.model.experts or ranks, f.layout.ep))
    return None


def deepep_knows_the_gpu(f: Facts) -> Broken | None:
    """DeepEP is for Ampere, Hopper, B200 and B300; flex_dispatcher_backend.py refuses other GPUs when the run
    starts."""
    gpu = peaks.of(f.cluster.gpu)
    if not _deepep(f) or gpu is None or (gpu.generation >= Generation.AMPERE and gpu.kind not in NOT_FOR_DEEPEP):
        return None
    return Broken("model.moe_flex_dispatcher_backend", f"deepep on {f.cluster.gpu}", ("hybridep",))


def shared_expert_overlaps_a_dispatcher(f: Facts) -> Broken | None:
    """A shared expert overlaps the alltoall or flex dispatcher; transformer_config.py refuses allgather."""
    if (
        not f.kernels.shared_expert_overlap
        or not f.model.shared_ffn
        or f.kernels.dispatcher in ("alltoall", "flex", None)
    ):
        return None
    return Broken("model.moe_shared_expert_overlap", f"true with the dispatcher {f.kernels.dispatcher}", (False,))


def expert_overlap_can_work(f: Facts) -> Broken | None:
    """Hiding experts' communication needs ep above 1, alltoall or flex, vpp where there is a pipeline, 16-bit, and
    no full or moe recomputation, no shared expert overlap; transformer_config.py and comm_overlap.py assert each."""
    kernels, layout = f.kernels, f.layout
    if not kernels.expert_overlap:
        return None
    obstacles = {
        "parallel.ep above 1": layout.ep > 1,
        "the dispatcher alltoall or flex": kernels.dispatcher in ("alltoall", "flex", None),
        "parallel.vpp": layout.pp == 1 or layout.vpp is not None,
        "training.precision other than fp32": f.training.precision != "fp32",
        "no full recomputation": kernels.recompute != "full",
        "no recomputation of moe": kernels.recompute != "selective" or "moe" not in kernels.recompute_modules,
        "model.moe_shared_expert_overlap: false": not kernels.shared_expert_overlap,
        "one MTP layer at most": f.model.mtp_layers < 2,
    }
    missing = [what for what, is_met in obstacles.items() if not is_met]
    return Broken("model.overlap_moe_expert_parallel_comm", f"true needs {', '.join(missing)}") if missing else None


def _deepep(f: Facts) -> bool:
    return f.kernels.dispatcher == "flex" and f.kernels.flex_backend == "deepep"


RULES = (
    expert_parallelism_needs_experts,
    experts_divide,
    expert_width_divides,
    expert_tensor_parallelism_needs_experts,
    biased_experts_are_not_cut,
    experts_with_tensor_parallelism_need_sequence_parallelism,
    tokens_have_enough_experts,
    every_layer_is_sparse_or_dense,
    flex_dispatcher_has_a_backend,
    deepep_reaches_all_ranks,
    deepep_knows_the_gpu,
    shared_expert_overlaps_a_dispatcher,
    expert_overlap_can_work,
)
