"""Agreement of losses, proofs, and what they come to together."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import made
import pytest
from fake_runs import FakeExperiment, loss_at

from megaboa.files import read_json, write_json, write_text
from megaboa.records import AgreementSpec, Check, Proof, ReportCheck, ReportSpec, StageCheck, write
from megaboa.report.checks import (
    agreement_checks,
    by_subject,
    counts,
    faults,
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


def check(experiment, name="other", tolerance=1e-5):
    agreements = [AgreementSpec(reference="dp1", runs=("dp1", name), tolerance=tolerance)]
    [found] = agreement_checks(agreements, load_runs(experiment.results))
    return found


def checked(state):
    return ReportCheck(kind="agreement", name=f"is {state}", state=state, detail="why")


def add(experiment, **values):
    experiment.completed_run("other", **{"steps": 20, **values})
    experiment.measure("other")


def test_equal_losses_pass(experiment):
    add(experiment)
    found = check(experiment)
    assert (found.state, found.max_difference, found.steps) == ("PASS", 0.0, 20)


@pytest.mark.parametrize(("tolerance", "state"), [(1e-3, "PASS"), (2e-4, "FAIL")])
def test_the_largest_difference_and_its_step_are_found(experiment, tolerance, state):
    add(experiment, losses={13: loss_at(13) + 0.0003})
    found = check(experiment, tolerance=tolerance)
    assert (found.state, found.step) == (state, 13)
    assert found.max_difference == pytest.approx(0.0003)


def test_a_failure_says_how_many_steps_differ(experiment):
    add(experiment, losses={13: 1.0, 14: 1.0})
    assert check(experiment).detail == "2 of 20 steps differ by more than 1e-05"


def test_steps_that_only_one_run_has_fail_the_check_however_well_the_others_agree(experiment):
    add(experiment, steps=15)
    found = check(experiment)
    assert (found.state, found.detail) == ("FAIL", "only 15 of 20 steps can be compared")
    assert found.max_difference == 0.0


def test_a_run_with_a_parent_is_compared_from_the_step_after_it(experiment):
    train = read_json(experiment.completed_run("other", steps=20))
    steps = Path(train["store"]) / "attempts" / "01" / "steps.jsonl"
    write_text(steps, "".join(line for line in steps.open() if json.loads(line)["step"] > 12))
    parent = {"experiment": "old", "run": "base", "iteration": 12, "load": {"optimizer": True, "rng": True}}
    write_json(experiment.results / "runs" / "other" / "train.json", {**train, "parent": parent})
    experiment.measure("other")
    found = check(experiment)
    assert (found.state, found.detail) == ("PASS", "8 steps compared")


def test_an_invalid_run_is_not_compared(experiment):
    add(experiment, losses={4: float("nan")})
    found = check(experiment)
    assert (found.state, found.max_difference) == ("INVALID", None)
    assert found.detail == "other is INVALID: no finite loss at step 4"


def test_a_run_that_has_not_run_is_said(experiment):
    experiment.plan_run("other")
    assert (check(experiment).state, check(experiment).detail) == ("NOT_RUN", "other is not trained")
    assert check(experiment, "ghost").detail == "ghost is not in the plan"


def test_proofs_are_named_after_what_they_prove(tmp_path):
    import_proof, export_proof = tmp_path / "models" / "dense" / "proof.json", tmp_path / "runs" / "dp1" / "proof.json"
    write_json(import_proof, {"state": "PASS", "checks": [{"name": "tensors", "state": "PASS", "detail": "35 equal"}]})
    write_json(export_proof, {"state": "FAIL", "checks": [{"name": "logits", "state": "FAIL", "detail": "0.3"}]})
    found = proof_checks([export_proof, import_proof])
    names = [(check.name, check.state) for check in found]
    assert names == [("import of dense: tensors", "PASS"), ("export of dp1: logits", "FAIL")]


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


def experts(run, load, margins):
    """The run, with a layer whose experts have the same tokens at all steps, and one where they have these."""
    same = {"load": [1024, 1024], "margins": [1e-4, 2e-4]}
    text = [json.dumps({"1": same, "2": {"load": load(step), "margins": margins}}) for step in run.steps["step"]]
    return replace(run, steps=run.steps.assign(routing=text))


def agreement_of(experiment, difference, moved, margins=(3e-8, 2e-4), vanished=0, limit=None, norm=1.0):
    """Of two runs that are apart from step 13 on, where so many choices fall on another expert."""

    def load(step):
        return [1000 - moved, 1048 + moved - vanished] if step >= 13 else [1000, 1048]

    add(experiment, losses={step: loss_at(step) + difference for step in range(13, 21)})
    dp1, other = load_runs(experiment.results)
    other = replace(other, steps=other.steps.assign(grad_norm=other.steps["grad_norm"] * norm))
    runs = [experts(dp1, lambda step: [1000, 1048], margins), experts(other, load, margins)]
    agreement = AgreementSpec(reference="dp1", runs=("other",), tolerance=1e-5, grad_norm_tolerance=limit)
    [found] = agreement_checks([agreement], runs)
    return found


def test_after_a_tie_of_two_experts_losses_may_differ_by_more(experiment):
    found = agreement_of(experiment, 5e-5, moved=1)
    assert (found.state, found.exact_steps, found.steps) == ("PASS", 12, 20)
    assert found.detail == (
        "12 steps agree to 0.0e+00; then at step 13 1 of 2,048 choices fell on another expert in layer 2, "
        "where two were 3.0e-08 apart"
    )


def test_after_a_tie_losses_may_not_differ_by_just_anything(experiment):
    found = agreement_of(experiment, 2e-3, moved=1)
    assert found.state == "FAIL"
    assert found.detail.startswith("8 of 20 steps differ by more than 0.001; at step 13 1 of 2,048 choices")


@pytest.mark.parametrize(
    ("moved", "margins", "vanished"),
    [(1, [4e-4, 5e-4], 0), (2, [3e-8, 4e-4], 0), (3, [3e-8, 4e-8], 0), (1, [3e-8, 4e-8], 1), (1, [], 0)],
    ids=["far from a tie", "one tie, two moved", "more moved than is known of", "a choice is lost", "nothing known"],
)
def test_what_no_tie_explains_is_no_excuse(experiment, moved, margins, vanished):
    found = agreement_of(experiment, 5e-5, moved, margins, vanished)
    assert found.state == "FAIL"
    assert found.detail.startswith("8 of 20 steps differ by more than 1e-05; at step 13 ")
    assert found.detail.endswith(", which no tie explains")


def test_a_tie_excuses_nothing_that_was_before_it(experiment):
    add(experiment, losses={5: loss_at(5) + 2e-5})
    dp1, other = load_runs(experiment.results)
    runs = [
        experts(dp1, lambda step: [1000, 1048], [3e-8]),
        experts(other, lambda step: [999, 1049] if step > 9 else [1000, 1048], [3e-8]),
    ]
    [found] = agreement_checks([AgreementSpec(reference="dp1", runs=("other",), tolerance=1e-5)], runs)
    assert found.state == "FAIL"
    assert found.detail.startswith("1 of 20 steps differ by more than 1e-05; at step 10 1 of 2,048")


def test_gradient_norms_are_compared_where_that_is_asked_for(experiment):
    """Adam divides a wrong factor of a gradient out: the losses don't show it, the norm does."""
    assert agreement_of(experiment, 0.0, moved=0, norm=1 + 4e-5).state == "PASS"
    found = agreement_of(experiment, 0.0, moved=0, norm=1 + 4e-5, limit=2e-5)
    assert (found.state, found.detail) == (
        "FAIL",
        "10 of 20 steps differ in the gradient norm by more than 2e-05",
    )
    assert found.max_grad_norm == pytest.approx(4e-5)


