"""`snakemake prove`: a run that is stopped and resumed trains what it trains in one go, and what doesn't is found."""

import pytest
from clone import edit

from megaboa.files import read_jsonl

pytestmark = pytest.mark.slow

RUNS = {"small": "{optimizer.lr: 1.0e-3}", "other": "{optimizer.lr: 2.0e-3}"}
FORGOT = """\
prove:
  layouts:
    tp2: {resources.gpus_per_node: 2, parallel.tp: 2}
    forgot: {load.optimizer: false, schedule.warmup_iters: 0}
    elsewhere: {training.seed: 7}
"""
PARTS = ["weights", "optimizer", "counters", "random numbers", "data order"]
HERE = "mine-proof-small"


@pytest.fixture(scope="module")
def proved(workspace):
    """The call's output: of the default proof of the first run."""
    config = workspace.experiment("mine", RUNS, steps=20, save_interval=6)
    return workspace.snakemake("prove", "--configfile", config)


def checks(workspace, run):
    found = workspace.json(HERE, "tensors.json")["checks"]
    return {check["part"]: check for check in found if check["run"] == run}


def test_stopped_and_resumed_it_is_equal_to_the_last_bit(workspace, proved):
    found = checks(workspace, "resumed")
    assert list(found) == PARTS
    assert {check["state"] for check in found.values()} == {"PASS"}
    assert {check["verdict"] for check in found.values()} == {"equal"}
    assert "the same 88 samples in 11 steps, 1 to 11" in found["data order"]["detail"]
    ends = [
        entry for entry in read_jsonl(workspace.store(HERE, "resumed") / "attempts.jsonl") if entry["event"] == "end"
    ]
    assert [(end["first_step"], end["last_step"]) for end in ends] == [(1, 6), (7, 11)], "it was stopped"
    assert workspace.steps(HERE, "resumed") == workspace.steps(HERE, "whole")


def test_in_another_layout_it_is_within_rounding(workspace, proved):
    found = checks(workspace, "tp2")
    assert {check["state"] for check in found.values()} == {"PASS"}
    assert found["weights"]["verdict"] == found["optimizer"]["verdict"] == "within rounding"
    for part in ("weights", "optimizer"):
        assert 0 < found[part]["difference"] < found[part]["limit"] < 1e-4
    assert "the same 40 samples in 5 steps, 7 to 11" in found["data order"]["detail"]
    tensors = {name: check["verdict"] for name, check in checks(workspace, "tp2").items()}
    assert tensors["counters"] == "equal"


def test_it_says_so(workspace, proved):
    assert "PASS: all " in proved
    assert "report: results/mine-proof-small/report/index.html" in proved
    page = workspace.results(HERE, "report", "index.html").read_text()
    assert "Proof of mine/small" in page
    assert "resumed has the optimizer of whole" in page


def test_the_users_runs_are_left_alone(workspace, proved):
    assert not workspace.results("mine").exists()
    assert [path.name for path in (workspace.path / "store" / "runs").iterdir()] == [HERE]


def test_nothing_is_done_twice(workspace, proved):
    config = workspace.path / "mine.yaml"
    assert workspace.planned("prove", "--configfile", config) == {}
    workspace.results(HERE, "tensors.json").unlink()
    assert "train" not in workspace.planned("prove", "--configfile", config)


def test_a_job_on_a_cluster_knows_its_run(workspace, proved):
    """By the command in its script, with the configuration that the call kept: `prove` isn't among its words."""
    (call,) = workspace.results(HERE, "calls").iterdir()
    kept = call / "config" / "0" / "experiment.yaml"
    manifest = workspace.results(HERE, "runs", "tp2", "train.json")
    before = manifest.read_text()
    manifest.unlink()
    job = ["--mode", "remote", "--target-jobs", "train:run=tp2", "--allowed-rules", "train", "--force", "--nolock"]
    workspace.snakemake(*job, "--configfiles", kept)
    assert manifest.read_text() == before
    assert not workspace.results("mine").exists()


def test_a_resumption_without_the_optimizer_or_with_other_data_fails(workspace, proved):
    """It shares the runs of the proof before: only what is new is trained."""
    config = workspace.path / "mine.yaml"
    edit(config, "sweep:", f"{FORGOT}sweep:")
    assert workspace.planned("prove", "--configfile", config)["train"] == 2
    said = workspace.snakemake("prove", "--configfile", config, code=1)
    assert "failed: " in said
    found = checks(workspace, "forgot")
    failed = [part for part, check in found.items() if check["state"] == "FAIL"]
    assert failed == ["weights", "optimizer", "counters"]
    assert "tensors differ by more than 20 times the twins" in found["optimizer"]["detail"]
    assert "optimizer.step is 5, and 11 in whole" in found["counters"]["detail"]
    order = checks(workspace, "elsewhere")["data order"]
    assert order["state"] == "FAIL"
    assert "5 of 5 steps read other samples, step 7 first" in order["detail"]
    assert {check["state"] for check in checks(workspace, "resumed").values()} == {"PASS"}
    assert workspace.json(HERE, "report", "checks.json")["state"] == "FAIL"
