"""Families of models through the whole chain, from weights and from scratch: what docs/how-to/huggingface.md shows."""

import pytest

pytestmark = pytest.mark.slow

CONFIG = "config/experiments/families.yaml"
FAMILIES = {"llama", "qwen2", "qwen3-moe", "deepseek-v2", "deepseek-v3", "gemma", "gpt-oss", "mistral", "nemotron"}


# Those that two ranks hold together where they are converted: tp2, pp2, tp2 with experts, ep2.
BY_RANKS = ("llama", "qwen2", "qwen3-moe", "deepseek-v2")
PROMPTS = "generate: {prompts: [import, 'def f('], tokens: 8}\n"
# The same experiment, but that every run starts from random weights.
SCRATCH = "experiment: scratch\nmodels:\n" + "".join(f"  {family}: {{init: scratch}}\n" for family in sorted(FAMILIES))


@pytest.fixture(scope="module")
def done(workspace):
    workspace.snakemake("--configfile", CONFIG, timeout=1800)
    return workspace


@pytest.fixture(scope="module")
def scratch(done):
    (done.path / "scratch.yaml").write_text(SCRATCH)
    done.snakemake("--configfile", CONFIG, "scratch.yaml", timeout=1800)
    return done


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


def test_ranks_that_hold_a_part_each_say_what_transformers_says(done):
    """By tensors, by pipeline stages and by experts: the same tokens, the likeliest every time."""
    (done.path / "prompts.yaml").write_text(PROMPTS)
    wanted = [f"results/families/runs/{family}/generations.json" for family in BY_RANKS]
    done.snakemake(*wanted, "--configfile", CONFIG, "prompts.yaml")
    for family in BY_RANKS:
        ranks = sorted(done.results("families", "logs", "export", f"{family}.generate.ranks").glob("rank-*.log"))
        assert [path.name for path in ranks] == ["rank-0.log", "rank-1.log"]
        found = done.json("families", "runs", family, "generations.json")["generations"]
        assert [one["prompt"] for one in found] == ["import", "def f("]
        assert all(one["same"] and one["megatron"] for one in found), found


def test_every_family_that_is_trained_from_scratch_comes_out_unharmed(scratch):
    found = scratch.json("scratch", "report", "checks.json")
    assert found["state"] == "PASS"
    assert {check["subject"] for check in found["checks"] if check["kind"] == "export"} == FAMILIES
    assert not [check for check in found["checks"] if check["kind"] == "import"]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_from_scratch_the_same_is_proved(done, scratch, family):
    """A tied head is not written a second time, and vocabulary and experts are whole."""
    proof, pretrained = (scratch.json(name, "runs", family, "proof.json") for name in ("scratch", "families"))
    names, before = ({check["name"] for check in one["checks"]} for one in (proof, pretrained))
    assert before - names <= set(proof["left_out"]) <= {"trained"} and names <= before
    details = ({check["name"]: check["detail"] for check in one["checks"]} for one in (proof, pretrained))
    assert len({detail["tensors"] for detail in details}) == 1
