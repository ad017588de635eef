"""Bridge's performance recipes: each can be built by its name, and is what its name says."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from megaboa.bridge_recipes import precision_of, purpose


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    command = [sys.executable, Path(__file__).with_name("performance_recipes.py"), tmp_path_factory.mktemp("hub")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_recipe_can_be_built(recipes):
    """Five read te_quant.cfg, which Bridge's wheel leaves out: they can be built from its sources, as in its image."""
    broken = {name: one["error"] for name, one in recipes.items() if "error" in one}
    assert len(recipes) == 334 and all("te_quant.cfg" in error for error in broken.values())
    assert {purpose(name).model for name in broken} == {"nemotron_3_super"} and len(broken) == 5


def test_gpus_and_precision_are_those_of_the_name(recipes):
    built = {name: one for name, one in recipes.items() if "error" not in one}
    assert not {name for name, one in built.items() if purpose(name).gpus % math.lcm(*one["ranks"])}
    assert not {name for name, one in built.items() if one["precision"] != precision_of(name)}


def test_each_brings_its_environment_and_bf16_has_its_optimizer(recipes):
    """The second is what Bridge's launchers set outside of the recipe."""
    built = {name: one for name, one in recipes.items() if "error" not in one}
    assert all(str(one["environment"]["TORCH_NCCL_HIGH_PRIORITY"]) == "1" for one in built.values())
    adam = {name: one for name, one in built.items() if one["optimizer"][0] == "adam"}
    assert all(one["optimizer"][1] for name, one in adam.items() if purpose(name).precision == "bf16")
