"""Bridge's performance recipes: each can be built by its name, and is what its name says."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from megaboa.bridge_recipes import precision_of, purpose

# What is wrong with recipes of 0.6.2 themselves, by the rule that refuses them.
REFUSED = {
    "ranks_fill_the_expert_layout": 15,
    "warmup_ends_before_the_decay": 10,
    "te_quant.cfg": 5,
    "pipeline_layout_holds_the_model": 2,
    "batch_fills_the_ranks": 2,
    "full_graph_waits_for_no_message": 1,
    "recomputed_parts_are_there": 1,
}


def answer(*words):
    command = [sys.executable, Path(__file__).with_name("performance_recipes.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    return answer(tmp_path_factory.mktemp("hub"))


def test_every_recipe_can_be_built(recipes):
    """Five read te_quant.cfg, which Bridge's wheel leaves out: they can be built from its sources, as in its image."""
    broken = {name: one["error"] for name, one in recipes.items() if "error" in one}
    assert len(recipes) == 334 and all("te_quant.cfg" in error for error in broken.values())
    assert {purpose(name).model for name in broken} == {"nemotron_3_super"} and len(broken) == 5


def test_gpus_and_precision_are_those_of_the_name(recipes):
    """Fifteen have more ranks for experts than GPUs, and are refused by preflight."""
    built = {name: one for name, one in recipes.items() if "error" not in one}
    unlike = [purpose(name) for name, one in built.items() if purpose(name).gpus % math.lcm(*one["ranks"])]
    assert len(unlike) == 15
    assert {(one.model, one.gpus, one.gpu) for one in unlike} == {
        ("deepseek_v3", 64, "h100"),
        ("deepseek_v3", 128, "vr200"),
        ("qwen3_235b_a22b", 64, "gb200"),
        ("qwen3_235b_a22b", 64, "gb300"),
    }
    assert not {name for name, one in built.items() if one["precision"] != precision_of(name)}


def test_each_brings_its_environment_and_bf16_has_its_optimizer(recipes):
    """The second is what Bridge's launchers set outside of the recipe."""
    built = {name: one for name, one in recipes.items() if "error" not in one}
    assert all(str(one["environment"]["TORCH_NCCL_HIGH_PRIORITY"]) == "1" for one in built.values())
    adam = {name: one for name, one in built.items() if one["optimizer"][0] == "adam"}
    assert all(one["optimizer"][1] for name, one in adam.items() if purpose(name).precision == "bf16")


@pytest.mark.slow
def test_preflight_refuses_those_alone_that_are_wrong(tmp_path):
    """Each as it ships, on the GPUs of its name."""
    found = answer(tmp_path, "--preflight")
    refused = [
        row["why"] for row in found.values() if row["result"] != "PASS" and not row["result"].startswith("needs ")
    ]
    other = [why for why in refused if not any(rule in why for rule in REFUSED)]
    assert {rule: sum(rule in why for why in refused) for rule in REFUSED} == REFUSED and not other
