"""Every layout of a dense model on GPUs gives the losses of the CPU, and is exported and proved."""

import pytest
from gpu_runs import (
    BF16,
    BF16_RUN,
    FP32,
    FP32_RUN,
    GRAPH_RUN,
    TWO,
    assert_conversions_are_proved,
    assert_same_losses,
    done,
    experiment,
    losses,
    on_two_gpus,
)

pytestmark = on_two_gpus

UNFUSED = "overrides.model.bias_activation_fusion: false"
RUNS = {
    "one": f"{{{FP32_RUN}}}",
    "dp2": f"{{{FP32_RUN}, {TWO}}}",
    "tp2": f"{{{FP32_RUN}, {TWO}, parallel.tp: 2}}",
    "tp2-sp": f"{{{FP32_RUN}, {TWO}, parallel.tp: 2, parallel.sp: true}}",
    "pp2": f"{{{FP32_RUN}, {TWO}, parallel.pp: 2}}",
    "bf16": f"{{{BF16_RUN}}}",
    "cp2": f"{{{BF16_RUN}, {TWO}, parallel.cp: 2}}",  # no attention in fp32 can be cut along the sequence
    "graph": f"{{{BF16_RUN}, {GRAPH_RUN}}}",
    # Weights are gathered during the forward pass, from the second step on.
    "te-activation": f"{{{BF16_RUN}, {TWO}, {UNFUSED}, overrides.model.use_te_activation_func: true}}",
    "te-joined": f"{{{BF16_RUN}, {TWO}, {UNFUSED}, overrides.model.use_transformer_engine_op_fuser: true}}",
}
PROVED = ("one", "tp2-sp", "pp2")


def configuration(workspace):
    return experiment(workspace, "dense", RUNS, proved=PROVED)


@pytest.fixture(scope="module")
def on_the_cpu(workspace):
    """Losses of one run on the CPU, beside which all runs on GPUs have been made."""
    done(workspace, experiment(workspace, "reference", {"one": RUNS["one"]}, device="cpu"), "pretrain")
    done(workspace, configuration(workspace), "pretrain", "export")
    return losses(workspace, "reference", "one")


@pytest.mark.parametrize("run", RUNS)
def test_a_layout_gives_the_losses_of_the_cpu(workspace, on_the_cpu, run):
    assert_same_losses(losses(workspace, "dense", run), on_the_cpu, BF16 if BF16_RUN in RUNS[run] else FP32)


def test_what_goes_in_and_comes_out_is_proved(workspace, on_the_cpu):
    assert_conversions_are_proved(workspace, "dense", PROVED)
