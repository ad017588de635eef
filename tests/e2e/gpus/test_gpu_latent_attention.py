"""Latent attention of one GPU and of two, which share its heads, gives the losses of the CPU."""

import pytest
from clone import edit
from gpu_runs import FP32, FP32_RUN, TWO, assert_same_losses, done, experiment, losses, on_two_gpus

pytestmark = on_two_gpus

RUNS = {
    "one": f"{{{FP32_RUN}}}",
    "tp2-sp": f"{{{FP32_RUN}, {TWO}, parallel.tp: 2, parallel.sp: true}}",  # tp needs it with experts
}
MODEL = (
    "model_type: deepseek_v2, q_lora_rank: 16, kv_lora_rank: 16, qk_rope_head_dim: 8, qk_nope_head_dim: 8, "
    "v_head_dim: 8, moe_intermediate_size: 16, n_routed_experts: 4, n_shared_experts: 1, num_experts_per_tok: 2, "
    "first_k_dense_replace: 1,"
)


def configuration(workspace, name, runs, **changes):
    config = experiment(workspace, name, runs, model=MODEL, **changes)
    edit(config, "num_key_value_heads: 2", "num_key_value_heads: 4")
    return config


@pytest.fixture(scope="module")
def on_the_cpu(workspace):
    reference = configuration(workspace, "latent-reference", {"one": RUNS["one"]}, device="cpu")
    done(workspace, reference, "pretrain")
    done(workspace, configuration(workspace, "latent", RUNS), "pretrain")
    return losses(workspace, "latent-reference", "one")


@pytest.mark.parametrize("run", RUNS)
def test_latent_attention_gives_the_losses_of_the_cpu(workspace, on_the_cpu, run):
    assert_same_losses(losses(workspace, "latent", run), on_the_cpu, FP32)
