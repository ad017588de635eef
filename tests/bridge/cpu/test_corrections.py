"""Where Bridge's own models and checkpoints are corrected, besides attention (test_latent_attention.py)."""

from types import SimpleNamespace

import pytest
from cpu_ranks import on_cpu

ERNIE = {
    **{"model_type": "ernie4_5_moe", "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128},
    **{"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    **{"max_position_embeddings": 128, "tie_word_embeddings": True},
}


def test_norms_after_attention_have_the_models_epsilon():
    """Without Transformer Engine there is no such norm here: what is asked of it is recorded."""
    assert on_cpu(_asked_of_the_norm) == [[(32, 1e-6)]]


def _asked_of_the_norm():
    from megatron.bridge.models.common import te_layers

    from megaboa.bridge import post_norms

    asked = []
    te_layers.TENorm = lambda config, size, eps=1e-5: asked.append((size, eps))
    post_norms._with_own_epsilon(te_layers)
    te_layers.TENorm(SimpleNamespace(layernorm_epsilon=1e-6), 32)
    return asked


def test_a_layers_private_function_is_written_by_a_public_name_that_is_read_again():
    [(before, after, same)] = on_cpu(_names_of_layers)
    assert before.startswith("_") and after == before.lstrip("_") and same


def _names_of_layers():
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.ernie import ernie_45_bridge
    from megatron.bridge.utils.instantiate_utils import instantiate
    from transformers import AutoConfig

    from megaboa.bridge import convert

    config = AutoConfig.for_model(**ERNIE, architectures=["Ernie4_5_MoeForCausalLM"])
    before = ernie_45_bridge._ernie45_decoder_block_spec.__qualname__
    layers = convert.provider_of(AutoBridge.from_hf_config(config), load_weights=False).transformer_layer_spec
    target = {"_target_": f"{layers.__module__}.{layers.__qualname__}", "_call_": False}
    return before, layers.__qualname__, instantiate(target) is layers


@pytest.mark.parametrize("is_there", [True, False])
def test_a_softmax_is_fused_where_its_extension_is(is_there):
    assert on_cpu(_is_softmax_fused, is_there) == [is_there]


def _is_softmax_fused(is_there):
    import importlib.util

    from megaboa.bridge import convert

    model, find = SimpleNamespace(masked_softmax_fusion=True), importlib.util.find_spec
    importlib.util.find_spec = lambda name: is_there or None if name == convert.FUSED_SOFTMAX else find(name)
    convert.with_softmax_that_is_there(model)
    return model.masked_softmax_fusion


def test_parameters_without_a_tensor_are_named():
    assert on_cpu(_unmapped) == [["decoder.layers.0.mlp.router.bias"]]


def _unmapped():
    from megaboa.bridge import convert

    with convert._unmapped() as found:
        for _ in range(2):
            convert.model_bridge.logger.warning(
                "WARNING: No mapping found for megatron_param: decoder.layers.0.mlp.router.bias"
            )
        convert.model_bridge.logger.warning("something else")
    convert.model_bridge.logger.warning("WARNING: No mapping found for megatron_param: later")
    return found
