"""Experiments that are shipped, built and played by the real Bridge without a GPU.

`MEGABOA_WRITE_EXPERIMENTS=1` writes docs/reference/experiments.md; without, the page must say the same.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import experiments_page
import pytest

pytestmark = pytest.mark.slow

DEEPSEEK = {
    "model.tensor_model_parallel_size": 8,
    "model.pipeline_model_parallel_size": 1,
    "model.expert_model_parallel_size": 2,
    "model.sequence_parallel": True,
    "model.seq_length": 4096,
    "dataset.seq_length": 4096,
    "train.train_iters": 500,
    "train.global_batch_size": 64,
    "train.micro_batch_size": 1,
    "validation.eval_interval": 100,
    "scheduler.lr_warmup_iters": 50,
    "checkpoint.save_interval": 0,
    "model.moe_permute_fusion": False,
    "model.num_layers": 27,
    "model.num_moe_experts": 64,
}
SET_BY_RECIPES = {
    "deepseek": {
        **DEEPSEEK,
        "model.moe_token_dispatcher_type": "alltoall",
        "model.moe_shared_expert_overlap": True,
    },
    "deepseek, deepep": {
        **DEEPSEEK,
        "model.moe_token_dispatcher_type": "flex",
        "model.moe_flex_dispatcher_backend": "deepep",
        "model.moe_shared_expert_overlap": False,
    },
    "gpt3": {
        "model.num_layers": 32,
        "model.hidden_size": 2560,
        "model.num_attention_heads": 32,
        "model.seq_length": 2048,
        "train.global_batch_size": 32,
        "train.micro_batch_size": 4,
        "optimizer.lr": 1.5e-4,
        "optimizer.min_lr": 1e-5,
        "scheduler.lr_decay_style": "cosine",
        "scheduler.lr_warmup_iters": 2000,
    },
}


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    command = [sys.executable, Path(__file__).with_name("shipped_experiments.py"), tmp_path_factory.mktemp("shipped")]
    done = subprocess.run(
        [*command, *experiments_page.NAMES], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def runs(answer):
    return [row for rows in answer["experiments"].values() for row in rows]


def test_bridge_accepts_every_run(answer):
    assert {row["run"]: row["why"] for row in runs(answer) if row["state"] != "PASS"} == {}


def test_every_run_fits_its_gpus_by_prediction(answer):
    """Some of NVIDIA's don't, and state no GPU, though they were measured on it."""
    assert all(row["memory_gib"] <= row["limit_gib"] for row in runs(answer) if row.get("limit_gib"))
    without = {
        (name, row["run"]) for name, rows in answer["experiments"].items() for row in rows if not row.get("limit_gib")
    }
    assert {name for name, _ in without} <= set(experiments_page.PERFORMANCE)
    assert len({run for _, run in without}) == 8


def test_parameters_are_those_that_the_experiment_states(answer):
    stated = [row for row in runs(answer) if row["stated_params"]]
    assert len(stated) >= 13
    assert {row["run"]: row["params"] for row in stated} == {row["run"]: row["stated_params"] for row in stated}


@pytest.mark.parametrize("recipe", SET_BY_RECIPES)
def test_a_recipe_sets_what_its_document_says(answer, recipe):
    wanted = SET_BY_RECIPES[recipe]
    assert {field: answer["recipes"][recipe][field] for field in wanted} == wanted


def test_the_recipe_of_deepseek_v2_lite_takes_these_arguments(answer):
    assert answer["recipes"]["arguments"] == {"hf_path": None, "moe_token_dispatcher_type": None}


def test_the_page_says_the_same(answer):
    if os.environ.get("MEGABOA_WRITE_EXPERIMENTS") == "1":
        experiments_page.write(answer["experiments"])
    assert experiments_page.PAGE.read_text(encoding="utf-8") == experiments_page.text(answer["experiments"])
