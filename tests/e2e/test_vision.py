"""The shipped vision-language experiment: import, three layouts, export, proofs with images; killed and resumed."""

import os
import signal

import pytest
from clone import REPOSITORY, edit, kill_group
from safetensors.numpy import load_file

from megaboa.files import read_jsonl

pytestmark = pytest.mark.slow

SHIPPED = "qwen2.5-vl"
STEPS, SAVE_INTERVAL, KILLED_AT = 30, 10, 13


@pytest.fixture(scope="module")
def shipped(workspace):
    output = workspace.snakemake("--configfile", f"config/experiments/{SHIPPED}.yaml")
    return workspace, output


def test_its_layouts_agree_and_its_export_is_transformers_model(shipped):
    workspace, output = shipped
    assert "PASS: all 20 checks; all 3 runs" in output
    for proof in (("models", "vlm", "proof.json"), ("runs", "dp1", "proof.json")):
        found = {one["name"]: one for one in workspace.json(SHIPPED, *proof)["checks"]}
        assert found["logits"]["state"] == "PASS" and "2 images" in found["logits"]["detail"]
        assert found["Megatron parameters"]["state"] == "PASS"


def test_its_tower_is_trained_with_its_decoder(shipped):
    workspace, _ = shipped
    curve = [float.fromhex(loss) for _, loss, _ in workspace.steps(SHIPPED, "dp1")]
    # Bridge's count of operations leaves the tower out: no TFLOP/s is better than a wrong one.
    assert '"flops_per_token": null' in next(workspace.store(SHIPPED, "dp1").glob("attempts/*/steps.jsonl")).read_text()
    assert len(curve) == STEPS and curve[-1] < 0.7 * curve[0]
    before, after = (
        tensors(workspace.path / workspace.json(SHIPPED, *manifest)["path"])
        for manifest in (("models", "vlm", "source.json"), ("runs", "dp1", "export.json"))
    )
    seeing = [name for name in before if "visual" in name]
    assert set(after) == set(before) and len(seeing) > 20
    assert [name for name in seeing if (before[name] == after[name]).all()] == []


def tensors(folder):
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def test_a_killed_run_goes_on_to_the_same_bits(shipped):
    workspace, _ = shipped
    config = workspace.path / "killed-vlm.yaml"
    config.write_text((REPOSITORY / "config" / "experiments" / f"{SHIPPED}.yaml").read_text())
    edit(config, f"experiment: {SHIPPED}", "experiment: killed-vlm\nrecovery: {backoff_seconds: 0}")
    edit(config, "device: auto", "device: cpu")
    process = workspace.start("results/killed-vlm/runs/dp1/train.json", "--configfile", config)
    try:
        (rank,) = workspace.wait_for_step("killed-vlm", "dp1", KILLED_AT)
        os.kill(rank, signal.SIGKILL)
        output = process.communicate(timeout=240)[0]
    finally:
        kill_group(process)
    assert process.returncode == 0, output
    entries = read_jsonl(workspace.store("killed-vlm", "dp1") / "attempts.jsonl")
    starts = [entry["resumed_from"] for entry in entries if entry["event"] == "start"]
    assert starts[0] == 0 and len(starts) == 2 and starts[1] in (SAVE_INTERVAL, 2 * SAVE_INTERVAL)
    assert workspace.steps("killed-vlm", "dp1") == workspace.steps(SHIPPED, "dp1")
