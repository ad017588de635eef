"""Cases of the rules of check/experts.py."""

from rule_cases.case import FLEX, MOE, OVERLAP, OVERLAPPED, Case

CASES = {
    "expert_parallelism_needs_experts": Case(
        {"layers": 4, "ep": 2}, "parallel.ep", "without experts", (1,), {"layers": 4, "ep": 1}, {**MOE, "ep": 2}
    ),
    "experts_divide": Case(
        {**MOE, "ep": 6}, "parallel.ep", "6 doesn't divide 8 experts", (4, 8), {**MOE, "ep": 8}, {**MOE, "ep": 2}
    ),
    "expert_width_divides": Case(
        {**MOE, "moe_ffn": 768, "etp": 5},
        "parallel.etp",
        "5 doesn't divide the experts' width 768",
        (4, 6),
        {**MOE, "moe_ffn": 768, "tp": 5, "ep": 2},
        {**MOE, "moe_ffn": 768, "etp": 4},
    ),
    "expert_tensor_parallelism_needs_experts": Case(
        {"layers": 4, "etp": 2},
        "parallel.etp",
        "without experts",
        ("null",),
        {"layers": 4, "etp": 1},
        {**MOE, "etp": 2},
        "warning",
    ),
    "biased_experts_are_not_cut": Case(
        {**MOE, "bias": True, "tp": 2},
        "parallel.etp",
        "2 for experts with biases",
        (1,),
        {**MOE, "bias": True, "tp": 2, "etp": 1},
        {**MOE, "tp": 2},
    ),
    "experts_with_tensor_parallelism_need_sequence_parallelism": Case(
        {**MOE, "tp": 2},
        "parallel.sp",
        "false with experts and tp = 2",
        (True,),
        {**MOE, "tp": 2, "sp": True},
        {"tp": 2},
    ),
    "tokens_have_enough_experts": Case(
        {"experts": 8, "topk": 9}, "model.moe_router_topk", "9 of 8", (8,), {"experts": 8, "topk": 8}, MOE
    ),
    "every_layer_is_sparse_or_dense": Case(
        {**MOE, "layers": 4, "moe_layers": (False, True)},
        "model.moe_layer_freq",
        "2 entries for 4 layers",
        (),
        {**MOE, "layers": 4, "moe_layers": (False, True, True, True)},
        MOE,
    ),
    "flex_dispatcher_has_a_backend": Case(
        {**FLEX, "flex_backend": None},
        "model.moe_flex_dispatcher_backend",
        "is null",
        ("deepep", "hybridep"),
        FLEX,
        {**MOE, "dispatcher": "alltoall"},
    ),
    "deepep_reaches_all_ranks": Case(
        {**FLEX, "experts": 48, "ep": 12, "gpus_per_node": 8},
        "parallel.ep",
        "etp * ep = 12 on nodes of 8 GPUs",
        (8, 16),
        {**FLEX, "ep": 8, "gpus_per_node": 8},
        {**FLEX, "experts": 64, "ep": 16, "gpus_per_node": 8},
    ),
    "deepep_knows_the_gpu": Case(
        {**FLEX, "gpu": "gb200-192g"},
        "model.moe_flex_dispatcher_backend",
        "deepep on gb200",
        ("hybridep",),
        {**FLEX, "gpu": "b200-180g"},
        {**FLEX, "gpu": None},
    ),
    "shared_expert_overlaps_a_dispatcher": Case(
        {**MOE, **OVERLAPPED, "dispatcher": "allgather"},
        "model.moe_shared_expert_overlap",
        "true with the dispatcher allgather",
        (False,),
        {**MOE, **OVERLAPPED, "dispatcher": "alltoall"},
        {**MOE, "shared_expert_overlap": True, "dispatcher": "allgather"},
    ),
    "expert_overlap_can_work": Case(
        {**OVERLAP, "pp": 2},
        "model.overlap_moe_expert_parallel_comm",
        "true needs parallel.vpp",
        (),
        {**OVERLAP, "pp": 2, "vpp": 2},
        {**MOE, "recompute": "full"},
    ),
}

OTHER_ERRORS = [
    ("deepep_reaches_all_ranks", {**FLEX, "gpus_per_node": 8}),
    ("flex_dispatcher_has_a_backend", {**FLEX, "dispatcher": "alltoall", "flex_backend": "ncclep"}),
]
