"""Fine-tuned experts on one GPU and on two, however they share them, learn what they learn on the CPU."""

from pathlib import Path

import pytest
import yaml
from gpu_runs import FP32, STEPS, assert_same_losses, done, losses, on_two_gpus

pytestmark = on_two_gpus

SFT = Path(__file__).parents[3] / "config" / "experiments" / "sft.yaml"
TWO = {"resources.gpus_per_node": 2}
RUNS = {"one": {}, "dp2": TWO, "ep2": {**TWO, "parallel.ep": 2}, "pp2": {**TWO, "parallel.pp": 2}}
RUNS["tp2-sp"] = {**TWO, "parallel.tp": 2, "parallel.sp": True}
EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "router_aux_loss_coef": 0.1,
}  # fmt: skip


def configuration(workspace, name="tuned-experts", device="cuda", runs=tuple(RUNS)):
    content = yaml.safe_load(SFT.read_text())
    content |= {"experiment": name, "device": device, "sweep": {"runs": {run: RUNS[run] for run in runs}}}
    content["models"]["tiny"]["config"] |= EXPERTS
    content["training"] |= {"train_iters": STEPS}
    del content["export"], content["report"]
    path = workspace.path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def on_the_cpu(workspace):
    done(workspace, configuration(workspace, "tuned-experts-reference", "cpu", ["one"]), "pretrain")
    done(workspace, configuration(workspace), "pretrain")
    return losses(workspace, "tuned-experts-reference", "one")


@pytest.mark.parametrize("run", RUNS)
def test_fine_tuned_experts_give_the_losses_of_the_cpu(workspace, on_the_cpu, run):
    assert_same_losses(losses(workspace, "tuned-experts", run), on_the_cpu, FP32)
