"""Muon on a model with experts: one curve for data, expert and pipeline parallel ranks, after an interruption and for
what continues from it; a proof of its export; how many bytes of a checkpoint are its own, and Adam's. Tensor parallel
ranks: bridge/cpu/test_pretrain.py."""

import os
import signal
from collections import Counter
from math import prod

import pandas as pd
import pytest
from clone import edit
from torch.distributed.checkpoint import FileSystemReader

from megaboa.files import read_jsonl

pytestmark = pytest.mark.slow

TWO = "resources.gpus_per_node: 2"
STEPS, SAVE_INTERVAL, KILLED_AT = 30, 10, 13
RUNS = {
    "one": "{}",
    "ep2": f"{{{TWO}, parallel.ep: 2}}",
    "pp2": f"{{{TWO}, parallel.pp: 2}}",
    "rest": "{continue_from: muon/one@10}",
}
# In 16 bits, the default, the iterations that orthogonalize a matrix differ by 1e-4 after a few steps.
MORE = """\
optimizer: {name: muon}
parallel: {distributed_optimizer: false}
overrides: {optimizer.muon_fp32_matmul_prec: highest}
recovery: {backoff_seconds: 0}
export: {runs: [ep2]}
"""
EXPERTS = "num_experts: 4, num_experts_per_tok: 2, norm_topk_prob: true, moe_intermediate_size: 32"


@pytest.fixture(scope="module")
def trained(workspace):
    """All runs; a rank of `ep2` is killed after a checkpoint."""
    config = workspace.experiment("muon", RUNS, STEPS, SAVE_INTERVAL, MORE)
    edit(config, "model_type: qwen3,", f"model_type: qwen3_moe, {EXPERTS},")
    process = workspace.start("results/muon/runs/ep2/train.json", "--configfile", config)
    os.kill(workspace.wait_for_step("muon", "ep2", KILLED_AT)[1], signal.SIGKILL)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    workspace.snakemake("--configfile", config)
    return workspace


def losses(workspace, run):
    return {step: float.fromhex(loss) for step, loss, _ in workspace.steps("muon", run)}


def test_no_layout_and_no_interruption_changes_the_losses(trained):
    entries = read_jsonl(trained.store("muon", "ep2") / "attempts.jsonl")
    resumed = [entry["resumed_from"] for entry in entries if entry["event"] == "start"]
    assert len(resumed) == 2 and resumed[1] >= SAVE_INTERVAL
    alone = losses(trained, "one")
    assert list(alone) == list(range(1, STEPS + 1))
    for run in ("ep2", "pp2"):
        assert losses(trained, run) == pytest.approx(alone, abs=1e-5), run


def test_what_continues_from_a_run_goes_on_bit_for_bit(trained):
    assert trained.steps("muon", "rest") == trained.steps("muon", "one")[10:]


def test_the_export_is_proved(trained):
    proof = trained.json("muon", "runs", "ep2", "proof.json")
    assert proof["state"] == "PASS" and {"tensors", "logits", "read back"} <= {one["name"] for one in proof["checks"]}


def test_a_checkpoint_has_one_moment_of_matrices_as_the_plan_says(trained):
    """Of the embedding and the output layer, which Adam updates, there are two."""
    folder = trained.store("muon", "one") / "checkpoints" / f"iter_{STEPS:07}"
    held = Counter()
    for key, tensor in FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        if hasattr(tensor, "size"):
            kind = key.split(".")[2] if key.startswith("optimizer.state.") else "weights"
            held[kind] += prod(tensor.size) * tensor.properties.dtype.itemsize
    tables = 2 * 384 * 32 * 4
    norms = held["exp_avg"] - tables
    assert held["exp_avg"] == held["exp_avg_sq"] and 0 < norms < 0.02 * tables
    assert held["momentum_buffer"] == held["weights"] - tables - norms
    assert sorted(held) == ["exp_avg", "exp_avg_sq", "momentum_buffer", "weights"]
    plan = pd.read_csv(trained.results("muon", "preflight.tsv"), sep="\t", index_col="run")
    assert plan.checkpoint_bytes["one"] == pytest.approx(held.total() - norms, abs=100)