@pytest.mark.parametrize(("norm", "state"), [(1 + 9e-4, "PASS"), (1 + 2e-3, "FAIL")])
def test_rounding_may_grow_in_gradient_norms_after_ten_steps(experiment, norm, state):
    add(experiment)
    dp1, other = load_runs(experiment.results)
    norms = other.steps["grad_norm"].where(other.steps["step"] <= 10, other.steps["grad_norm"] * norm)
    agreement = AgreementSpec(reference="dp1", runs=("other",), tolerance=1e-5, grad_norm_tolerance=1e-5)
    [found] = agreement_checks([agreement], [dp1, replace(other, steps=other.steps.assign(grad_norm=norms))])
    assert found.state == state
    assert state == "PASS" or found.detail == "10 of 20 steps differ in the gradient norm by more than 0.001"


def test_what_ends_a_call_with_an_error(experiment):
    add(experiment, losses={4: float("nan")})
    experiment.plan_run("left-out")
    left_out, other, dp1 = sorted(load_runs(experiment.results), key=lambda run: run.name != "left-out")
    left_out.plan["state"] = "INVALID"  # by preflight, where the sweep may leave out what is illegal
    runs = [replace(left_out, state="INVALID"), other, dp1]
    checks = [checked(state) for state in ("PASS", "NOT_RUN", "INVALID", "FAIL")]
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
    write_json(folder / "train.json", {})
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
    assert found(results)["evaluation of a: evaluation"][1].startswith("ended without an error message")
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
