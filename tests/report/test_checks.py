"""Proofs, stages that failed, and what all checks come to together."""

import math
import os
from dataclasses import replace
from types import SimpleNamespace

import made
import pytest
from fake_runs import FakeExperiment

from megaboa.files import write_json, write_text
from megaboa.records import Along, AlongSpec, Check, ExportedStep, Proof, ReportCheck, ReportSpec, StageCheck, write
from megaboa.report.checks import (
    along_checks,
    by_subject,
    counts,
    faults,
    number_checks,
    proof_checks,
    proofs_so_far,
    stage_checks,
    verdict,
)
from megaboa.report.runs import load_runs

ERROR = "ValueError: hf_path is required"
RUN = SimpleNamespace(name="a", export="store/exports/x/a/1")


@pytest.fixture
def experiment(tmp_path):
    experiment = FakeExperiment(tmp_path)
    experiment.completed_run("dp1", steps=20)
    experiment.measure("dp1")
    return experiment


def checked(state):
    return ReportCheck(kind="agreement", name=f"is {state}", state=state, detail="why")


def add(experiment, **values):
    experiment.completed_run("other", **{"steps": 20, **values})
    experiment.measure("other")


def test_proofs_are_named_after_what_they_prove(tmp_path):
    import_proof, export_proof = tmp_path / "models" / "dense" / "proof.json", tmp_path / "runs" / "dp1" / "proof.json"
    write_json(import_proof, {"state": "PASS", "checks": [{"name": "tensors", "state": "PASS", "detail": "35 equal"}]})
    write_json(export_proof, {"state": "FAIL", "checks": [{"name": "logits", "state": "FAIL", "detail": "0.3"}]})
    found = proof_checks([export_proof, import_proof])
    names = [(check.name, check.state) for check in found]
    assert names == [("import of dense: tensors", "PASS"), ("export of dp1: logits", "FAIL")]


def test_numbers_that_are_not_finite_fail(experiment):
    (run,) = load_runs(experiment.results)
    assert number_checks([run]) == []
    losses = {"lm loss": 3.0, "valid/far": None}
    summary = {**run.summary, "validation": [{"step": 10, "losses": losses}, {"step": 20, "losses": losses}]}
    step = ExportedStep(iteration=10, path="p", digest="1", loss=2.0, values={}, not_finite={"f": "inf"})
    run = replace(run, summary=summary, evaluation={"acc": math.nan, "f": 1.0}, along=(step,))
    found = {one.name: (one.state, one.detail) for one in number_checks([run])}
    remedy = "correct the command, or leave such numbers out of its JSON"
    assert found == {
        "validation of dp1: finite numbers": (
            "FAIL",
            "far at step 10 is NaN; far at step 20 is NaN: "
            "look at the loss before that step, and at the documents of the set",
        ),
        "evaluation of dp1: finite numbers": ("FAIL", f"acc is NaN: {remedy}"),
        "evaluation of dp1@10: finite numbers": ("FAIL", f"f is inf: {remedy}"),
    }
    assert number_checks([replace(run, state="INVALID")]) == []


@pytest.mark.parametrize(
    ("states", "result"),
    [
        (["PASS"], "PASS"),
        ([], "PASS"),
        (["PASS", "NOT_RUN"], "NOT_RUN"),
        (["INVALID", "NOT_RUN"], "INVALID"),
        (["INVALID", "FAIL", "NOT_RUN"], "FAIL"),
    ],
)
def test_the_verdict_is_the_worst_of_all(experiment, states, result):
    runs, checks = load_runs(experiment.results), [checked(state) for state in states]
    assert verdict(runs, checks) == result
    assert counts(runs, checks).runs == {"PASS": 1}
    assert sum(counts(runs, checks).checks.values()) == len(states)


