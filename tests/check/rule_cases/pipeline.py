"""Cases of the rules of check/pipeline.py."""

from rule_cases.case import Case

INTERLEAVED = {"world_size": 4, "pp": 4, "vpp": 2, "mbs": 1}
STAGES = (("embedding", "decoder"), ("decoder", "decoder"), ("decoder", "loss"))
DEEPSEEK = {"family": "deepseek_v3", "layers": 61}

CASES = {
    "interleaving_needs_a_pipeline": Case(
        {"vpp": 2}, "parallel.vpp", "2 needs parallel.pp above 1", (1,), {"vpp": 2, "pp": 2}, {"pp": 2}
    ),
    "layers_fill_the_stages": Case(
        {"layers": 36, "pp": 8},
        "parallel.pp",
        "36 layers can't be divided over pp * vpp = 8 * 1",
        (6, 9),
        {"layers": 36, "pp": 36},
        {"layers": 34, "pp": 4, "vpp": 3, "embedding_counts": True, "loss_counts": True},
    ),
    "uneven_stages_leave_even_ones": Case(
        {"layers": 14, "pp": 4, "first_stage_layers": 3},
        "model.num_layers_in_first_pipeline_stage",
        "11 layers are left, not a multiple of 3 stages",
        (5, 2),
        {"layers": 14, "pp": 4, "first_stage_layers": 2},
        {"layers": 14, "pp": 4, "first_stage_layers": 3, "last_stage_layers": 3},
    ),
    "layers_are_shared_out_in_one_way": Case(
        {"first_stage_layers": 2, "loss_counts": True},
        "model.num_layers_in_first_pipeline_stage",
        "is set together with model.account_for_loss_in_pipeline_split: keep one",
        (),
        {"first_stage_layers": 2, "last_stage_layers": 2},
        {"embedding_counts": True, "loss_counts": True},
    ),
    "pipeline_layout_holds_the_model": Case(
        {"stages": STAGES, "pp": 3, "layers": 5},
        "model.pipeline_model_parallel_layout",
        "has 4 decoder layers, the model 5",
        (5,),
        {"stages": STAGES, "pp": 3, "layers": 4},
        {"pp": 3, "layers": 5},
    ),
    "deepseek_v3_has_a_layout": Case(
        {**DEEPSEEK, "pp": 2},
        "parallel.pp",
        "(pp, vpp) = (2, 1) has no layout",
        ((1, 1), (4, 1), (8, 1)),
        {**DEEPSEEK, "pp": 4, "vpp": 4},
        {"family": "deepseek_v3", "layers": 8, "pp": 2},
    ),
    "interleaved_stages_have_micro_batches": Case(
        {**INTERLEAVED, "gbs": 6},
        "training.global_batch_size",
        "6 makes 6 micro-batches, not a multiple of 4",
        (4, 8),
        {**INTERLEAVED, "gbs": 4},
        {**INTERLEAVED, "gbs": 6, "vpp": None},
    ),
    "micro_batches_fill_the_pipeline": Case(
        {"world_size": 4, "pp": 4, "mbs": 2, "gbs": 6},
        "training.global_batch_size",
        "6 makes 3 micro-batches for 4 stages: each waits 3 of 6 turns",
        (8,),
        {"world_size": 4, "pp": 4, "mbs": 2, "gbs": 8},
        {"world_size": 4, "mbs": 2, "gbs": 8},
        "warning",
    ),
    "pipeline_has_a_type": Case(
        {"pp": 2, "pipeline_dtype": False},
        "model.pipeline_dtype",
        "is null",
        ("bf16_mixed", "fp32"),
        {"pp": 1, "pipeline_dtype": False},
        {"pp": 2},
    ),
}

OTHER_ERRORS = [
    ("layers_fill_the_stages", {"layers": 36, "pp": 4, "vpp": 2}),
    ("layers_fill_the_stages", {"layers": 36, "pp": 4, "loss_counts": True}),
    ("uneven_stages_leave_even_ones", {"layers": 8, "pp": 2, "first_stage_layers": 8}),
    ("uneven_stages_leave_even_ones", {"layers": 12, "pp": 2, "vpp": 2, "first_stage_layers": 5}),
    (
        "uneven_stages_leave_even_ones",
        {"layers": 6, "pp": 2, "vpp": 2, "first_stage_layers": 2, "last_stage_layers": 4},
    ),
    ("pipeline_layout_holds_the_model", {"stages": STAGES, "pp": 2, "layers": 4}),
    ("pipeline_layout_holds_the_model", {"stages": STAGES[::-1], "pp": 3, "layers": 4}),
    ("pipeline_layout_holds_the_model", {"stages": STAGES, "pp": 3, "layers": 4, "mtp_layers": 1}),
    ("interleaved_stages_have_micro_batches", {**INTERLEAVED, "gbs": 8, "group": 6}),
    ("interleaved_stages_have_micro_batches", {**INTERLEAVED, "gbs": 8, "group": 1}),
    ("interleaved_stages_have_micro_batches", {**INTERLEAVED, "group": 3}),
]
