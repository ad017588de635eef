"""DeepSeek-V2-Lite, 500 steps on mock data on one node of 8 GPUs, with Megatron's token dispatcher or DeepEP's."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

from megatron.bridge import AutoBridge
from megatron.bridge.recipes.deepseek.h100 import deepseek_v2
from megatron.bridge.training.config import ConfigContainer


def configure(hf_path: str | None = None, moe_token_dispatcher_type: str | None = None) -> ConfigContainer:
    """`hf_path`: folder with the model's config.json (no hub is asked); `moe_token_dispatcher_type`: "deepep", or one
    of Megatron's."""
    with _model_from(hf_path):
        config = deepseek_v2.deepseek_v2_lite_pretrain_8gpu_h100_bf16_config()
    model = config.model
    model.tensor_model_parallel_size = 8
    model.pipeline_model_parallel_size = 1
    model.expert_model_parallel_size = 2
    model.sequence_parallel = True
    model.seq_length = config.dataset.seq_length = 4096
    model.moe_permute_fusion = False
    config.train.train_iters = 500
    config.train.global_batch_size, config.train.micro_batch_size = 64, 1
    config.validation.eval_interval = 100
    config.scheduler.lr_warmup_iters = 50
    config.checkpoint.save_interval = 0
    if moe_token_dispatcher_type == "deepep":
        model.moe_token_dispatcher_type, model.moe_flex_dispatcher_backend = "flex", "deepep"
        model.moe_shared_expert_overlap = False
    elif moe_token_dispatcher_type is not None:
        model.moe_token_dispatcher_type = moe_token_dispatcher_type
    return config


@contextlib.contextmanager
def _model_from(path: str | None) -> Iterator[None]:
    """Bridge's recipe takes no arguments, and reads the model's config from the hub: let it read this folder."""
    if path is not None:
        deepseek_v2.AutoBridge = SimpleNamespace(from_hf_pretrained=lambda _: AutoBridge.from_hf_pretrained(path))
    try:
        yield
    finally:
        deepseek_v2.AutoBridge = AutoBridge