def test_a_proof_is_one_row_with_the_differences_that_it_measured():
    def one(kind, subject, check, state="PASS", **more):
        return StageCheck(kind=kind, subject=subject, check=check, state=state, name=check, detail="", **more)

    rows = by_subject(
        [
            one("export", "r", "logits", difference=1e-7),
            one("export", "r", "validation loss", "FAIL", difference=0.5),
            one("import", "z", "logits"),
        ]
    )
    assert [(row["subject"], row["kind"], row["state"], row["passed"], row["total"]) for row in rows] == [
        ("z", "import", "PASS", 1, 1),
        ("r", "export", "FAIL", 1, 2),
    ]
    assert (rows[1]["logits"], rows[1]["validation loss"], rows[0]["logits"]) == (1e-7, 0.5, None)


def test_what_ends_a_call_with_an_error(experiment):
    add(experiment, losses={4: float("nan")})
    experiment.plan_run("left-out")
    dp1, other, left_out = load_runs(experiment.results)
    left_out.plan["state"] = "INVALID"  # by preflight, where the sweep may leave out what is illegal
    left_out = replace(left_out, state="INVALID")
    runs = [left_out, other, dp1]
    checks = [checked(state) for state in ("PASS", "NOT_RUN", "INVALID", "FAIL")]
    assert counts(runs, checks).runs == {"PASS": 1, "INVALID": 1, "left out": 1}
    assert (verdict([left_out, dp1], []), verdict([left_out], [])) == ("PASS", "INVALID")
    found = faults(runs, checks)
    assert [(one.name, one.detail) for one in found] == [
        ("run other", "no finite loss at step 4"),
        ("is FAIL", "why"),
    ]
    assert [one.anchor for one in found] == ["run-other", "check-is-FAIL"]


@pytest.fixture
def results(tmp_path):
    """A run that is trained, exported, proved, evaluated and profiled."""
    folder = tmp_path / "runs" / "a"
    write(folder / "train.json", made.trained(store="store/runs/a"))
    write(folder / "export.json", made.export())
    files = Check(name="files", state="PASS", detail="")
    write(folder / "proof.json", Proof(state="PASS", digest="1", checks=(files,)))
    write(folder / "evaluation.json", made.evaluation())
    write_json(folder / "trace.json", {})
    write_json(folder / "analysis.json", {})
    return tmp_path


def found(results, over=True, runs=(RUN,)):
    proofs = (str(results / "runs" / "a" / "proof.json"),)
    asked = ReportSpec(title=None, agreements=(), proofs=proofs, evaluated=("a",), profiles=("a",))
    checks = stage_checks(results, asked, runs, over)
    return {check.name: (check.state, check.detail) for check in checks}


def lose(results, *names, log=None, text=f"Traceback\n{ERROR}\n"):
    """As Snakemake leaves it: outputs of jobs that failed are gone, the log is there."""
    for name in names:
        (results / "runs" / "a" / f"{name}.json").unlink()
    if log:
        path = results / "logs" / f"{log}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_exports_along_a_training_are_proved_one_by_one_or_say_why_not(results):
    asked = ReportSpec(title=None, agreements=(), proofs=(), along=("a",))
    folder = results / "runs" / "a"
    write(
        results / "specs" / "along" / "a.json", AlongSpec(run="a", every=None, file_gb=5.0, license=None, command=None)
    )
    assert [(one.name, one.state) for one in along_checks(results, asked)] == [("along of a: along", "NOT_RUN")]
    log = results / "logs" / "export" / "a.along.log"
    write_text(log, f"{ERROR}\n")
    assert [(one.state, one.detail) for one in along_checks(results, asked)] == [("FAIL", ERROR)]
    step = ExportedStep(iteration=40, path="p", digest="1", loss=2.0, values={})
    write(folder / "along.json", Along(run="a", identity="1", exports=(step,)))
    logits = Check(name="logits", state="PASS", detail="", difference=1e-7)
    write(folder / "along" / "40" / "proof.json", Proof(state="PASS", digest="1", checks=(logits,)))
    train = {"run": "a", "identity": "1", "store": "s", "train_iters": 40, "iteration": 40, "world_size": 1}
    write_json(folder / "train.json", train)
    (found,) = along_checks(results, asked)
    assert (found.name, found.state, found.difference) == ("export of a@40: logits", "PASS", 1e-7)
    write_json(folder / "train.json", {**train, "identity": "2"})  # it went on in place: these were of what it was
    assert [one.state for one in along_checks(results, asked)] == ["NOT_RUN"]


