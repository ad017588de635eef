"""Runs that continue from another's checkpoint: the curve goes on, whatever the layout; the settings are their own."""

import json
import math
import os
import signal
import time
from pathlib import Path

import pandas as pd
import pytest
from clone import edit, kill_group

from megaboa.files import read_jsonl
from megaboa.run import checkpoints

pytestmark = pytest.mark.slow

PARENT = "continue_from: family/parent@10"
TWO = "resources.gpus_per_node: 2"
FAMILY = {
    "parent": "{}",
    "same": f"{{{PARENT}}}",
    "dp2": f"{{{PARENT}, {TWO}}}",
    "tp2": f"{{{PARENT}, {TWO}, parallel.tp: 2, parallel.sp: true}}",
    "pp2": f"{{{PARENT}, {TWO}, parallel.pp: 2}}",
    "beta": f"{{{PARENT}, optimizer.beta2: 0.5}}",
    "fresh": f"{{{PARENT}, load.optimizer: false, load.rng: false}}",
    # From each rank's own shard of the optimizer, as large models are saved, to another number of ranks.
    "halves": f"{{{TWO}, checkpoint.reshardable: false}}",
    "joined": "{continue_from: family/halves@10}",
}
AGREEMENTS = """\
report:
  agreements: [{reference: parent, runs: [same, dp2, tp2, pp2], tolerance: 1.0e-5}]
"""
EXPERTS = "num_experts: 4, num_experts_per_tok: 2, norm_topk_prob: true, moe_intermediate_size: 32"
MOE = {
    "alone": "{}",
    "ep2": f"{{continue_from: moe/alone@10, {TWO}, parallel.ep: 2}}",
    "ep2-tp2": f"{{continue_from: moe/alone@10, {TWO}, parallel.ep: 2, parallel.tp: 2, parallel.sp: true}}",
    "together": f"{{{TWO}, parallel.ep: 2}}",
    "apart": "{continue_from: moe/together@10}",
}
LINEAR = "schedule.decay: linear"
LATER = {
    "faster": f"{{{PARENT}, optimizer.lr: 1.0e-3, optimizer.min_lr: 1.0e-4, optimizer.beta2: 0.9, {LINEAR}}}",
    "grandchild": "{continue_from: family/same}",
}


@pytest.fixture(scope="module")
def family(workspace):
    """One experiment, from its parent to its report."""
    config = workspace.experiment("family", FAMILY, steps=20, save_interval=10, more=AGREEMENTS)
    edit(config, "precision: fp32}", "precision: fp32, eval_interval: 5}")
    workspace.snakemake("--configfile", config)
    return config


@pytest.fixture(scope="module")
def later(workspace, family):
    """Another experiment, which continues from runs of the first one: longer, and evaluated at its end only."""
    config = workspace.experiment("later", LATER, steps=24, save_interval=10)
    workspace.snakemake("--configfile", config)
    return config


@pytest.fixture(scope="module")
def precisions(workspace, family):
    """From fp32 to bf16, and from there back."""
    runs = {
        "narrow": f"{{{PARENT}, training.precision: bf16_mixed}}",
        "wide-again": "{continue_from: precisions/narrow@15, training.precision: fp32}",
    }
    config = workspace.experiment("precisions", runs, steps=20, save_interval=5)
    edit(config, ", precision: fp32}", "}")
    workspace.snakemake("pretrain", "--configfile", config)
    return config


@pytest.fixture(scope="module")
def moe(workspace):
    """Experts, on one rank and on two."""
    config = workspace.experiment("moe", MOE, steps=20, save_interval=10)
    edit(config, "model_type: qwen3,", f"model_type: qwen3_moe, {EXPERTS},")
    workspace.snakemake("pretrain", "--configfile", config)
    return config


@pytest.fixture(scope="module")
def wide(workspace, family):
    """And one with a larger batch."""
    config = workspace.experiment("wide", {"wide": f"{{{PARENT}}}"}, steps=20, save_interval=10)
    edit(config, "global_batch_size: 8", "global_batch_size: 16")
    workspace.snakemake("pretrain", "--configfile", config)
    return config


def losses(workspace, experiment, run):
    return {step: float.fromhex(loss) for step, loss, _ in workspace.steps(experiment, run)}


