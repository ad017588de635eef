"""The screen that a dry run ends with, and what a plan asks of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megaboa.check import costs
from megaboa.plan import Plan, screen
from megaboa.plan.screen import Job, Submission, describe, submission
from megaboa.run.recovery import links, wall_seconds

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


def test_without_a_container_the_job_of_the_image_says_what_it_does(plan_of):
    shown = screen.lines(plan_of("training: {train_iters: 10}\n"), [Job("image", "", "not made yet")], [])
    assert "image           1  not made yet (no container: it lists this Python's packages)" in shown


def test_nothing_to_do_is_said():
    assert screen.table([], []) == ["Nothing to be done: everything exists, and nothing has changed."]


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


# What training asks of a cluster

PlanOf = Callable[..., Plan]
SIZES = "sweep: {runs: {a: {}, b: {resources.nodes: 4, resources.gpus_per_node: 2, training.seed: 1}}}\n"


def said(plan: Plan, trained: tuple[str, ...] = (), device: str = "cuda") -> list[str]:
    return describe(submission(plan.runs, trained), device)


@pytest.mark.parametrize(("runtime", "seconds"), [("90", 5400), ("90m", 5400), ("4h", 14_400), ("2d", 172_800)])
def test_wall_times(runtime: str, seconds: int) -> None:
    assert wall_seconds(runtime) == seconds


@pytest.mark.parametrize(
    ("seconds", "save", "jobs"),
    [
        # Of an hour 5 minutes go to a save that was never measured, and 30 + 1.5 * 20 s to one that takes 20 s.
        (3300, None, 1),
        (3301, None, 2),
        (3540, 20.0, 1),
        (10 * 3540 + 1, 20.0, 11),
        (0, None, 0),
        (-5, None, 0),
    ],
)
def test_links_of_a_chain(seconds: float, save: float | None, jobs: int) -> None:
    assert links(seconds, 3600, save=save) == jobs


def test_the_plan_has_a_row_of_what_each_run_asks_for(plan_of: PlanOf) -> None:
    row = plan_of("resources: {nodes: 2, gpus_per_node: 4, runtime: 1h, step_seconds: 660}").runs[0].row
    assert {key: row[key] for key in ("nodes", "gpus_per_node", "runtime", "jobs")} == {
        **{"nodes": 2, "gpus_per_node": 4, "runtime": "1h"},
        "jobs": 2,  # ten steps in an hour less five minutes
    }


def test_the_number_of_jobs_is_a_dash_where_nobody_knows_it(plan_of: PlanOf, tmp_path: Path) -> None:
    plan_of("resources: {nodes: 2}").write(tmp_path)
    head, line = [line.split("\t") for line in (tmp_path / "small/plan.tsv").read_text().splitlines()]
    assert dict(zip(head, line, strict=True))["jobs"] == "-"


def test_one_job(plan_of: PlanOf) -> None:
    plan = plan_of("resources: {nodes: 2, gpus_per_node: 4, runtime: 90m}")
    assert said(plan) == ["training: 1 job, 2 nodes x 4 GPUs; at most 12 GPU-hours for the job of 90m"]


def test_spares_are_told_and_paid_for(plan_of: PlanOf) -> None:
    (line,) = said(plan_of("resources: {nodes: 2, spare_nodes: 1, gpus_per_node: 4, runtime: 10h}\n"))
    assert "2 nodes x 4 GPUs and 1 spare; at most 120 GPU-hours for the job of 10h" in line


def test_jobs_of_different_sizes(plan_of: PlanOf) -> None:
    plan = plan_of(SIZES + "resources: {runtime: 2d}")
    size = "the largest 4 nodes x 2 GPUs, 9 GPUs in all"
    assert said(plan) == [f"training: 2 jobs, {size}; at most 432 GPU-hours for one job each of 2d"]
    ranks = said(plan, device="cpu")[0]
    assert "4 nodes x 2 ranks, 9 ranks in all; at most 432 rank-hours" in ranks and "GPU" not in ranks


def test_jobs_of_one_size(plan_of: PlanOf) -> None:
    plan = plan_of("resources: {runtime: 30m}\nsweep: {grid: {training.seed: [1, 2, 3]}}")
    assert said(plan) == [
        "training: 3 jobs, each 1 node x 1 GPU, 3 GPUs in all; at most 1.5 GPU-hours for one job each of 30m"
    ]


def test_runs_that_are_trained_ask_for_nothing(plan_of: PlanOf) -> None:
    plan = plan_of(SIZES)
    expected = "training: 1 job (1 run trained already), 1 node x 1 GPU; at most 4 GPU-hours for the job of 4h"
    assert said(plan, ("b",)) == [expected]
    assert said(plan, ("a", "b")) == ["training: nothing to submit, 2 runs trained"]


def test_chains_and_hours_that_are_expected(plan_of: PlanOf) -> None:
    text = """