def test_what_is_there_is_its_proof(results):
    assert found(results) == {"export of a: files": ("PASS", "")}


@pytest.mark.parametrize(
    ("lost", "log", "said"),
    [
        (["proof"], "export/a.proof", {"export of a: proof": ("FAIL", ERROR)}),
        (["evaluation"], "evaluate/a", {"evaluation of a: evaluation": ("FAIL", ERROR)}),
        (["trace"], "profiles/a", {"profile of a: capture": ("FAIL", ERROR)}),
        (["analysis"], "profiles/a.analysis", {"profile of a: analysis": ("FAIL", ERROR)}),
    ],
)
def test_what_failed_says_why(results, lost, log, said):
    """What hangs on it may be there, from an earlier call."""
    lose(results, *lost, log=log)
    checks = found(results)
    assert {name: checks[name] for name in said} == said


def test_what_hangs_on_it_has_not_run(results):
    lose(results, "export", log="export/a")
    checks = found(results, runs=[SimpleNamespace(name="a", export=None)])
    assert checks == {
        "export of a: export": ("FAIL", ERROR),
        "evaluation of a: evaluation": ("NOT_RUN", "is yet to be made"),
    }


def test_a_job_that_was_killed_has_failed_once_nobody_is_at_work(results):
    lose(results, "evaluation", log="evaluate/a", text="loading\n")
    assert found(results)["evaluation of a: evaluation"][0] == "FAIL"
    assert found(results)["evaluation of a: evaluation"][1].startswith(
        "evaluation.json is missing, and the log has no error"
    )
    assert found(results, over=False)["evaluation of a: evaluation"] == ("NOT_RUN", "is yet to be made")


def test_an_evaluation_of_another_export_does_not_count(results):
    write(results / "runs" / "a" / "evaluation.json", made.evaluation(export="0", values={"score": 1.0}))
    assert found(results)["evaluation of a: evaluation"] == ("NOT_RUN", "is yet to be made")


def test_the_checks_of_a_failed_proof_are_shown_as_long_as_it_is_of_this_export(results):
    path = results / "runs" / "a" / "proof.json"
    lose(results, "proof", log="export/a.proof")
    checks = [{"name": "files", "state": "PASS", "detail": ""}, {"name": "logits", "state": "FAIL", "detail": "1.0"}]
    write_json(path.with_name("failed-proof.json"), {"state": "FAIL", "digest": "1", "checks": checks})
    assert found(results) == {"export of a: files": ("PASS", ""), "export of a: logits": ("FAIL", "1.0")}
    write_json(path.with_name("failed-proof.json"), {"state": "FAIL", "digest": "0", "checks": checks})
    assert found(results) == {"export of a: proof": ("FAIL", ERROR)}


def test_an_import_that_failed(tmp_path):
    write_json(tmp_path / "models" / "m" / "source.json", {})
    log = tmp_path / "logs" / "models" / "m.import.log"
    log.parent.mkdir(parents=True)
    log.write_text("MemoryError\n")
    proof = tmp_path / "models" / "m" / "proof.json"
    [check] = proofs_so_far([proof], [], over=True)
    assert (check.name, check.state, check.detail) == ("import of m: import", "FAIL", "MemoryError")
    os.utime(log, (1, 1))  # of an earlier source
    [check] = proofs_so_far([proof], [], over=True)
    assert (check.name, check.state) == ("import of m: proof", "NOT_RUN")
