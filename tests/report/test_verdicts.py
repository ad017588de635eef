"""What an agreement's check says: equal, within rounding, within a seed, or different."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_runs import FakeExperiment, loss_at

from megaboa.files import read_json, write_json, write_text
from megaboa.records import AgreementCheck, AgreementSpec, parse
from megaboa.report.agreement import agreement_checks
from megaboa.report.runs import load_runs


@pytest.fixture
def experiment(tmp_path):
    experiment = FakeExperiment(tmp_path)
    experiment.completed_run("dp1", steps=20)
    experiment.measure("dp1")
    return experiment


def add(experiment, **values):
    experiment.completed_run("other", **{"steps": 20, **values})
    experiment.measure("other")


def check(experiment, name="other", tolerance=1e-5):
    agreements = [AgreementSpec(reference="dp1", runs=("dp1", name), tolerance=tolerance)]
    [found] = agreement_checks(agreements, load_runs(experiment.results))
    return found


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
    assert check(experiment).detail == ("different: 2 of 20 steps differ by more than 1e-05, step 13 first: by 3.6e+00")


def test_runs_that_continue_in_place_are_compared_from_the_first_step_of_their_curve(experiment):
    add(experiment)
    parent = {"experiment": "tiny", "iteration": 12, "identity": "0123"}
    runs = load_runs(experiment.results)
    for run in runs:
        run.summary.update(parent={**parent, "run": run.name})
        run.steps["attempt"] = [0] * 12 + [1] * 8
    [found] = agreement_checks([AgreementSpec(reference="dp1", runs=("other",), tolerance=1e-5)], runs)
    assert (found.state, found.steps) == ("PASS", 20)
    run = runs[1] = replace(runs[1], steps=runs[1].steps[12:])  # continued from another run's checkpoint
    [found] = agreement_checks([AgreementSpec(reference="dp1", runs=("other",), tolerance=1e-5)], runs)
    assert (found.state, found.steps, found.parts_at) == ("PASS", 8, None)
    run.summary["parent"] = None
    [found] = agreement_checks([AgreementSpec(reference="dp1", runs=("other",), tolerance=1e-5)], runs)
    assert (found.state, found.detail) == ("FAIL", "only 8 of 20 steps can be compared"), "its first steps are missing"
    runs[1] = replace(run, steps=run.steps[:0])
    [found] = agreement_checks([AgreementSpec(reference="dp1", runs=("other",), tolerance=1e-5)], runs)
    assert (found.state, found.detail) == ("FAIL", "only 0 of 20 steps can be compared")


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
    assert (found.state, found.detail) == ("PASS", "equal to the last bit: 8 steps")


def test_an_invalid_run_is_not_compared(experiment):
    add(experiment, losses={4: float("nan")})
    found = check(experiment)
    assert (found.state, found.max_difference) == ("INVALID", None)
    assert found.detail == "other is INVALID: no finite loss at step 4"


def test_a_run_that_has_not_run_is_said(experiment):
    experiment.plan_run("other")
    assert (check(experiment).state, check(experiment).detail) == ("NOT_RUN", "other is not trained")
    assert check(experiment, "ghost").detail == "ghost is not in the plan"


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
        "within rounding: 12 losses are equal; then at step 13 1 of 2,048 choices fell on another expert in "
        "layer 2, where two were 3.0e-08 apart; in all 8 choices fell so, in 8 steps; the first difference is at step "
        "13; limits: the tolerances, as no twin was run"
    )


def test_after_a_tie_losses_may_not_differ_by_just_anything(experiment):
    found = agreement_of(experiment, 2e-3, moved=1)
    assert found.state == "FAIL"
    assert found.detail.startswith(
        "different: 8 of 20 steps differ by more than 0.001, step 13 first: by 2.0e-03; at step 13 1 of 2,048 choices"
    )


@pytest.mark.parametrize(
    ("moved", "margins", "vanished"),
    [(1, [4e-4, 5e-4], 0), (2, [3e-8, 4e-4], 0), (3, [3e-8, 4e-8], 0), (1, [3e-8, 4e-8], 1)],
    ids=["far from a tie", "one tie, two moved", "more moved than is known of", "a choice is lost"],
)
def test_what_no_tie_explains_is_no_excuse(experiment, moved, margins, vanished):
    found = agreement_of(experiment, 5e-5, moved, margins, vanished)
    assert found.state == "FAIL"
    assert found.detail.startswith(
        "different: 8 of 20 steps differ by more than 1e-05, step 13 first: by 5.0e-05; at step 13 "
    )
    assert found.detail.endswith(", which no tie explains")


def test_a_router_whose_margins_are_not_recorded_is_said_to_be_one(experiment):
    found = agreement_of(experiment, 5e-5, 1, margins=())
    assert found.state == "FAIL" and found.verdict == "different" and not found.flip.is_known
    assert found.detail.endswith("where distances from a tie aren't recorded for this kind of router")


def test_a_tie_excuses_nothing_that_was_before_it(experiment):
    add(experiment, losses={5: loss_at(5) + 2e-5})
    dp1, other = load_runs(experiment.results)
    runs = [
        experts(dp1, lambda step: [1000, 1048], [3e-8]),
        experts(other, lambda step: [999, 1049] if step > 9 else [1000, 1048], [3e-8]),
    ]
    [found] = agreement_checks([AgreementSpec(reference="dp1", runs=("other",), tolerance=1e-5)], runs)
    assert found.state == "FAIL"
    assert found.detail.startswith(
        "different: 1 of 20 steps differ by more than 1e-05, step 5 first: by 2.0e-05; at step 10 1 of 2,048"
    )


def test_gradient_norms_are_compared_where_that_is_asked_for(experiment):
    """Adam divides a wrong factor of a gradient out: the losses don't show it, the norm does."""
    found = agreement_of(experiment, 0.0, moved=0, norm=1 + 4e-5)
    assert (found.state, found.step) == ("PASS", None)
    assert found.detail.startswith(
        "within rounding: 20 losses are equal; the first difference is at step 1, in the gradient norm; limits: "
    )
    found = agreement_of(experiment, 0.0, moved=0, norm=1 + 4e-5, limit=2e-5)
    assert (found.state, found.detail) == (
        "FAIL",
        "different: 10 of 20 steps differ in the gradient norm by more than 2e-05, step 1 first: by 4.0e-05",
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
    assert state == "PASS" or found.detail == (
        "different: 10 of 20 steps differ in the gradient norm by more than 0.001, step 11 first: by 2.0e-03"
    )


def judged(experiment, difference, **agreement):
    """A run that is so far from its reference, with a twin that is 1e-6 away until step 10, and 1e-4 from then on; and
    two other seeds, up to 0.02 away."""
    losses = {step: loss_at(step) + difference(step) for step in range(1, 21)}
    experiment.completed_run("other", steps=20, losses=losses)
    chaos = {step: loss_at(step) + (1e-6 if step < 10 else 1e-4) for step in range(1, 21)}
    experiment.completed_run("twin", steps=20, losses=chaos)
    for number, sign in ((1, 1), (2, -1)):
        far = {step: loss_at(step) + sign * 0.01 for step in range(1, 21)}
        experiment.completed_run(f"seed{number}", steps=20, losses=far)
    for name in ("other", "twin", "seed1", "seed2"):
        experiment.measure(name)
    asked = AgreementSpec(reference="dp1", runs=("other",), tolerance=1e-5, twins=("twin",), **agreement)
    [found] = agreement_checks([asked], load_runs(experiment.results))
    return found


def test_within_what_twins_differ_by_is_within_rounding(experiment):
    found = judged(experiment, lambda step: 5e-6 if step < 10 else 5e-4)
    assert (found.state, found.verdict, found.parts_at, found.beyond_at) == ("PASS", "within rounding", 1, None)
    assert found.detail == (
        "within rounding: 20 steps agree to 5.0e-04; the first difference is at step 1; limits: 1 twin that differed "
        "by up to 1.0e-04"
    )


def test_what_chaos_allows_late_is_no_excuse_early(experiment):
    found = judged(experiment, lambda step: 0.0 if step < 4 else 5e-4)
    assert (found.state, found.verdict, found.parts_at, found.beyond_at) == ("FAIL", "different", 4, 4)
    assert found.detail.startswith(
        "different: 6 of 20 steps differ by more than 20 times the twins, step 4 first: by 5.0e-04, with a limit of "
        "2.0e-05"
    )


def test_equal_to_the_last_bit_needs_no_limit(experiment):
    found = judged(experiment, lambda step: 0.0)
    assert (found.state, found.verdict, found.parts_at) == ("PASS", "equal", None)


@pytest.mark.parametrize(
    ("difference", "within", "state", "verdict"),
    [
        (0.015, "rounding", "FAIL", "within a seed"),
        (0.015, "seed", "PASS", "within a seed"),
        (0.03, "seed", "FAIL", "different"),
    ],
)
def test_a_difference_that_a_seed_makes_too(experiment, difference, within, state, verdict):
    found = judged(experiment, lambda step: difference, seeds=("seed1", "seed2"), within=within)
    assert (found.state, found.verdict, found.beyond_at) == (state, verdict, 1)
    assert f"differ by up to {difference:.1e}, those of 3 seeds there by 2.0e-02" in found.detail


def test_a_twin_that_is_not_trained_is_waited_for(experiment):
    add(experiment)
    agreement = AgreementSpec(reference="dp1", runs=("other",), tolerance=1e-5, twins=("twin",))
    [found] = agreement_checks([agreement], load_runs(experiment.results))
    assert (found.state, found.detail) == ("NOT_RUN", "twin is not in the plan")


def test_norms_are_compared_where_there_are_twins(experiment):
    """Whether or not the agreement has a tolerance for them."""
    add(experiment)
    dp1, other = load_runs(experiment.results)
    twin = replace(dp1, name="twin")
    other = replace(other, steps=other.steps.assign(grad_norm=other.steps["grad_norm"] * (1 + 4e-5)))
    agreement = AgreementSpec(reference="dp1", runs=("other",), tolerance=1e-5, twins=("twin",))
    [found] = agreement_checks([agreement], [dp1, other, twin])
    assert (found.verdict, found.beyond_at) == ("different", 1)


def test_twins_show_from_how_far_apart_rounding_decides_between_experts(experiment):
    """In a lower precision than fp32, say, logits differ by more."""
    margins = [3e-3, 4e-3]

    def load(step):
        return [999, 1049] if step >= 13 else [1000, 1048]

    add(experiment, losses={step: loss_at(step) + 5e-4 for step in range(13, 21)})
    dp1, other = load_runs(experiment.results)
    steady, moved = experts(dp1, lambda step: [1000, 1048], margins), experts(other, load, margins)
    twin = replace(experts(dp1, lambda step: [1000, 1048] if step < 18 else [999, 1049], margins), name="twin")
    agreement = AgreementSpec(reference="dp1", runs=("other",), tolerance=1e-5, twins=("twin",))
    [found] = agreement_checks([agreement], [steady, moved, twin])
    assert (found.state, found.verdict, found.exact_steps) == ("PASS", "within rounding", 12)
    assert (found.flipped, found.flipped_steps) == (8, 8)
    [alone] = agreement_checks([replace(agreement, twins=())], [steady, moved])
    assert alone.verdict == "different" and alone.detail.endswith("which no tie explains")


def test_checks_of_older_reports_are_read():
    old = {"kind": "agreement", "name": "b agrees with a", "state": "PASS", "detail": "", "run": "b", "reference": "a"}
    found = parse(AgreementCheck, {**old, "tolerance": 1e-5, "max_difference": 0.0, "step": 1, "steps": 3}, "old")
    assert (found.verdict, found.twins) == (None, 0)
