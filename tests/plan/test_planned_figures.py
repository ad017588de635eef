"""Figures of a plan: their columns and filters, before any run is trained."""

from __future__ import annotations

import pytest

from megaboa.config import ConfigError
from megaboa.plan import specifications
from megaboa.plan.shared import Shared
from megaboa.records import ReportSpec, parse


@pytest.mark.parametrize(
    "mistake", [{"training.global_batch_size": 9, "parallel.tp": 2}, {"schedule.warmup_iters": 500}], ids=str
)
def test_figures_are_not_judged_by_the_runs_that_other_problems_leave(plan_of, mistake):
    """The swept keys are columns, even if no run can be planned."""
    text = (
        "sweep: {grid: {optimizer.lr: [0.1, 0.2], training.seed: [1, 2]}}\n"
        "report: {figures: [{name: a, kind: line, x: optimizer.lr, y: NAME, over: training.seed}]}\n"
    )
    for name, expected in (("validation", []), ("validaton", ["report.figures[0].y"])):
        with pytest.raises(ConfigError) as raised:
            plan_of(text.replace("NAME", name), **{"training.train_iters": 10, **mistake})
        keys = [problem.key for problem in raised.value.problems]
        assert [key for key in keys if key.startswith("report")] == expected and len(keys) > len(expected)


@pytest.mark.parametrize(
    ("column", "wanted", "note"),
    [
        ("optimizer.lr", "[0.2, 0.3]", "optimizer.lr 0.2 or 0.3; there are 0.1, 0.02"),
        ("optimizer.lr", "0.020", ""),
        ("optimizer.lr", "'0.1'", ""),
        ("parallel.sp", "false", "parallel.sp false; there are true"),
        ("parallel.sp", "[true, false]", ""),
        ("model", "moe", "model moe; there are dense"),
        ("validation", "0.3", ""),
    ],
)
def test_a_filter_that_no_run_matches_is_warned_of(plan_of, column, wanted, note):
    text = (
        "sweep: {runs: {a: {optimizer.lr: 0.1, parallel.sp: true}, b: {optimizer.lr: 0.02, parallel.sp: true}}}\n"
        f"report: {{figures: [{{name: mine, kind: bar, x: run, y: loss.last, filter: {{{column}: {wanted}}}}}]}}\n"
    )
    notes = plan_of(text, **{"training.train_iters": 10, "parallel.tp": 2, "resources.gpus_per_node": 2}).notes
    said = "warning: report.figures[0].filter: mine has nothing to show: no run has "
    assert [one for one in notes if "figures" in one] == ([f"{said}{note}"] if note else [])


LABELLED = (
    "sweep: {grid: {size: {s: {optimizer.lr: 0.1}, m: {optimizer.lr: 0.2}}, "
    "layout: {one: {training.seed: 1}, two: {training.seed: 2}}}, "
    "zip: {mult: {x5: {schedule.warmup_iters: 1}, x20: {schedule.warmup_iters: 2}}, "
    "optimizer.weight_decay: [0.1, 0.2]}}\n"
    "report: {figures: [{name: mine, kind: bar, x: run, y: loss.last, hue: HUE, filter: {mult: WANTED}}]}\n"
)


def test_an_axis_with_labels_is_a_column(plan_of, tmp_path):
    """One that is called as another column is not."""
    plan = plan_of(LABELLED.replace("HUE", "size").replace("WANTED", "x5"))
    assert plan.axes == {"size": ("s", "m"), "mult": ("x5", "x20")} and not [one for one in plan.notes if "mine" in one]
    assert plan["s-one-x5-wd0.1"].labels == {"size": "s", "layout": "one", "mult": "x5"}
    report = parse(ReportSpec, specifications.contents(Shared(plan, tmp_path))["report.json"], "report.json")
    assert [(axis.name, axis.labels) for axis in report.axes] == [*plan.axes.items()]
    assert report.axes[0].runs == {run.name: run.name.partition("-")[0] for run in plan.runs}
    agreed = "report: {agreements: [{reference: s-one-x5-wd0.1, runs: [m-one-x5-wd0.1], twins: 1}], "
    twin = plan_of(LABELLED.replace("HUE", "size").replace("WANTED", "x5").replace("report: {", agreed))
    assert twin["s-one-x5-wd0.1-twin1"].labels == plan["s-one-x5-wd0.1"].labels
    notes = plan_of(LABELLED.replace("HUE", "layout").replace("WANTED", "x6")).notes
    assert [one for one in notes if one.endswith("mine has nothing to show: no run has mult x6; there are x5, x20")]
    with pytest.raises(ConfigError, match=r"there is no column 'sise'; did you mean 'size'\?"):
        plan_of(LABELLED.replace("HUE", "sise").replace("WANTED", "x5"))


@pytest.mark.parametrize("asked", ["log: [x]", "fit: optimum"])
def test_labels_are_no_numbers(plan_of, asked):
    figure = f"{{name: mine, kind: scatter, x: size, y: loss.last, {asked}}}"
    text = LABELLED.partition("report:")[0] + f"report: {{figures: [{figure}]}}\n"
    with pytest.raises(ConfigError, match=r"needs numbers, and x: size has labels") as raised:
        plan_of(text)
    assert [one.key for one in raised.value.problems] == [f"report.figures[0].{asked.partition(':')[0]}"]
