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

    from megaboa.bridge import convert, finetuning
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
                        finetuning.require_adapters(peft, model)
                        said = None
                    except InputError as error:
                        said = str(error)
                    trained = sum(one.numel() for one in model[0].parameters() if one.requires_grad)
                    found.append((name, kind is DoRA, targets, trained, said))
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """By model and task: how far exported weights are from base and exported adapters; and of checkpoints with other
    adapters what is said."""
    [found] = on_cpu(_export, str(tmp_path_factory.mktemp("adapters")))
    return found


CHOSEN = {
    "dense": ["linear_qkv", "linear_fc1"],
    "latent": ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj"],
}


def _export(root):
    from pathlib import Path

    import torch
    from megatron.bridge import AutoBridge
    from megatron.bridge.peft.dora import DoRA
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training.checkpointing import (
        _generate_model_state_dict,
        apply_peft_adapter_filter_to_state_dict,
    )
    from megatron.core import dist_checkpointing
    from safetensors.torch import load_file
    from transformers import AutoConfig

    from megaboa.bridge import adapters, convert
    from megaboa.errors import InputError

    far, said = {}, {}
    with convert.process_groups("cpu"):
        for name, targets in CHOSEN.items():
            config = AutoConfig.for_model(**MODELS[name][0], vocab_size=256)
            bridge = AutoBridge.from_hf_config(config)
            for kind in (LoRA, DoRA):
                provider = convert.provider_of(bridge, load_weights=False)
                provider.finalize()
                base = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
                before = {one: tensor.clone() for one, tensor in convert.hf_tensors(bridge, base)}
                peft = kind(target_modules=targets, dim=4, alpha=8)
                model = peft(base)
                torch.manual_seed(1)
                with torch.no_grad():
                    for one, parameter in model[0].named_parameters():
                        if ".adapter." in one:  # magnitudes of both signs, as training may make them
                            parameter.copy_(torch.randn_like(parameter))
                folder = Path(root, name, kind.__name__)
                (folder / "checkpoint").mkdir(parents=True)
                state = apply_peft_adapter_filter_to_state_dict(_generate_model_state_dict(model, {}), peft)
                dist_checkpointing.save(state, str(folder / "checkpoint"))
                bridge.save_hf_adapter(model, folder, peft, "base", show_progress=False)
                rows = adapters.magnitudes(model)
                adapters.merge(model)
                if rows:
                    adapters.add_magnitudes(bridge, model, folder, rows)
                merged = dict(convert.hf_tensors(bridge, model))
                far[name, kind.__name__] = _distances(before, load_file(folder / adapters.WEIGHTS), merged)
        for case, (kind, targets) in {
            "fewer": (LoRA, ["linear_qkv"]),
            "more": (LoRA, ["linear_qkv", "linear_fc1", "linear_fc2"]),
            "other": (DoRA, CHOSEN["dense"]),
            "same": (LoRA, CHOSEN["dense"]),
        }.items():
            bridge = AutoBridge.from_hf_config(AutoConfig.for_model(**DENSE, vocab_size=256))
            provider = convert.provider_of(bridge, load_weights=False)
            provider.finalize()
            peft = kind(target_modules=targets, dim=4, alpha=8)
            model = peft(provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True))
            try:
                adapters.restore(model, peft, Path(root, "dense", "LoRA", "checkpoint"))
                said[case] = None
            except InputError as error:
                said[case] = str(error)
    return far, said


def _distances(before, found, merged):
    """Of every weight with an adapter: its difference from base and adapter. Others are the base's."""
    distances = {}
    for name, tensor in merged.items():
        module = f"base_model.model.{name.removesuffix('weight')}"
        if f"{module}lora_A.weight" not in found:
            assert tensor.equal(before[name]), name
            continue
        expected = before[name] + 2 * found[f"{module}lora_B.weight"] @ found[f"{module}lora_A.weight"]
        if (magnitude := found.get(f"{module}lora_magnitude_vector")) is not None:
            expected *= (magnitude / expected.norm(dim=1)).unsqueeze(1)
        distances[name] = ((expected - tensor).abs().max() / expected.abs().max()).item()
    return distances


@pytest.mark.parametrize("task", ["LoRA", "DoRA"])
@pytest.mark.parametrize(("name", "layers"), [("dense", 5), ("latent", 5)])
def test_exported_weights_are_the_base_with_the_exported_adapters(exported, name, layers, task):
    far = exported[0][name, task]
    assert len(far) == 2 * layers and max(far.values()) < 1e-6, far


def test_a_checkpoint_with_other_adapters_is_refused(exported):
    said = exported[1]
    assert said["same"] is None
    assert "has adapters that the model lacks: " in said["fewer"] and "linear_fc1.adapter." in said["fewer"]
    assert ": lacks " in said["more"] and "linear_fc2.adapter." in said["more"]
    assert ": lacks " in said["other"] and "magnitude" in said["other"]
    assert all(
        text.endswith("it is of a run with other tuning.targets or another task") for text in said.values() if text
    )


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