def rates(workspace, experiment, run):
    events = read_jsonl(workspace.store(experiment, run) / "attempts" / "01" / "steps.jsonl")
    return {event["step"]: event["lr"] for event in events if event["event"] == "step"}


def test_the_same_layout_goes_on_bit_for_bit(workspace, family):
    assert workspace.steps("family", "same") == workspace.steps("family", "parent")[10:]
    evals = [
        workspace.json("family", "runs", run, "metrics", "summary.json")["validation"] for run in ("parent", "same")
    ]
    assert evals[1] == [evaluation for evaluation in evals[0] if evaluation["step"] > 10]
    *_, compared = workspace.megaboa("inspect", "family/parent", "family/same", "--norms").splitlines()
    count = int(compared.split()[0])
    assert count > 0 and compared == f"{count} of {count} common tensors have equal numbers"


def test_the_numbers_of_a_checkpoint_are_shown(workspace, family):
    """Norms start as ones, moved a little."""
    lines = workspace.megaboa("inspect", "family/parent", "--norms").splitlines()
    rows = {row.split()[0]: row.split()[1:] for row in lines if "  float32  " in row}
    kind, shape, pieces, *size, norm, largest = rows["decoder.final_layernorm.weight"]
    assert (kind, shape, pieces, size) == ("float32", "32", "1", ["128", "B"])
    assert float(norm) == pytest.approx(math.sqrt(32), rel=0.05) and 1 < float(largest) < 1.2
    assert all(0 < float(row[-2]) < math.inf for row in rows.values()), "nothing in the last column: all are finite"


@pytest.mark.parametrize("run", ["dp2", "tp2", "pp2", "joined"])
def test_another_layout_goes_on_along_the_same_curve(workspace, family, run):
    whole, rest = losses(workspace, "family", "parent"), losses(workspace, "family", run)
    assert list(rest) == list(range(11, 21))
    assert max(abs(loss - whole[step]) for step, loss in rest.items()) < 1e-5


@pytest.mark.parametrize(("run", "first", "bound"), [("narrow", 11, 1e-3), ("wide-again", 16, 1e-5)])
def test_another_precision_goes_on_along_the_same_curve(workspace, precisions, run, first, bound):
    """With the optimizer's state: bf16 rounds the weights for the passes, not those that are trained."""
    whole, rest = losses(workspace, "family", "parent"), losses(workspace, "precisions", run)
    assert list(rest) == list(range(first, 21))
    assert 0 < max(abs(loss - whole[step]) for step, loss in rest.items()) < bound


@pytest.mark.parametrize(("run", "parent"), [("ep2", "alone"), ("ep2-tp2", "alone"), ("apart", "together")])
def test_experts_go_on_on_more_ranks_and_on_fewer(workspace, moe, run, parent):
    whole, rest = losses(workspace, "moe", parent), losses(workspace, "moe", run)
    assert list(rest) == list(range(11, 21))
    assert max(abs(loss - whole[step]) for step, loss in rest.items()) < 1e-5


def test_settings_are_the_runs_own_and_the_schedule_stands_at_its_step(workspace, later):
    """Bridge alone fails at the learning rate."""
    own = rates(workspace, "later", "faster")
    assert list(own) == list(range(11, 25))
    for step, rate in own.items():  # the rate is set before a step, for those that are done
        assert rate == pytest.approx(1e-4 + (1e-3 - 1e-4) * (1 - (step - 1 - 2) / (24 - 2)))
    assert losses(workspace, "later", "faster")[11] == losses(workspace, "family", "parent")[11]


def test_another_beta_counts_from_the_first_step(workspace, family):
    """Bridge alone takes it from the checkpoint without a word: the curve is the parent's to the last bit (seen)."""
    whole, own = losses(workspace, "family", "parent"), losses(workspace, "family", "beta")
    assert own[11] == whole[11] and all(own[step] != whole[step] for step in range(12, 21))


def test_without_the_optimizers_state_the_schedule_begins_anew(workspace, family):
    own = rates(workspace, "family", "fresh")
    assert [own[11], own[12], own[13]] == pytest.approx([0.0, 1.5e-4, 3e-4])
    assert own[20] < 2e-5
    assert losses(workspace, "family", "fresh")[11] == losses(workspace, "family", "parent")[11]


