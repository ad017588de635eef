"""An experiment's runs, compared with earlier ones of the same names."""

import dataclasses
import itertools

import numpy as np
import pytest
from fake_runs import FakeExperiment, loss_at

from megaboa.files import read_json, write_json
from megaboa.records import BaselineSpec
from megaboa.report.baseline import baseline_checks, differences_of, settings_of, step_seconds
from megaboa.report.runs import load_runs

ASKED = BaselineSpec(paths=("old",), slower=0.02, more_memory=0.02, higher_loss=0.005)
COUNT = itertools.count()
SPREAD = 0.004  # by which runs' step times differ below


def experiment(root, seeds=1, slower=1.0, higher=0.0, memory=None, chance=0, **training):
    """`dp1` with so many seeds, as an agreement names them. `chance`: of the numbers that say how runs differ."""
    made, rng = FakeExperiment(root), np.random.default_rng(chance)
    for number in range(seeds):
        name = "dp1" if number == 0 else f"dp1-seed{number}"
        seconds = 0.125 * slower * np.exp(rng.normal(0, SPREAD))
        shift = 0.02 * number + higher
        losses = {step: loss_at(step) + shift for step in range(1, 201)}
        made.completed_run(name, steps=200, seconds=0.125 + next(COUNT) * 1e-5, losses=losses)  # each at its own times
        settle(made, name, seconds)
        path = made.results / "runs" / name / "run.json"
        asked = read_json(path)
        write_json(path, asked | {"training": asked["training"] | {"seed": 7 + number, **training}})
        if memory:
            summary = made.results / "runs" / name / "metrics" / "summary.json"
            peak = {"attempt": 1, "peak_bytes": {"allocated": int(memory * 2**30), "reserved": 0}, "by_rank": {}}
            write_json(summary, read_json(summary) | {"memory": peak})
    return load_runs(made.results)


def settle(made, name, seconds):
    """Metrics whose median step takes so long."""
    made.measure(name)
    path = made.results / "runs" / name / "metrics" / "summary.json"
    summary = read_json(path)
    summary["step_seconds"]["median"] = seconds
    write_json(path, summary)


def checks(ours, *earlier, asked=ASKED):
    return {check.quantity: check for check in baseline_checks(asked, ours, earlier)}


def test_five_runs_that_are_three_per_cent_slower_fail_and_five_honest_ones_pass(tmp_path):
    old = experiment(tmp_path / "old", seeds=5, chance=1)
    slower = checks(experiment(tmp_path / "slower", seeds=5, slower=1.03, chance=2), old)["step_seconds"]
    assert (slower.state, slower.verdict, slower.runs, slower.interval_by) == ("FAIL", "FAIL", (5, 5), "runs")
    assert slower.low > 1.02 and "at most 1.02 passes" in slower.detail
    for chance in range(3, 8):
        honest = checks(experiment(tmp_path / str(chance), seeds=5, chance=chance), old)["step_seconds"]
        assert (honest.state, honest.verdict) == ("PASS", "PASS")


def test_of_one_run_each_the_speed_cant_be_told_and_how_many_would_is_said(tmp_path):
    old, new = experiment(tmp_path / "old"), experiment(tmp_path / "new", slower=1.03)
    speed = checks(new, old)["step_seconds"]
    assert (speed.state, speed.verdict, speed.interval_by) == ("NOT_RUN", "can't be told", "blocks")
    assert speed.runs_needed > 2 and f"{speed.runs_needed} runs on each side would tell in 80% of cases" in speed.detail
    assert "which is assumed" in speed.detail and "don't show how runs differ" in speed.detail
    stated = dataclasses.replace(ASKED, spread=0.002)
    assert checks(new, old, asked=stated)["step_seconds"].state == "NOT_RUN"  # one run's own steps are noisier
    new = experiment(tmp_path / "newer", slower=1.2)
    known = checks(new, old, asked=stated)["step_seconds"]
    assert (known.state, known.interval_by) == ("FAIL", "stated")


def test_several_bundles_of_the_baseline_count_together_for_the_speed(tmp_path):
    """As they show what days and machines change; the losses of one seed are one observation."""
    earlier = [experiment(tmp_path / str(chance), chance=chance) for chance in range(4)]
    found = checks(experiment(tmp_path / "new", chance=9, higher=0.2), *earlier)
    assert found["step_seconds"].runs == (1, 4) and found["step_seconds"].interval_by == "runs"
    assert found["loss.tail_mean"].runs == (1, 1) and found["loss.tail_mean"].verdict == "can't be told"


