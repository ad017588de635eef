"""What the runs took of their GPUs: in the page, in the table of the runs, and for figures of one's own."""

import dataclasses

import pytest
from fake_runs import FakeExperiment

from megaboa.report import machines
from megaboa.report.frames import Frames
from megaboa.report.runs import load_runs
from megaboa.report.table_files import runs_table

TOOK = {
    "tflops_per_rank": {"median": 568.2},
    "mfu": {"median": 0.574},
    "memory": {"peak_bytes": {"allocated": 57.5 * 2**30}},
    "energy": {"joules_per_gpu_and_step": {"median": 189.7}, "watts_per_gpu": {"median": 668.0}},
    "stragglers": {"slowest_over_fastest": {"median": 1.034}, "slowest": {"1": 18, "0": 2}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    experiment = FakeExperiment(tmp_path_factory.mktemp("machines"))
    for run in ("cpu", "gpu"):
        experiment.completed_run(run, steps=20)
        experiment.measure(run)
    found = load_runs(experiment.results)
    return [dataclasses.replace(run, summary=run.summary | (TOOK if run.name == "gpu" else {})) for run in found]


def test_a_row_for_every_run_of_which_something_is_known(runs):
    assert machines.rows(runs) == [
        machines.Took("gpu", 568.2, 0.574, 57.5, 189.7, 668.0, 1.034, "1, in 18 of 20 reports")
    ]


def test_they_are_columns_of_tables_and_figures(runs):
    table = runs_table(runs, Frames(runs)).set_index("run")
    assert table.loc["gpu", "energy.joules_per_gpu"] == 189.7 and table.loc["gpu", "energy.watts_per_gpu"] == 668.0
    assert table.loc["gpu", "stragglers.slowest_over_fastest"] == 1.034
    assert table.loc["gpu", "memory.measured_gib"] == 57.5
