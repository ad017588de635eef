"""megaboa.bridge_recipes: Bridge's recipes by their names, read from its sources without importing it."""

import subprocess
import sys

import pytest

from megaboa import bridge_recipes
from megaboa.__main__ import main
from megaboa.bridge_recipes import Purpose, functions, performance, problem, purpose, tuned_for

BOTH = "qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config"  # there are two recipes of this name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("llama3_8b_pretrain_8gpu_h100_fp8cs_config", Purpose("llama3_8b", "pretrain", 8, "h100", "fp8cs")),
        (
            "perf_recipes.deepseek_v3_pretrain_256gpu_gb200_fp8mx_large_scale_config",
            Purpose("deepseek_v3", "pretrain", 256, "gb200", "fp8mx", "large_scale"),
        ),
        ("llama3_70b_peft_8gpu_b200_bf16_config", Purpose("llama3_70b", "peft", 8, "b200", "bf16")),
        ("llama32_1b_pretrain_config", None),
        ("recipes/gpt_tiny.py", None),
    ],
)
def test_a_name_says_what_a_recipe_is_for(name, meant):
    assert purpose(name) == meant


def test_every_performance_recipe_says_so_and_has_a_description():
    found = functions("perf_recipes")
    assert len(found) > 400 and all(purpose(name) and one.text for name, one in found.items())
    assert {purpose(name).precision for name in found} <= set(bridge_recipes.PRECISIONS)


def test_a_name_of_both_kinds_means_the_recipe_to_train_with():
    assert BOTH in functions("recipes") and BOTH in functions("perf_recipes")
    assert performance(BOTH) is None
    assert performance(f"perf_recipes.{BOTH}").module == "qwen.h100.qwen3_moe"
    name = "llama3_8b_pretrain_8gpu_h100_bf16_config"
    assert performance(name) == performance(f"perf_recipes.{name}") is not None
    assert tuned_for(name) == ("h100", 8) and tuned_for(BOTH) is tuned_for(None) is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("perf_recipes.llama3_8b_pretrain_8gpu_h100_fp8_config", "it has llama3_8b_pretrain_8gpu_h100_fp8cs_config"),
        ("llama3_70b_peft_8gpu_b200_bf16_config", "fine-tunes (peft): only pretraining"),
        (
            "wan_14b_pretrain_32gpu_h100_bf16_config",
            "(wan): diffusion (diffusion) is not a kind that is trained",
        ),
        (
            "qwen35_vl_35b_a3b_pretrain_8gpu_gb200_bf16_config",
            "(qwen_vl): other-vlm (vision and language, of another family",
        ),
        ("flux_12b_pretrain_2gpu_h100_bf16_config", "(flux): diffusion (diffusion) is not a kind"),
    ],
)
def test_what_can_not_be_trained_is_refused(name, says):
    assert says in problem(name)


def test_a_recipe_is_known_by_its_older_name_too():
    assert problem("llama32_1b_pretrain_config") is problem("deepseek_v3_pretrain_config_32nodes") is None
    assert bridge_recipes.named("gemma4_e4b_pretrain_config").family == "gemma"
    assert "(qwen_vl): other-vlm" in problem("qwen35_vl_9b_pretrain_mock_config")


def test_names_are_left_to_a_bridge_that_is_elsewhere(monkeypatch):
    """Of a host without Bridge."""
    for known in (functions, bridge_recipes._aliases):
        known.cache_clear()
    monkeypatch.setattr(bridge_recipes, "_folder", lambda kind: None)
    assert problem("a_recipe_of_a_later_bridge") is problem("perf_recipes.another") is None
    for known in (functions, bridge_recipes._aliases):
        known.cache_clear()


def test_bridge_is_not_imported():
    code = "import sys; from megaboa import bridge_recipes as b; b.functions('recipes'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_recipes_are_listed_by_words(capsys):
    assert main(["recipes", "llama3_8b", "8gpu_h100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Performance recipes (2)"
    said = "llama3_8b_pretrain_8gpu_h100_bf16_config 8 H100, BF16 Llama3 8B pretrain: 8× H100, BF16, CP=2."
    assert " ".join(lines[1].split()) == said
    assert main(["recipes", "perf_recipes."]) == 0
    assert f"  perf_recipes.{BOTH} " in capsys.readouterr().out


def test_all_recipes_are_listed_and_a_word_of_none_is_told(capsys):
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert "Performance recipes (334)" in listed and "Recipes to train with (93)" in listed
    assert "_sft_" not in listed and "_vl_" not in listed
    assert main(["recipes", "llama9"]) == 1
    assert "no recipe has llama9 in its line" in capsys.readouterr().err