resources: {nodes: 2, gpus_per_node: 4, runtime: 1h}
sweep: {runs: {quick: {resources.step_seconds: 3.3}, slow: {resources.step_seconds: 33, training.seed: 1},
               unknown: {training.seed: 2}}}
"""
    plan = plan_of(text, training__train_iters=1000)
    assert [run.row["jobs"] for run in plan.runs] == [1, 10, None]
    second = "a run needs 1 to 10 jobs, one after the other; about 81 GPU-hours in all"
    assert said(plan)[1] == f"by resources.step_seconds (2 of 3 runs): {second}"
    assert said(plan, ("slow", "unknown"))[1] == (
        "by resources.step_seconds: a run needs 1 job; about 7.3 GPU-hours in all"
    )


GPUS = """
device: cuda
resources: {gpus_per_node: 8, gpu: h200-141g, runtime: 1h}
models: {dense: {config: {hidden_size: 4096, intermediate_size: 11008, num_hidden_layers: 32, num_attention_heads: 32,
  num_key_value_heads: 8, vocab_size: 32000}}}
training: {global_batch_size: 64, seq_length: 4096, train_iters: 10000}
"""


def test_hours_and_jobs_by_prediction_are_preflights(plan_of: PlanOf) -> None:
    plan = plan_of(GPUS, training__train_iters=10000)
    (run,) = plan.runs
    predicted = costs.of_run(run.facts)
    assert predicted.gpu_hours > 5 * 8, "one job of an hour is far from enough"
    assert run.row["jobs"] == run.jobs > 5
    first, second = said(plan)
    assert "at most 8 GPU-hours for the job of 1h" in first
    assert second == (
        f"by step times {predicted.source}: a run needs {run.jobs} jobs, one after the other; "
        f"about {predicted.gpu_hours:,.0f} GPU-hours in all"
    )


def test_several_sources_of_step_times_are_named_shortly(plan_of: PlanOf) -> None:
    runs = "{h: {}, b: {resources.gpu: b200-180g, training.seed: 2}, g: {resources.step_seconds: 1, training.seed: 3}}"
    second = said(plan_of(f"{GPUS}sweep: {{runs: {runs}}}"))[1]
    assert second.startswith("by predicted step times and resources.step_seconds: a run needs ")


def test_a_limit_of_hours_that_cannot_be_checked_is_said(plan_of: PlanOf) -> None:
    unknown = {"resources.gpu": "mi300-192g", "budget.gpu_hours": 1}
    assert plan_of(GPUS, **unknown).warnings[costs.UNCHECKED] == ["run"]
    known = plan_of(GPUS, **unknown, **{"resources.step_seconds": 1e-6})
    assert costs.UNCHECKED not in known.warnings


def test_a_step_time_says_nothing_about_a_recipe_of_unknown_length(plan_of: PlanOf, tmp_path: Path) -> None:
    recipe = tmp_path / "r.py"
    recipe.write_text("def configure(): ...\n")
    plan = plan_of(
        f"models: {{r: {{recipe: {recipe}, tokenizer: bpe}}}}\nmodel: r\nresources: {{step_seconds: 2}}",
        training__global_batch_size=8,
    )
    assert plan.runs[0].row["jobs"] is None and len(said(plan)) == 1


def test_no_runs_are_no_jobs() -> None:
    assert submission([]) == Submission(0, 0)
