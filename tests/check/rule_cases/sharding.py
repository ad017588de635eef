"""Cases of the rules of check/sharding.py."""

from rule_cases.case import Case

CASES = {
    "fsdp_has_no_pipeline": Case(
        {"fsdp": "megatron", "pp": 2},
        "parallel.pp",
        "2 with parallel.fsdp: megatron",
        (1,),
        {"fsdp": "megatron", "tp": 2},
        {"pp": 2},
        "warning",
    ),
    "fsdp_has_no_layer_graphs": Case(
        {"fsdp": "megatron", "graphs": "transformer_engine", "expert_overlap": True},
        "model.cuda_graph_impl",
        "transformer_engine with parallel.fsdp: megatron and overlap",
        ("none",),
        {"fsdp": "megatron", "graphs": "none", "expert_overlap": True},
        {"graphs": "transformer_engine"},
    ),
    "optimizer_instances_need_fsdp": Case(
        {"optimizer_instances": 2},
        "ddp.num_distributed_optimizer_instances",
        "2 without parallel.fsdp",
        (1,),
        {"optimizer_instances": 2, "fsdp": "megatron"},
        {},
        "warning",
    ),
    "fsdp_checkpoints_are_dtensors": Case(
        {"fsdp": "megatron", "checkpoint_format": "torch_dist"},
        "checkpoint.ckpt_format",
        "torch_dist with parallel.fsdp: megatron",
        ("fsdp_dtensor",),
        {"fsdp": "megatron", "checkpoint_format": "torch_dist", "save_interval": 0},
        {"fsdp": "megatron", "checkpoint_format": "fsdp_dtensor"},
    ),
    "fsdp_without_shards_is_not_saved": Case(
        {"fsdp": "megatron", "fsdp_sharding": "no_shard", "checkpoint_format": "fsdp_dtensor"},
        "parallel.fsdp_sharding",
        "no_shard of a model with gated layers can't be saved",
        ("optim", "optim_grads", "optim_grads_params"),
        {"fsdp": "megatron", "fsdp_sharding": "no_shard", "checkpoint_format": "fsdp_dtensor", "save_interval": 0},
        {"fsdp": "megatron", "fsdp_sharding": "no_shard", "checkpoint_format": "fsdp_dtensor", "gated": False},
    ),
    "fsdp_has_several_connections": Case(
        {"fsdp": "torch", "max_connections": "1"},
        "launch.environment",
        "CUDA_DEVICE_MAX_CONNECTIONS is 1",
        (32,),
        {"fsdp": "torch", "max_connections": "2"},
        {"max_connections": "1"},
    ),
    "fsdp_shards_the_optimizer": Case(
        {"fsdp": "megatron", "distributed_optimizer": False},
        "parallel.distributed_optimizer",
        "false is turned to true",
        (True,),
        {"fsdp": "megatron"},
        {"distributed_optimizer": False},
        "warning",
    ),
    "sgd_has_nothing_to_shard": Case(
        {"optimizer": "sgd"},
        "optimizer.name",
        "sgd has no state to distribute",
        ("adam",),
        {"optimizer": "sgd", "distributed_optimizer": False},
        {},
    ),
    "muon_reads_whole_gradients": Case(
        {"optimizer": "muon"},
        "optimizer.name",
        "muon reads whole gradients: set parallel.distributed_optimizer: false",
        ("adam",),
        {"optimizer": "muon", "distributed_optimizer": False},
        {"optimizer": "dist_muon"},
    ),
    "overlapped_gather_needs_overlapped_reduction": Case(
        {"gather_overlap": True, "grad_overlap": False},
        "parallel.overlap_param_gather",
        "true without parallel.overlap_grad_reduce",
        (False,),
        {"gather_overlap": True, "grad_overlap": True},
        {"gather_overlap": True},  # by default gradients are reduced early, too
        "warning",
    ),
    "overlapped_gather_needs_shards": Case(
        {"gather_overlap": True, "distributed_optimizer": False},
        "parallel.overlap_param_gather",
        "true without parallel.distributed_optimizer",
        (False,),
        {"gather_overlap": True, "distributed_optimizer": False, "fsdp": "megatron"},
        {"gather_overlap": True, "distributed_optimizer": False, "optimizer": "dist_muon"},
    ),
    "twins_have_whole_weights": Case(
        {"nudge": 1, "fsdp": "torch"},
        "training.nudge",
        "moves whole weights, and FSDP holds them in pieces: remove twins, or parallel.fsdp",
        (0,),
        {"nudge": 1},
        {"fsdp": "megatron"},
    ),
    "torch_fsdp_has_no_overlap_of_megatrons": Case(
        {"grad_overlap": True, "fsdp": "torch"},
        "parallel.overlap_grad_reduce",
        "true with parallel.fsdp: torch",
        (False,),
        {"grad_overlap": False, "gather_overlap": False, "fsdp": "torch"},
        {"grad_overlap": True, "fsdp": "megatron"},
    ),
}

OTHER_WARNINGS = {  # rules that refuse some and warn of others
    "fsdp_has_no_layer_graphs": {"fsdp": "torch", "graphs": "full_iteration"},
}

OTHER_ERRORS = [
    ("fsdp_checkpoints_are_dtensors", {"checkpoint_format": "fsdp_dtensor"}),
    ("muon_reads_whole_gradients", {"optimizer": "muon", "distributed_optimizer": False, "fsdp": "megatron"}),
    ("muon_reads_whole_gradients", {"optimizer": "dist_muon", "distributed_optimizer": False, "fsdp": "torch"}),
]
