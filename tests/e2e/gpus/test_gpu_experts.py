"""Experts on one GPU and on two give the losses of the CPU, and are exported and proved."""

import pytest
from gpu_runs import (
    FP32,
    FP32_RUN,
    TWO,
    assert_conversions_are_proved,
    assert_same_losses,
    done,
    experiment,
    losses,
    on_two_gpus,
)

pytestmark = on_two_gpus

RUNS = {"ep1": f"{{{FP32_RUN}}}", "ep2": f"{{{FP32_RUN}, {TWO}, parallel.ep: 2}}"}
MODEL = "model_type: qwen3_moe, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32,"


def configuration(workspace):
    return experiment(workspace, "experts", RUNS, model=MODEL, proved=("ep2",))


@pytest.fixture(scope="module")
def on_the_cpu(workspace):
    reference = experiment(workspace, "experts-reference", {"ep1": RUNS["ep1"]}, device="cpu", model=MODEL)
    done(workspace, reference, "pretrain")
    done(workspace, configuration(workspace), "pretrain", "export")
    return losses(workspace, "experts-reference", "ep1")


@pytest.mark.parametrize("run", RUNS)
def test_experts_give_the_losses_of_the_cpu(workspace, on_the_cpu, run):
    assert_same_losses(losses(workspace, "experts", run), on_the_cpu, FP32)


def test_what_goes_in_and_comes_out_is_proved(workspace, on_the_cpu):
    assert_conversions_are_proved(workspace, "experts", ("ep2",))