def test_a_larger_batch_has_the_same_schedule_by_steps(workspace, wide):
    whole, own = rates(workspace, "family", "parent"), rates(workspace, "wide", "wide")
    assert own == {step: pytest.approx(rate) for step, rate in whole.items() if step > 10}


def test_parents_are_recorded_and_shown(workspace, later):
    train = workspace.json("later", "runs", "grandchild", "train.json")
    parent = workspace.json("family", "runs", "same", "train.json")
    assert {name: train["parent"][name] for name in ("experiment", "run", "iteration", "identity")} == {
        "experiment": "family",
        "run": "same",
        "iteration": 20,
        "identity": parent["identity"],
    }
    assert train["bytes"] == sum(kept["bytes"] for kept in train["checkpoints"]) > 0
    assert "family/same@20" in workspace.results("later", "plan.tsv").read_text()
    assert "steps 21 to 24, after family/same@20" in workspace.results("later", "report", "index.html").read_text()
    summary = workspace.json("later", "runs", "grandchild", "metrics", "summary.json")
    assert (summary["state"], summary["steps"], summary["parent"]["run"]) == ("PASS", 4, "same")
    assert workspace.planned("--configfile", later) == {}


def test_a_killed_child_goes_back_to_its_parent_and_a_damaged_parent_is_left_alone(workspace, family):
    config = workspace.experiment("frail", {"dp2": f"{{{PARENT}, {TWO}}}"}, 400, 400)
    workspace.snakemake("data", "import", "preflight", "--configfile", config)
    process = workspace.start("pretrain", "--configfile", config)
    ranks = workspace.wait_for_step("frail", "dp2", 12)
    kill_group(process)
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):  # they follow their supervisor by themselves
        time.sleep(0.1)
    store = workspace.store("frail", "dp2")
    assert not list(store.glob("checkpoints/iter_*"))
    halfway = workspace.store("family", "parent") / "checkpoints" / "iter_0000010"
    shard = max(halfway.glob("*.distcp"), key=lambda path: path.stat().st_size)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    try:
        output = workspace.snakemake("pretrain", "--configfile", config, code=1)
        assert f"{shard.relative_to(workspace.path)} has changed since it was written" in output
        assert "Nothing of it was touched. family/parent has 20: set continue_from" in output
        assert halfway.exists() and (halfway / "complete.json").exists()
    finally:
        shard.write_bytes(whole)
    workspace.snakemake("pretrain", "--configfile", config)
    begun = [entry for entry in read_jsonl(store / "attempts.jsonl") if entry["event"] == "start"]
    assert [entry["parent"] for entry in begun[:1] + begun[-1:]] == ["family/parent@10"] * 2
    assert [step for step, *_ in workspace.steps("frail", "dp2")] == list(range(11, 401))


def test_a_parent_that_is_trained_anew_trains_its_children_anew(workspace, family):
    config = workspace.path / "family.yaml"
    edit(config, "    parent: {}", "    parent: {optimizer.weight_decay: 0.2}")
    jobs = workspace.planned("pretrain", "--configfile", config)
    assert jobs["train"] == 1 + sum(PARENT in values for values in FAMILY.values())
    edit(config, "    parent: {optimizer.weight_decay: 0.2}", "    parent: {}")
    assert workspace.planned("pretrain", "--configfile", config) == {}


def test_a_parent_that_is_not_there_is_one_clear_error_before_anything_runs(workspace, family):
    config = workspace.experiment("orphan", {"a": "{continue_from: family/parent@15}"}, steps=30, save_interval=10)
    output = workspace.snakemake("-n", "--configfile", config, code=1)
    assert "family/parent keeps no checkpoint of step 15, but of 10, 20" in output


