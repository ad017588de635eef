"""Cases of the rules of check/ranks_and_batches.py."""

from rule_cases.case import MOE, Case

BATCH = {"world_size": 8, "mbs": 2}

CASES = {
    "ranks_fill_the_layout": Case(
        {"world_size": 12, "tp": 4, "pp": 2},
        "resources.gpus_per_node",
        "12 is not a multiple of tp * pp * cp = 4 * 2 * 1 = 8",
        (8, 16),
        {"world_size": 16, "tp": 4, "pp": 2},
        {"world_size": 12, "tp": 3, "pp": 2, "cp": 2},
    ),
    "one_copy_of_the_model_at_least": Case(
        {"world_size": 7, "tp": 8},
        "resources.gpus_per_node",
        "7 is less than tp * pp * cp",
        (8,),
        {"world_size": 8, "tp": 8},
        {"world_size": 16, "tp": 8},
    ),
    "ranks_fill_the_expert_layout": Case(
        {**MOE, "world_size": 8, "pp": 2, "ep": 8, "etp": 1},
        "parallel.ep",
        "8 is not a multiple of etp * ep * pp = 1 * 8 * 2",
        (4,),
        {**MOE, "world_size": 8, "pp": 2, "ep": 4, "etp": 1},
        {"world_size": 8, "layers": 4, "tp": 8},
    ),
    "batch_fills_the_ranks": Case(
        {**BATCH, "gbs": 20},
        "training.global_batch_size",
        "20 is not a multiple of micro_batch_size * dp = 2 * 8 = 16",
        (16, 32),
        {**BATCH, "gbs": 16},
        {**BATCH, "gbs": 20, "tp": 4},
    ),
    "batch_has_one_size": Case(
        {**BATCH, "gbs": 16, "rampup": [8, 8, 1000]},
        "train.rampup_batch_size",
        "[8, 8, 1000] would change nothing",
        ("null",),
        {**BATCH, "gbs": 16, "rampup": None},
        {**BATCH, "gbs": 16},
    ),
    "batch_fills_the_optimizer_instances": Case(
        {**BATCH, "gbs": 48, "fsdp": "megatron", "optimizer_instances": 2},
        "training.global_batch_size",
        "48 is not a multiple of micro_batch_size * dp * optimizer instances",
        (32, 64),
        {**BATCH, "gbs": 64, "fsdp": "megatron", "optimizer_instances": 2},
        {**BATCH, "gbs": 48, "fsdp": "megatron"},
        "warning",
    ),
    "evaluation_batch_fills_the_ranks": Case(
        {**BATCH, "eval_gbs": 8},
        "validation.eval_global_batch_size",
        "8 is not a multiple of eval_micro_batch_size * dp = 2 * 8",
        (16,),
        {**BATCH, "eval_gbs": 8, "eval_mbs": 1},
        {**BATCH, "gbs": 16},
    ),
    "optimizer_instances_share_the_ranks": Case(
        {"world_size": 8, "optimizer_instances": 3},
        "ddp.num_distributed_optimizer_instances",
        "can't be divided over 3",
        (2, 4),
        {"world_size": 8, "optimizer_instances": 8},
        {"world_size": 8},
    ),
    "tensor_ranks_stay_in_a_node": Case(
        {"nodes": 2, "gpus_per_node": 8, "tp": 16},
        "parallel.tp",
        "16 spreads over 2 nodes",
        (8,),
        {"nodes": 2, "gpus_per_node": 8, "tp": 8},
        {"nodes": 1, "gpus_per_node": 6, "tp": 4},
        "warning",
    ),
    "tasks_are_ranks": Case(
        {"gpus_per_node": 8, "tasks_per_node": 4},
        "resources.slurm_extra",
        "asks for 4",
        (),
        {"gpus_per_node": 8, "tasks_per_node": 8},
        {"gpus_per_node": 8},
    ),
}
