"""Gradients of latent attention that two tensor ranks share are those of one rank."""

import pytest
import torch
from cpu_ranks import on_cpu


def _gradients(tp: int, split: bool, completed: bool = True) -> dict[str, tuple[int, list]]:
    """By weight: the dimension along which ranks divide it, and this rank's part of the gradient."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(1)
    config = MLATransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, tensor_model_parallel_size=tp, sequence_parallel=split,
        q_lora_rank=16, kv_lora_rank=8, qk_head_dim=4, qk_pos_emb_head_dim=8, v_head_dim=8, rope_type="rope",
        qk_layernorm=True,
        add_bias_linear=False, attention_dropout=0.0, normalization="RMSNorm", params_dtype=torch.float32,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm")
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = build_module(spec.submodules.self_attention, config=config, layer_number=1, pg_collection=groups)
    if not completed:
        layer._qkv_down_projection = type(layer)._qkv_down_projection.__wrapped__.__get__(layer)
    rank, divided = torch.distributed.get_rank(), {}
    for number, (name, weight) in enumerate(layer.named_parameters()):
        if getattr(weight, "tensor_model_parallel", False):
            divided[name] = weight
            size = list(weight.shape)
            size[weight.partition_dim] *= tp
            whole = 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(number))
            weight.data.copy_(whole.chunk(tp, dim=weight.partition_dim)[rank])
    whole = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(100))
    out, _ = layer(whole.chunk(tp)[rank] if split else whole, attention_mask=None)
    out.square().sum().backward()
    return {name: (weight.partition_dim, weight.grad.tolist()) for name, weight in divided.items()}


def _whole(parts: list) -> dict[str, torch.Tensor]:
    return {name: torch.cat([torch.tensor(one[name][1]) for one in parts], dim) for name, (dim, _) in parts[0].items()}


@pytest.fixture(scope="module")
def alone():
    return _whole(on_cpu(_gradients, 1, False))


@pytest.mark.parametrize("split", [False, True])
def test_two_ranks_have_the_gradients_of_one(alone, split):
    found = _whole(on_cpu(_gradients, 2, split, world_size=2))
    assert {name.split(".")[0] for name in found} >= {"linear_q_down_proj", "linear_kv_down_proj", "linear_proj"}
    for name, gradient in alone.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_megatron_alone_has_others(alone):
    """If this fails, megatron-core sums by itself, and ours can go."""
    found = _whole(on_cpu(_gradients, 2, False, False, world_size=2))
    wrong = {name for name, one in alone.items() if not torch.allclose(found[name], one, rtol=1e-4, atol=1e-6)}
    assert wrong == {"linear_kv_down_proj.weight"}