def test_a_run_goes_on_under_its_own_name_with_more_steps_and_in_another_layout(workspace):
    config = workspace.experiment("itself", {"a": "{}"}, steps=6, save_interval=3)
    workspace.snakemake("--configfile", config)
    first, curve = workspace.json("itself", "runs", "a", "train.json"), workspace.steps("itself", "a")
    more = "{continue_from: itself, parallel.tp: 2, resources.gpus_per_node: 2}"
    config = workspace.experiment("itself", {"a": more}, steps=9, save_interval=3)
    workspace.snakemake("--configfile", config)
    train = workspace.json("itself", "runs", "a", "train.json")
    assert (train["iteration"], train["parent"]["identity"]) == (9, first["identity"])
    assert (
        workspace.json("itself", "runs", "a", "earlier", first["identity"][:12], "train.json")["store"]
        == first["store"]
    )
    assert [step for step, *_ in workspace.steps("itself", "a")] == [7, 8, 9], "none is trained twice"
    steps = pd.read_parquet(workspace.results("itself", "runs", "a", "metrics", "steps.parquet"))
    assert steps["step"].tolist() == list(range(1, 10)) and steps["attempt"].tolist() == [0] * 6 + [1] * 3
    assert [float(loss).hex() for loss in steps["loss"][:6]] == [loss for _, loss, _ in curve]
    assert workspace.json("itself", "report", "checks.json")["state"] == "PASS"
    summary = workspace.json("itself", "runs", "a", "metrics", "summary.json")
    assert (summary["steps"], summary["tokens_before"]) == (3, 2 * summary["tokens"])
    seen = workspace.megaboa("inspect", "itself/a")
    assert "iteration 9, torch_dist, layout tp=2" in seen and "written by 2 ranks" in seen
    halfway = json.loads(workspace.megaboa("inspect", first["checkpoint"], "itself/a@9", "--norms", "--json"))
    changed = {name: one for name, one in halfway["differences"].items() if not name.startswith("optimizer.")}
    assert changed and not any(one["kinds"] for one in changed.values()), "one model, whatever the layout"
    assert all(0 < one["relative"] < 1 for one in changed.values()), "three steps have moved every tensor"
    assert "steps 7 to 9, after itself/a@6" in workspace.results("itself", "report", "index.html").read_text()
    assert workspace.planned("--configfile", config) == {}


def test_an_edited_corpus_costs_no_saved_step(workspace):
    """Without the key the run stops until the edit is undone; with it, it continues from its own newest step."""

    def write_corpus(word: str) -> None:
        documents = (f"{word} number {n} of a text that is long enough to be read for a while. " * 9 for n in range(99))
        text = "".join(json.dumps({"text": document}) + "\n" for document in documents)
        (workspace.path / "edited.jsonl").write_text(text)

    def train_until(step: int) -> int:
        process = workspace.start("pretrain", "--configfile", config)
        workspace.wait_for_step("edited", "a", step)
        os.killpg(process.pid, signal.SIGINT)
        output = process.communicate(timeout=240)[0]
        saved = max(checkpoints.complete_iterations(workspace.store("edited", "a") / "checkpoints"))
        assert "saved; the same call resumes it" in output and saved >= step, output
        return saved

    config = workspace.experiment("edited", {"a": "{}"}, steps=4000, save_interval=10)
    edit(config, "train_on: text", "train_on: base")
    edit(config, "corpora:\n  text: {source", "corpora:\n  text: {source: edited.jsonl}\n  base: {source")
    edit(config, "data: {", "data: {blend: {text: 1}, ")
    edit(config, "save_interval: 10", "save_interval: 10, keep_every: 20, keep_last: 3")
    write_corpus("one")
    first = train_until(22)
    write_corpus("another")
    plan = ("-n", "pretrain", "--configfile", config)
    assert f"a stops, and keeps its step {first}, if what it reads has changed, which is" in workspace.snakemake(*plan)
    output = workspace.snakemake("pretrain", "--configfile", config, code=1)
    last = output.splitlines()[-1]
    assert "(its content)" in output and "what it reads has other content since. Undo the change to resume it" in last
    write_corpus("one")
    workspace.snakemake("data", "--configfile", config)
    assert f"a resumes at step {first} of 4000" in workspace.snakemake(*plan)

    edit(config, "a: {}", "a: {continue_from: itself}")
    write_corpus("another")
    again = "call again, and it continues from step {}"
    assert again.format(first) in workspace.snakemake("pretrain", "--configfile", config, code=1)
    second = train_until(first + 22)
    write_corpus("a third")
    assert again.format(second) in workspace.snakemake("pretrain", "--configfile", config, code=1)
    assert f"a continues from its own step {second} (continue_from: itself)" in workspace.snakemake(*plan)
    third = train_until(second + 2)
    assert workspace.steps("edited", "a")[0][0] == second + 1 and third > second
    assert "iteration 20" in workspace.megaboa("inspect", "edited/a@20")
