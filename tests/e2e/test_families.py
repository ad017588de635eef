"""Families of models through the whole chain: the experiment that docs/huggingface.md shows."""

import pytest

pytestmark = pytest.mark.slow

CONFIG = "config/experiments/families.yaml"
FAMILIES = {"llama", "qwen2", "qwen3-moe", "deepseek-v2", "deepseek-v3", "gemma", "gpt-oss", "mistral", "nemotron"}


@pytest.fixture(scope="module")
def done(workspace):
    workspace.snakemake("--configfile", CONFIG, timeout=1800)
    return workspace


def test_every_family_goes_in_and_comes_out_unharmed(done):
    found = done.json("families", "report", "checks.json")
    assert found["state"] == "PASS"
    assert {check["subject"] for check in found["checks"] if check["kind"] == "export"} == FAMILIES
    assert {check["subject"] for check in found["checks"] if check["kind"] == "import"} == FAMILIES


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_its_proofs_leave_nothing_out(done, family):
    imported = {check["name"] for check in done.json("families", "models", family, "proof.json")["checks"]}
    exported = {check["name"] for check in done.json("families", "runs", family, "proof.json")["checks"]}
    assert {"vocabulary", "head", "Megatron parameters", "tensors", "round trip", "logits"} <= imported
    assert {"second export", "read back", "logits", "validation loss"} <= exported
    moe = family in ("qwen3-moe", "deepseek-v2", "deepseek-v3", "gpt-oss")
    assert ("experts" in imported) == ("experts" in exported) == moe
