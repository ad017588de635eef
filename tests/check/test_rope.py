"""Rotary positions that Bridge's converters lose: which settings are named, and what stays allowed.

The slow test compares the table with the installed Bridge: angles of transformers' models with those of Megatron's.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from megaboa.check import rope

CONFIGS = json.loads((Path(__file__).parents[1] / "fixtures" / "hf_configs.json").read_text())
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}


def lost(family, part=None, name="rope_parameters", **more):
    found = rope.lost({"model_type": family, **({name: part} if part else {}), **more})
    return found and ".".join(found.keys)


@pytest.mark.parametrize("name", [name for name in CONFIGS if CONFIGS[name]["model_type"] != "step3p5"])
def test_published_configs_lose_nothing(name):
    assert rope.lost(CONFIGS[name]) is None


def test_published_settings_of_yarn_are_among_them():
    kinds = {
        config["model_type"] for config in CONFIGS.values() if "yarn" in {*config.get("rope_scaling", {}).values()}
    }
    assert kinds >= {"deepseek_v2", "deepseek_v3", "gpt_oss", "qwen2"}


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_both_names_of_the_settings_and_both_of_the_type(name):
    assert lost("qwen3", {"rope_type": "linear", "factor": 2.0}, name) == f"{name}.rope_type"
    assert lost("qwen3", {"type": "linear", "factor": 2.0}, name) == f"{name}.type"
    assert lost("llama", {"type": "linear", "factor": 2.0}, name) is None


def test_a_message_names_value_family_and_remedy():
    found = rope.lost({"model_type": "qwen3", "rope_scaling": {"rope_type": "longrope", "factor": 2.0}})
    assert str(found) == (
        "rope_scaling.rope_type: 'longrope' is lost: Bridge's converter of qwen3 knows only default, yarn. Change it "
        "in a copy of the config, if the weights may be used that way, or name a recipe instead"
    )


def test_scaling_by_one_is_no_scaling():
    assert lost("qwen3", {"rope_type": "linear", "factor": 1.0}) is None
    assert lost("qwen3", {"rope_type": "llama3", **LLAMA3, "factor": 1}) is None
    assert lost("gemma3_text", {"rope_type": "linear", "factor": 1}, "rope_scaling") is None
    assert lost("glm4_moe", {**YARN, "factor": 1.0}) == "rope_parameters.rope_type"  # Bridge would turn whole heads


@pytest.mark.parametrize("family", ["exaone_moe", "gemma3_text"])
def test_a_factor_left_over_would_scale(family):
    assert lost(family, {"rope_type": "default", "factor": 8.0}) == "rope_parameters.factor"
    assert lost(family, {"factor": 8.0}, "rope_scaling") == "rope_scaling.factor"
    assert lost(family, {"rope_type": "default", "factor": 1.0}) is None
    assert lost("qwen3", {"rope_type": "default", "factor": 8.0}) is None
    sliding = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default", "factor": 8.0}}
    assert lost("gemma3_text", sliding) is None


@pytest.mark.parametrize(
    ("family", "usual"), [("glm4_moe", 0.5), ("minimax_m2", 1.0), ("nemotron", 0.5), ("qwen3_next", 0.25)]
)
def test_a_part_of_heads_is_known_outside_of_the_settings_alone(family, usual):
    key = "rope_parameters.partial_rotary_factor"
    assert lost(family, {"partial_rotary_factor": usual}) is lost(family) is None
    assert lost(family, {"partial_rotary_factor": 0.75}) == key
    assert lost(family, {"partial_rotary_factor": 0.75}, partial_rotary_factor=0.75) is None
    assert lost(family, {"partial_rotary_factor": 0.75}, partial_rotary_factor=0.5) == key
    assert lost(family, partial_rotary_factor=0.75) is None
    assert lost(family, {"rope_type": "dynamic", "factor": 4.0}, partial_rotary_factor=0.75) is None


def test_a_message_about_a_part_of_heads_names_what_both_turn():
    found = rope.lost({"model_type": "qwen3_next", "rope_parameters": {"partial_rotary_factor": 0.5}})
    assert str(found) == (
        "rope_parameters.partial_rotary_factor: 0.5 makes transformers turn 0.5 of each head, and Megatron 0.25. Write "
        "it next to rope_parameters, too, in a copy of the config"
    )


def test_families_whose_part_of_heads_differs_otherwise():
    assert lost("glm4_moe_lite", {"partial_rotary_factor": 0.5}) == "rope_parameters.partial_rotary_factor"
    assert lost("glm4_moe_lite", partial_rotary_factor=0.5) == "partial_rotary_factor"  # latent heads turn whole
    assert lost("qwen3", {"partial_rotary_factor": 0.5}) is None  # nobody reads it
    assert lost("qwen3", partial_rotary_factor=0.5) == "partial_rotary_factor"  # only Bridge reads it
    assert lost("qwen3_5_text", {"partial_rotary_factor": 0.5}) is None
    assert lost("minimax_m2", rotary_dim=64, head_dim=128) == "rotary_dim"  # as published: transformers 5 drops it
    assert lost("minimax_m2", rotary_dim=64, head_dim=128, partial_rotary_factor=0.5) is None


def test_what_llama_has_of_its_own_scaling():
    assert lost("llama", LLAMA3) is None
    assert lost("llama", {**LLAMA3, "factor": 32.0}) is None
    assert lost("llama", {**LLAMA3, "low_freq_factor": 2.0}) == "rope_parameters.low_freq_factor"
    short = {**LLAMA3, "original_max_position_embeddings": 128}
    assert lost("exaone4", short) == "rope_parameters.original_max_position_embeddings"
    missing = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    assert lost("llama", missing, max_position_embeddings=8192) is None  # transformers' default for it
    assert lost("llama", missing, max_position_embeddings=512) == "rope_parameters.original_max_position_embeddings"


def test_yarn_needs_none_of_the_keys_that_have_defaults():
    assert lost("qwen3", YARN) is None
    assert lost("qwen3", {**YARN, "truncate": False}) is None
    assert lost("deepseek_v3", {**YARN, "truncate": False}) == "rope_parameters.truncate"
    assert lost("mistral", YARN) == "rope_parameters.rope_type"


def test_yarns_scale_of_attention():
    usual = 0.1 * math.log(4) + 1
    assert lost("qwen3", {**YARN, "attention_factor": usual}) is None
    assert lost("qwen3", {**YARN, "attention_factor": 1.0}) == "rope_parameters.attention_factor"
    both = {"mscale": 0.7, "mscale_all_dim": 0.7}
    assert lost("qwen3", {**YARN, **both}) is lost("deepseek_v2", {**YARN, **both}) is None
    assert lost("qwen3", {**YARN, "mscale": 0.7}) is None
    assert lost("deepseek_v2", {**YARN, "mscale": 0.7}) == "rope_parameters.mscale"
    assert lost("deepseek_v2", {**YARN, "mscale_all_dim": 0.7}) == "rope_parameters.mscale_all_dim"


def test_gpt_oss_has_its_own_yarn_whatever_the_config_says():
    assert lost("gpt_oss") is lost("gpt_oss", rope.OF_GPT_OSS) is None
    assert lost("gpt_oss", {"rope_type": "default"}) == "rope_parameters.rope_type"
    assert lost("gpt_oss", {**rope.OF_GPT_OSS, "factor": 16.0}) == "rope_parameters.factor"
    missing = {key: value for key, value in rope.OF_GPT_OSS.items() if key != "truncate"}
    assert lost("gpt_oss", missing) == "rope_parameters.truncate"  # transformers' default is another one


def test_layers_of_two_types():
    linear = {"rope_type": "linear", "factor": 8.0}
    assert lost("gemma3_text", {"full_attention": linear, "sliding_attention": {"rope_type": "default"}}) is None
    assert lost("gemma3_text", linear, "rope_scaling") is None
    found = lost("gemma3_text", {"full_attention": {"rope_type": "default"}, "sliding_attention": linear})
    assert found == "rope_parameters.sliding_attention.rope_type"


def test_other_values_that_converters_have():
    assert lost("ernie4_5_moe", rope_theta=500000.0) is None
    assert lost("ernie4_5_moe", rope_theta=10000.0) == "rope_theta"
    assert lost("ernie4_5_moe", {"rope_theta": 10000.0}) == "rope_parameters.rope_theta"
    assert lost("llama", {"rope_type": "linear", "factor": 2.0}, partial_rotary_factor=0.5) == "partial_rotary_factor"
    assert lost("llama", partial_rotary_factor=0.5) is None  # transformers doesn't read it either


def test_dynamic_positions_are_plain_up_to_the_models_length():
    dynamic = {"model_type": "qwen3", "max_position_embeddings": 128}
    dynamic["rope_parameters"] = {"rope_type": "dynamic", "factor": 4.0}
    assert rope.lost(dynamic) is None and rope.longest_plain(dynamic) == 128
    assert rope.longest_plain({"model_type": "qwen3", "max_position_embeddings": 128}) is None
    assert lost("exaone_moe", {"rope_type": "dynamic", "factor": 4.0}) == "rope_parameters.rope_type"
    assert rope.longest_plain({"model_type": "qwen2_5_vl", "text_config": dynamic}) == 128


@pytest.mark.slow
def test_the_table_is_true_of_the_installed_bridge():
    done = subprocess.run([sys.executable, Path(__file__).with_name("rope_angles.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 500
    refused = {name for name, one in found.items() if one["lost"]}
    right = {name for name, one in found.items() if one["same"]}
    right -= {name for name in refused if name.endswith("yarn by one")}  # refused where YaRN is, right or not
    assert sorted(found.keys() - refused) == sorted(right)
