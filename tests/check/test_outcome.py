"""What preflight's verdicts on all runs come to. A hub that gives nothing is none of them."""

import csv
from dataclasses import replace

import pytest
from gpt2_large import facts

from megaboa.check import outcome
from megaboa.files import read_json, write_json
from megaboa.paths import ExperimentFolder
from megaboa.records import (
    Budget,
    CostsSpec,
    InsideCheck,
    Preflight,
    PreflightInImage,
    RunCheck,
    RunsSpec,
    read,
    write,
)

GATED = "models.a.recipe: 'o/n' is gated: ask for access"
CHECKS = {"good": ("PASS", None), "bad": ("FAIL", ("too long",)), "unread": ("NOT_RUN", (GATED,))}


@pytest.fixture
def experiment(tmp_path):
    specs = ExperimentFolder(tmp_path).specs
    write(specs.runs, RunsSpec(runs=tuple(CHECKS), skip_illegal=True))
    write(specs.costs, CostsSpec(exports=(), budget=Budget()))
    write_json(specs.inside, {"digest": "packages"})
    for name in CHECKS:
        write_json(tmp_path / "runs" / name / "run.json", {"name": name})
    return tmp_path


def concluded(experiment, *names):
    found = {name: (RunCheck(state=CHECKS[name][0], reasons=CHECKS[name][1]), None) for name in names}
    specs = ExperimentFolder(experiment).specs
    return outcome.conclude(specs.runs, found, experiment / "preflight.json")


def test_what_the_hub_does_not_give_ends_the_call_and_is_not_remembered(experiment, capsys):
    assert concluded(experiment, "good", "unread") == 1
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == f"error: run unread is not checked: {GATED}" and "could never work" not in said
    assert not (experiment / "refused.json").exists() and not (experiment / "preflight.json").exists()


def test_of_two_runs_one_is_refused_and_one_is_not_checked(experiment, capsys):
    assert concluded(experiment, "good", "bad", "unread") == 1
    said = capsys.readouterr().err
    assert "run bad is refused: too long\n1 of 3 runs could never work" in said
    assert said.splitlines()[-1] == f"error: run unread is not checked: {GATED}"
    assert set(read_json(experiment / "refused.json")["runs"]) == {"bad"}


def test_when_the_hub_gives_it_the_run_is_accepted(experiment, capsys):
    assert concluded(experiment, "good") == 0
    assert capsys.readouterr().out.endswith("\n1 run is accepted by Bridge\n")
    assert set(read(Preflight, experiment / "preflight.json").runs) == {"good"}


def test_of_a_trained_run_the_table_has_its_own_time_and_says_so(experiment):
    runs = ExperimentFolder(experiment).run("good"), ExperimentFolder(experiment).run("bad")
    for folder in runs:
        asked = {"name": folder.name, "model": {"name": "m"}, "training": {}, "parallel": {}, "device": "cuda"}
        write_json(folder.file("run"), {**asked, "world_size": 1, "overrides": {}})
        write_json(folder.file("launch"), {"gpu": "h100-80g"})
    timed = {"median": 1.0, "p5": 0.0, "p95": 9.0, "n": 9}
    write_json(runs[0].summary, {"run": "good", "state": "PASS", "step_seconds": timed})
    given = facts()
    given = replace(given, training=replace(given.training, iters=100))
    found = {folder.name: (RunCheck(state="PASS"), given) for folder in runs}
    assert outcome.conclude(ExperimentFolder(experiment).specs.runs, found, experiment / "preflight.json") == 0
    with (experiment / "preflight.tsv").open(newline="") as stream:
        rows = {row["run"]: (row["step_seconds"], row["step_source"]) for row in csv.DictReader(stream, delimiter="\t")}
    assert rows == {"good": ("1", "own measurement"), "bad": ("1", "measured")}


def test_a_network_that_nobody_measured_is_said_once(experiment, capsys):
    given = facts(gbs=64)
    given = replace(given, training=replace(given.training, iters=100))
    for nodes, said in ((2, 1), (1, 0)):
        cluster = replace(given.cluster, device="cuda", gpu="h100-80g", nodes=nodes, gpus_per_node=8)
        known = replace(given, layout=replace(given.layout, world_size=8 * nodes), cluster=cluster)
        for name in ("good", "bad"):
            run = {"name": name, "model": {"name": "m"}, "device": "cuda", "world_size": 8 * nodes, "overrides": {}}
            write_json(ExperimentFolder(experiment).run(name).file("run"), run)
            write_json(ExperimentFolder(experiment).run(name).file("launch"), {"gpu": "h100-80g"})
        found = {name: (RunCheck(state="PASS"), known) for name in ("good", "bad")}
        assert outcome.conclude(ExperimentFolder(experiment).specs.runs, found, experiment / "preflight.json") == 0
        text = capsys.readouterr().out
        line = "between nodes 40 GB/s per GPU are assumed, whatever launch.network says: `snakemake calibrate`"
        assert text.count(line) == said and "predicted by" in text


def test_a_limit_that_cannot_be_checked_is_said(experiment, capsys):
    write(ExperimentFolder(experiment).specs.costs, CostsSpec(exports=(), budget=Budget(gpu_hours=100)))
    assert concluded(experiment, "good") == 0
    assert "warning: budget.gpu_hours: isn't checked where the step time is unknown" in capsys.readouterr().err


def test_a_run_that_cannot_be_exported_is_an_error_only_where_it_is_to_be(experiment, capsys):
    """It could be trained, so nothing is kept of it as of one that could never work."""
    specs = ExperimentFolder(experiment).specs
    unlike = {"good": (RunCheck(export="missing: a.bias"), None), "other": (RunCheck(export="missing: a.bias"), None)}
    write(specs.costs, CostsSpec(exports=("other",), budget=Budget()))
    assert outcome.conclude(specs.runs, unlike, experiment / "preflight.json") == 1
    said = capsys.readouterr().err
    why = "Megatron-Bridge can't write the trained model as its config says: missing: a.bias"
    assert f"warning: run good: {why}\n" in said and "could never work" not in said
    assert f"export.runs: run other: {why}: change what its config or overrides say of these, or leave" in said
    assert not (experiment / "refused.json").exists() and not (experiment / "preflight.json").exists()
    write(specs.costs, CostsSpec(exports=(), budget=Budget()))
    assert outcome.conclude(specs.runs, unlike, experiment / "preflight.json") == 0
    assert f"warning: runs good, other: {why}\n" in capsys.readouterr().err


def test_an_export_that_could_not_be_simulated_is_no_verdict(experiment, capsys):
    found = {"good": (RunCheck(export_unknown="ValueError: of ours"), None)}
    assert outcome.conclude(ExperimentFolder(experiment).specs.runs, found, experiment / "preflight.json") == 0
    assert "warning: run good: whether it can be exported is not known: ValueError" in capsys.readouterr().err


def test_in_the_image_training_will_tell(experiment, capsys):
    runs = {name: InsideCheck(state=CHECKS[name][0], reasons=CHECKS[name][1]) for name in ("good", "unread")}
    order, out = ExperimentFolder(experiment).specs.runs, experiment / "preflight-in-image.json"
    assert outcome.conclude_in_image(order, "sha256:1", PreflightInImage(state="PASS", runs=runs), out) == 0
    assert f"not checked in the image: run unread: {GATED}" in capsys.readouterr().err
    assert read_json(out)["runs"]["unread"]["state"] == "NOT_RUN" and not (experiment / "refused.json").exists()
