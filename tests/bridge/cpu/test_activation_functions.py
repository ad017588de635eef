"""Activations of transformers' models against those of the models that Bridge makes of their configs."""

import pytest
from cpu_ranks import on_cpu

from megaboa.check import hidden_act
from megaboa.plan import families

pytestmark = pytest.mark.slow

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.3},
}
NO_WHOLE_CONFIG = {"deepseek_v4", "glm_moe_dsa", "hy_v3"}  # by their defaults


def test_a_function_is_that_of_the_config_or_told_to_be_lost():
    [found] = on_cpu(_functions)
    assert {family for family, _ in found} == families.CONVERTIBLE - NO_WHOLE_CONFIG - hidden_act.UNREAD
    wrong = {case: (same, lost) for case, (same, lost) in found.items() if same == lost}
    assert not wrong


def _functions():
    """By family and name of an activation: whether Bridge's is the same function, and whether it is told to be lost."""
    import torch
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig
    from transformers.activations import ACT2FN
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    from megaboa.bridge import convert

    points, found = torch.linspace(-6, 6, 1001), {}
    for family in families.CONVERTIBLE - NO_WHOLE_CONFIG - hidden_act.UNREAD:
        for name in (*hidden_act.KNOWN, *hidden_act.MEANT):
            config = AutoConfig.for_model(family, architectures=[NAMES[family]])
            setattr(config.get_text_config(), hidden_act.KEYS.get(family, "hidden_act"), name)
            lost = hidden_act.lost(config.to_dict())
            if name in hidden_act.MEANT:
                config = AutoConfig.for_model(family, architectures=[NAMES[family]])
                setattr(config.get_text_config(), hidden_act.KEYS.get(family, "hidden_act"), hidden_act.MEANT[name])
                assert lost and _close(ACT2FN[name](points), ACT2FN[hidden_act.MEANT[name]](points))
                continue
            provider = convert.provider_of(AutoBridge.from_hf_config(config), load_weights=False)
            assert name == "silu" or lost or not provider.bias_activation_fusion
            found[family, name] = _close(provider.activation_func(points), ACT2FN[name](points)), lost is not None
    return found


def _close(one, other):
    return (one - other).abs().max().item() < 1e-6


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu"])
def test_logits_of_a_llama_are_those_of_transformers(activation, tmp_path):
    [difference] = on_cpu(_difference, activation, str(tmp_path))
    assert difference < 1e-5


def _difference(activation, folder):
    import torch
    from megatron.bridge import AutoBridge
    from megatron.core.utils import unwrap_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from megaboa.bridge import convert, logits

    config = AutoConfig.for_model("llama", **SIZES, vocab_size=256, hidden_act=activation)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.save_pretrained(folder)
    with convert.process_groups("cpu"), torch.no_grad():
        provider = convert.provider_of(AutoBridge.from_hf_pretrained(folder))
        vars(provider).update(convert.UNTRAINED)
        provider.finalize()
        model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
        tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(1))
        found = logits.megatron_logits(unwrap_model(model)[0].eval(), tokens, 256)
        expected = theirs(tokens).logits
    return ((found - expected).abs().max() / expected.abs().max()).item()
