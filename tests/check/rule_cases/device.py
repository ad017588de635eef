"""Cases of the rules of check/device.py."""

from rule_cases.case import FP8, Case

DELAYED = "DelayedScaling"

CASES = {
    "machine_has_the_gpus": Case(
        {"machine_gpus": 1, "gpus_per_node": 2},
        "resources.gpus_per_node",
        "2, and this machine has 1 GPU",
        (1,),
        {"machine_gpus": 2, "gpus_per_node": 2},
        {"gpus_per_node": 2},
    ),
    "cpu_calculates_in_the_precision": Case(
        {"precision": "fp16_mixed", "device": "cpu"},
        "training.precision",
        "fp16_mixed with device: cpu",
        ("fp32", "bf16_mixed"),
        {"precision": "bf16_mixed", "device": "cpu"},
        {"precision": "fp16_mixed", "device": "cuda"},
    ),
    "gpu_calculates_in_the_precision": Case(
        {"precision": "bf16_with_nvfp4_mixed", "gpu": "h100-80g"},
        "training.precision",
        "bf16_with_nvfp4_mixed on h100, which has no units for it: it needs Blackwell",
        (),
        {"precision": "bf16_with_nvfp4_mixed", "gpu": "b200-180g"},
        {"precision": FP8, "gpu": "h100-80g"},
    ),
    "torch_has_kernels_for_the_gpu": Case(
        {"precision": "fp16_mixed", "gpu": "v100-32g"},
        "resources.gpu",
        "v100-32g: the locked torch has no kernels for it; only an older image may",
        (),
        {"precision": "fp16_mixed", "gpu": "a100-80g"},
        {"precision": "fp16_mixed", "gpu": None},
        level="warning",
    ),
    "attention_in_fp8_has_kernels": Case(
        {"precision": FP8, "gpu": "h200-141g", "fp8_attention": True, "head_dim": 128},
        "mixed_precision.fp8_dot_product_attention",
        "true on h200 with bf16_with_fp8_current_scaling_mixed: it needs bf16_with_fp8_delayed_scaling_mixed, or "
        "launch.environment: {NVTE_DPA_FP8_RECIPE: DelayedScaling}",
        (False,),
        {"precision": FP8, "gpu": "h200-141g", "fp8_attention": True, "head_dim": 128, "attention_scaling": DELAYED},
        {"precision": FP8, "gpu": "b200-180g", "fp8_attention": True, "head_dim": 64},
    ),
    "gpu_is_known": Case(
        {"gpu": "mi300-192g"},
        "resources.gpu",
        "nothing is known of mi300, so that its step times and costs can't be predicted",
        (),
        {"gpu": "h100-80g"},
        {"gpu": "mi300-192g", "device": "cpu"},
        level="warning",
    ),
    "gpus_are_those_of_the_recipe": Case(
        {"tuned_for": ("gb200", 8), "gpu": "b200-180g", "gpus_per_node": 8},
        "resources.gpu",
        "8 b200: NVIDIA chose this recipe's layout, batch and environment for 8 gb200",
        (),
        {"tuned_for": ("gb200", 8), "gpu": "gb200-186g", "gpus_per_node": 8},
        {"gpu": "b200-180g", "gpus_per_node": 8},
        level="warning",
    ),
    "context_ranks_have_attention": Case(
        {"cp": 2, "precision": "fp32", "seq_length": 128},
        "training.precision",
        "fp32 with parallel.cp: 2 on GPUs",
        ("bf16_mixed",),
        {"cp": 2, "precision": "fp32", "seq_length": 128, "device": "cpu"},
        {"precision": "fp32"},
    ),
}
