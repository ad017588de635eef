"""Counts against transformers' own models, built without memory on the meta device."""

from __future__ import annotations

import pytest

from megaboa.plan.parameters import UnknownFamilyError, count_parameters

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = {"num_hidden_layers": 4, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
    **{"v_head_dim": 8, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_shared_experts": 2},
}

CONFIGS = {
    "llama": {"model_type": "llama"},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama with wide heads": {"model_type": "llama", "head_dim": 16},
    "mistral": {"model_type": "mistral"},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3 tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 16, **MOE},
    "qwen3_moe, every second layer sparse": {"model_type": "qwen3_moe", "decoder_sparse_step": 2, **MOE},
    "qwen3_moe, one layer dense": {"model_type": "qwen3_moe", "mlp_only_layers": [1], **MOE},
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT},
    "deepseek_v3 without query rank": {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": None},
}
DEFAULTS = ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"]


def real_count(config: dict) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_count_is_that_of_transformers(name: str) -> None:
    config = {**SMALL, **CONFIGS[name]}
    assert count_parameters(config) == real_count(config)


@pytest.mark.slow
@pytest.mark.parametrize("family", DEFAULTS)
def test_a_silent_config_has_the_defaults_of_transformers(family: str) -> None:
    config = {"model_type": family, "num_hidden_layers": 5}
    assert count_parameters(config) == real_count(config)
    from transformers import AutoConfig

    layers = AutoConfig.for_model(family).num_hidden_layers
    assert count_parameters({"model_type": family}) == count_parameters(
        {"model_type": family, "num_hidden_layers": layers}
    )


def test_known_sizes() -> None:
    llama_7b = count_parameters({"model_type": "llama"})
    assert llama_7b == 6_738_415_616
    deepseek = count_parameters({"model_type": "deepseek_v3"})
    assert 670e9 < deepseek < 672e9


def test_unknown_family_points_to_the_remedy() -> None:
    with pytest.raises(UnknownFamilyError, match=r"'gpt_neox'.*known: llama.*set models\.<name>\.params"):
        count_parameters({"model_type": "gpt_neox"})