def test_equal_losses_pass_with_one_run_and_others_need_seeds(tmp_path):
    old = experiment(tmp_path / "old", seeds=3)
    same = checks(experiment(tmp_path / "same"), old[:1])["loss.tail_mean"]
    assert (same.state, same.detail) == ("PASS", "curves of 1 run: equal to the last bit: 200 steps")
    one = checks(experiment(tmp_path / "one", higher=0.1), old[:1])["loss.tail_mean"]
    assert one.verdict == "can't be told"
    higher = checks(experiment(tmp_path / "higher", seeds=3, higher=0.1), old)["loss.tail_mean"]
    assert (higher.state, higher.runs) == ("FAIL", (3, 3)) and higher.ratio == pytest.approx(1 + 0.1 / 3.12, rel=1e-3)
    lower = checks(experiment(tmp_path / "lower", seeds=3, higher=-0.1), old)["loss.tail_mean"]
    assert lower.state == "PASS"


def test_losses_that_agree_are_compared_seed_by_seed_too(tmp_path):
    """The interval shows what the pairs differ by: seeds differ by far more."""
    old, same = experiment(tmp_path / "old", seeds=3), experiment(tmp_path / "same", seeds=3, higher=1e-6)
    found = checks(same, old)["loss.tail_mean"]
    assert found.detail.startswith("curves of 3 runs: within rounding: 200 steps agree to 1.0e-06;")
    assert (found.state, found.runs, found.interval_by) == ("PASS", (3, 3), "runs")
    assert 1 - 1e-6 < found.low <= found.ratio <= found.high < 1 + 1e-6


def test_memory_that_is_the_same_passes_and_more_of_it_fails_with_runs_that_show_no_spread(tmp_path):
    old = experiment(tmp_path / "old", seeds=2, memory=10)
    assert checks(experiment(tmp_path / "same", seeds=2, memory=10), old)["memory.measured_gib"].state == "PASS"
    assert checks(experiment(tmp_path / "more", seeds=2, memory=11), old)["memory.measured_gib"].state == "FAIL"
    one = checks(experiment(tmp_path / "one", memory=11), old[:1])["memory.measured_gib"]
    assert one.verdict == "can't be told" and one.interval_by == "nothing"
    assert "memory.measured_gib" not in checks(experiment(tmp_path / "cpu"), experiment(tmp_path / "cpu2"))


def test_what_is_missing_is_not_run(tmp_path):
    ours = experiment(tmp_path / "ours")
    [check] = baseline_checks(ASKED, ours, [[]])
    assert (check.state, check.detail) == ("NOT_RUN", "there is no run of the baseline of this name")
    bad = [dataclasses.replace(run, state="INVALID", reasons=["why"]) for run in ours]
    [check] = baseline_checks(ASKED, ours, [bad])
    assert check.detail == "dp1 of the baseline is INVALID"


def test_a_run_that_was_not_trained_again_is_no_evidence(tmp_path):
    ours = experiment(tmp_path / "ours", seeds=2)
    [check] = baseline_checks(ASKED, ours, [ours])
    assert check.state == "NOT_RUN" and "it was not trained again" in check.detail
    earlier = experiment(tmp_path / "earlier", seeds=2)
    assert checks(ours, ours, earlier)["step_seconds"].runs == (2, 2)


def test_step_times_from_before_a_run_continued_in_place_do_not_count(tmp_path):
    [run] = experiment(tmp_path / "new")
    before = 120  # on a slower machine
    run.steps["attempt"] = [0] * before + [1] * (200 - before)
    run.steps.loc[: before - 1, "seconds"] = 1.0
    assert len(step_seconds(run)) == 200 - before - 3 and max(step_seconds(run)) < 1.0


def test_what_differs_is_said_and_runs_of_one_setting_count_together(tmp_path):
    old, new = experiment(tmp_path / "old", seeds=2), experiment(tmp_path / "new", seeds=2, micro_batch_size=4)
    assert [setting.names for setting in settings_of(new)] == [{"dp1", "dp1-seed1"}]
    found = checks(new, old)["step_seconds"]
    assert found.differs == ("training.micro_batch_size: 4, in the baseline none",)
    assert differences_of(new[0], new[1], "there") == []
    faster = dataclasses.replace(new[1], launched={"num_workers": 8, "index": "a", "store": "s"})
    assert [setting.names for setting in settings_of([new[0], faster])] == [{"dp1"}, {"dp1-seed1"}]
    assert differences_of(new[0], faster, "there") == ["launch.num_workers: 8, there none"]
