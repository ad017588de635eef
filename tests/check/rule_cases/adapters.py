"""Cases of the rules of check/adapters.py."""

from rule_cases.case import MOE, Case

CASES = {
    "adapters_leave_experts_alone": Case(
        {**MOE, "heads": 4, "adapter_targets": ("linear_qkv", "*.linear_fc1")},
        "tuning.targets",
        "*.linear_fc1 would give adapters to experts too",
        ("[linear_qkv, linear_proj]",),
        {**MOE, "heads": 4, "adapter_targets": ("linear_qkv", "linear_proj")},
        {"layers": 4, "heads": 4, "adapter_targets": ("linear_fc1",)},
    ),
    "targets_name_layers": Case(
        {"layers": 4, "heads": 4, "adapter_targets": ("linear_proj", "q_proj")},
        "tuning.targets",
        "'q_proj' ends with the name of no layer that this model has: they are linear_qkv, linear_proj, linear_fc1, "
        "linear_fc2",
        ("linear_qkv",),
        {"layers": 4, "heads": 4, "latent": True, "adapter_targets": ("linear_proj", "linear_q_proj")},
        {"layers": 4, "heads": 4, "adapter_targets": ("*linear_qkv", "*.layers.3.*.linear_fc2")},
    ),
    "numbered_targets_are_of_one_stage": Case(
        {"pp": 2, "world_size": 2, "adapter_targets": ("linear_fc1", "*.layers.0.*.linear_fc1")},
        "tuning.targets",
        "'*.layers.0.*.linear_fc1' would be counted by each of pp = 2 stages on its own",
        ("linear_fc1",),
        {"pp": 1, "world_size": 2, "adapter_targets": ("linear_fc1", "*.layers.0.*.linear_fc1")},
        {"pp": 2, "world_size": 2, "adapter_targets": ("linear_fc1", "*.mlp.linear_fc2")},
    ),
    "magnitudes_are_of_whole_layers": Case(
        {"tp": 2, "world_size": 2, "adapter_targets": ("linear_fc1",), "adapter_magnitudes": True},
        "parallel.tp",
        "task: dora with tp = 2 would train and export another model than with tp = 1",
        (1,),
        {"tp": 1, "world_size": 2, "adapter_targets": ("linear_fc1",), "adapter_magnitudes": True},
        {"tp": 2, "world_size": 2, "adapter_targets": ("linear_fc1",), "adapter_magnitudes": False},
    ),
}

OTHER_ERRORS = [
    *(
        ("targets_name_layers", {"layers": 4, "heads": 4, "adapter_targets": (target,)})
        for target in ("linear_*", "*", "linear_kv_up_proj", "*.layers.4.*.linear_qkv", "self_attention.linear_qkv")
    ),
    ("targets_name_layers", {"adapter_targets": ("linear_qvk",)}),  # nothing is known of the model
    ("targets_name_layers", {"layers": 4, "heads": 4, "latent": True, "adapter_targets": ("linear_qkv",)}),
    (
        "targets_name_layers",
        {"layers": 4, "heads": 4, "latent": True, "q_rank": 8, "adapter_targets": ("linear_q_proj",)},
    ),
]
