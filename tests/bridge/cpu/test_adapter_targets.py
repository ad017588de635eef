"""megaboa.check.adapters against Bridge: which layers a target gives adapters, and how many parameters these have."""

import dataclasses

import pytest
from cpu_ranks import on_cpu

from megaboa.check import adapters, table
from megaboa.check.facts import Facts, Model, Training

pytestmark = pytest.mark.slow

COMMON = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DENSE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    **COMMON,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LATENT = {
    **{"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], **COMMON, "num_key_value_heads": 4},
    **{"q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2},
    **{
        "first_k_dense_replace": 1,
        "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 0.7, "mscale_all_dim": 0.7},
    },
}
LATENT["rope_scaling"] |= {"original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1}
SIZES = {"layers": 2, "hidden": 32, "ffn": 64, "heads": 4}
OF_LATENT = {"latent": True, "kv_rank": 16, "qk_head_dim": 8, "qk_position_dim": 8, "v_head_dim": 8}
MODELS = {  # Hugging Face's config, what a rule looks at, and lists of targets
    "dense": (
        DENSE,
        {**SIZES, "kv_groups": 2, "head_dim": 8},
        [
            ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
            ["*linear_qkv"],
            ["*.layers.0.*.linear_qkv", "linear_fc2"],
            ["linear_*"],
            ["q_proj", "linear_proj"],
        ],
    ),
    "latent": (
        LATENT,
        {**SIZES, **OF_LATENT, "experts": 4, "q_rank": 12},
        [
            ["linear_qkv"],
            ["linear_q_down_proj", "linear_q_up_proj", "linear_proj"],
            ["*.self_attention.linear_kv_up_proj"],
            ["linear_q_proj"],
        ],
    ),
}


@pytest.fixture(scope="module")
def made():
    """By model, task and list: parameters of the adapters that Bridge makes, and what is objected to."""
    [found] = on_cpu(_build, {name: (config, lists) for name, (config, _, lists) in MODELS.items()})
    return found


def _build(models):
    from megatron.bridge import AutoBridge
    from megatron.bridge.peft.dora import DoRA
    from megatron.bridge.peft.lora import LoRA
    from transformers import AutoConfig

    from megaboa.bridge import convert, tuning
    from megaboa.errors import InputError

    found = []
    with convert.process_groups("cpu"):
        for name, (config, lists) in models.items():
            bridge = AutoBridge.from_hf_config(AutoConfig.for_model(**config, vocab_size=256))
            for targets in lists:
                for kind in (LoRA, DoRA):
                    provider = convert.provider_of(bridge, load_weights=False)
                    provider.finalize()
                    peft = kind(target_modules=targets, dim=4, alpha=8)
                    model = peft(provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True))
                    try:
                        tuning.require_adapters(peft, model)
                        said = None
                    except InputError as error:
                        said = str(error)
                    trained = sum(one.numel() for one in model[0].parameters() if one.requires_grad)
                    found.append((name, kind is DoRA, targets, trained, said))
    return found


def facts(name, targets, magnitudes=False):
    training = Training(adapter_rank=4, adapter_targets=tuple(targets), adapter_magnitudes=magnitudes)
    return Facts(model=Model(**MODELS[name][1]), training=training)


def test_parameters_are_counted_as_bridge_makes_them(made):
    assert sum(trained > 0 for *_, trained, _ in made) == 2 * 6
    for name, magnitudes, targets, trained, _ in made:
        assert adapters.of_model(facts(name, targets, magnitudes)) == trained, (name, targets)


def test_what_bridge_only_warns_of_is_an_error_in_the_plan_and_in_training(made):
    for name, _, targets, _, said in made:
        broken = adapters.targets_name_layers(facts(name, targets))
        assert (broken is None) == (said is None), (name, targets)
        assert said is None or "matches no layer of this model" in said
    assert {targets[0] for *_, targets, _, said in made if said} == {
        "linear_*",
        "q_proj",
        "linear_qkv",
        "linear_q_proj",
    }


def test_numbers_of_layers_are_refused_with_a_pipeline():
    one = facts("dense", ["*.layers.0.*.linear_qkv"])
    two = dataclasses.replace(one, layout=dataclasses.replace(one.layout, pp=2, world_size=2))
    found = [{broken.rule for broken in table.check(asked) if broken.key == adapters.KEY} for asked in (one, two)]
    assert found == [set(), {"numbered_targets_are_of_one_stage"}]
