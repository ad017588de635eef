"""The screen that a dry run ends with."""

from dataclasses import replace

from megaboa.plan import screen
from megaboa.plan.screen import Job

TWELVE = "sweep: {grid: {optimizer.lr: [1.0e-3, 2.0e-3, 3.0e-3], training.seed: [1, 2, 3, 4]}}\n"
KINDS = [f"rule{number}" for number in range(20)]


def test_runs_what_is_swept_jobs_and_hours(plan_of):
    plan = plan_of(TWELVE + "training: {train_iters: 10}\n")
    jobs = [Job("train", run.name, "not made yet") for run in reversed(plan.runs)]
    hours = "training: 12 jobs, each 1 node x 8 GPUs"
    shown = screen.lines(plan, [*jobs, Job("report", "", "after train")], [hours])
    assert shown == [
        "experiment small: 12 runs on cpu, in results/small/",
        "swept:",
        "  optimizer.lr: 0.001, 0.002, 0.003",
        "  training.seed: 1, 2, 3, 4",
        "",
        "jobs to do  count  why",
        f"train          12  not made yet: {', '.join(run.name for run in plan.runs[:3])} and 9 more",
        "report          1  after train",
        "total          13",
        hours,
        "every job with its files and command: the same call with -p --quiet host",
    ]


def test_jobs_of_one_kind_that_run_for_different_reasons_are_told_apart():
    jobs = [Job("train", "a", "run.json changed"), Job("train", "b", "not made yet"), Job("train", "c", "not made yet")]
    (row,) = [line for line in screen.table(jobs, ["train"]) if line.startswith("train")]
    assert row.split(None, 2) == ["train", "3", "run.json changed: a; not made yet: b, c"]


def test_nothing_to_do_is_said():
    assert screen.table([], []) == ["Nothing to be done: everything is there, and nothing has changed."]


def test_warnings_come_last_and_are_summed_up_on_one_screen(plan_of):
    plan = plan_of(TWELVE + "training: {train_iters: 10}\n")
    plan = replace(plan, warnings={f"key{number}: is odd": ["a", "b"] for number in range(60)})
    jobs = [Job(kind, "x", "not made yet") for kind in KINDS]
    shown = screen.lines(plan, jobs, ["training: 12 jobs", "by resources.step_seconds: 2 jobs"])
    assert len(shown) <= screen.LINES == 40
    assert shown[-2].startswith("warning: key") and shown[-2].endswith("is odd (runs a, b)")
    assert shown[-1].endswith("more: -p --quiet host shows all")
    warned = [line for line in shown if line.startswith("warning")]
    assert len(warned) >= 2 and shown[-1].startswith(f"and {60 - len(warned)} more")
    everything = screen.lines(plan, jobs, [], everything=True)
    assert sum(line.startswith("warning") for line in everything) == 60


def test_a_sweep_of_many_keys_and_values_stays_short(plan_of):
    runs = "".join(f"    r{index}: {{training.seed: {index}}}\n" for index in range(200))
    keys = ["optimizer.lr: 1", "parallel.sp: false", "training.eval_iters: 0", "data.split: '9,1,0'", "seeds: 1"]
    more = "".join(f"    k{index}: {{{key}}}\n" for index, key in enumerate(keys[:4]))
    last = "    z: {optimizer.weight_decay: 0}\n"
    plan = plan_of(f"training: {{train_iters: 10}}\nsweep:\n  runs:\n{runs}{more}{last}")
    shown = screen.swept(plan)
    assert len(shown) == 1 + screen.SWEPT and shown[-1] == "  and 2 more keys: data.split, optimizer.weight_decay"
    assert all(len(line) < 140 for line in shown) and "more" in shown[1]
