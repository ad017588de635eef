"""Experiments that are shipped, built and played by the real Bridge without a GPU.

`MEGABOA_WRITE_EXPERIMENTS=1` takes all runs and writes docs/experiments.md; without, a sample is held against it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import experiments_page
import pytest

pytestmark = pytest.mark.slow

WRITTEN = os.environ.get("MEGABOA_WRITE_EXPERIMENTS") == "1"
SAMPLE = (
    "gpt3/gpt-857m,gpt2-xl",
    "gpt3-h100/gpt3-2.7b,gpt3-70b,gpt3-1t",
    "deepseek-v2-lite",
    "llama3/llama3-8b-32k,llama3-70b-fp8",
    "moe",
    "fsdp/no-shard,optim",
    "few-layers-4xh200/gpt3-175b,llama3-70b,qwen3-30b-a3b,mixtral-8x7b,deepseek-v2-lite,fsdp-optim-grads-params",
)
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
DISPATCHERS = {  # by the recipe's argument
    "null": {"model.moe_token_dispatcher_type": "alltoall", "model.moe_shared_expert_overlap": True},
    "deepep": {
        "model.moe_token_dispatcher_type": "flex",
        "model.moe_flex_dispatcher_backend": "deepep",
        "model.moe_shared_expert_overlap": False,
    },
}


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    names = experiments_page.NAMES if WRITTEN else SAMPLE
    command = [sys.executable, Path(__file__).with_name("shipped_experiments.py"), tmp_path_factory.mktemp("shipped")]
    done = subprocess.run([*command, *names], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def runs(answer):
    return [row for rows in answer["experiments"].values() for row in rows]


def test_bridge_accepts_every_run(answer):
    assert {row["run"]: row["why"] for row in runs(answer) if row["state"] != "PASS"} == {}


def test_every_run_fits_its_gpus_by_prediction(answer):
    assert all(row["memory_gib"] <= row["limit_gib"] for row in runs(answer))


def test_parameters_are_those_that_the_experiment_states(answer):
    stated = [row for row in runs(answer) if row["stated_params"]]
    assert len(stated) >= 5
    assert {row["run"]: row["params"] for row in stated} == {row["run"]: row["stated_params"] for row in stated}


@pytest.mark.parametrize("kind", DISPATCHERS)
def test_deepseek_v2_lite_is_what_was_asked_for(answer, kind):
    wanted = {**DEEPSEEK, **DISPATCHERS[kind]}
    assert {field: answer["deepseek"][kind][field] for field in wanted} == wanted


def test_the_recipe_of_deepseek_v2_lite_takes_these_arguments(answer):
    assert answer["deepseek"]["arguments"] == {"hf_path": None, "moe_token_dispatcher_type": None}


def test_the_page_says_the_same(answer):
    if WRITTEN:
        experiments_page.write(answer["experiments"])
    page = experiments_page.PAGE.read_text(encoding="utf-8")
    for name, rows in answer["experiments"].items():
        for row in rows:
            assert experiments_page.line(row) in page, name
