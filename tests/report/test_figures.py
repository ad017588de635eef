"""The bars of where the time went."""

import dataclasses

import matplotlib.pyplot as plt
import pytest
from fake_runs import FakeExperiment

from megaboa.report.figures import COLOURS, goodput_figure, startup_rows, time_rows
from megaboa.report.runs import load_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    experiment = FakeExperiment(tmp_path_factory.mktemp("time"))
    for run in ("dp1", "dp2"):
        experiment.completed_run(run, steps=20)
        experiment.measure(run)
    return load_runs(experiment.results)


def test_the_bars_of_a_run_fill_its_time(runs):
    figure, table = goodput_figure(runs)
    assert table.groupby("run")["time_share"].sum().tolist() == pytest.approx([1.0, 1.0])
    axes = figure.axes[0]
    for row in range(len(runs)):
        widths = [container[row].get_width() for container in axes.containers]
        assert sum(widths) == pytest.approx(1.0)
    shown = {container.get_label() for container in axes.containers}
    assert "productive" in shown <= set(COLOURS)
    assert [text.get_text() for text in axes.texts] == [f"{run.goodput.goodput:.0%}" for run in runs]
    plt.close(figure)


def test_the_table_has_the_same_numbers(runs):
    rows = time_rows(runs)
    assert [row["run"] for row in rows] == ["dp1", "dp2"] and "lost" not in rows[0]["seconds"]
    assert sum(rows[0]["seconds"].values()) == pytest.approx(rows[0]["allocated"])


def test_runs_of_older_results_have_no_bar(runs):
    old = [dataclasses.replace(run, goodput=None) for run in runs]
    assert goodput_figure(old) is None and time_rows(old) == []


def test_a_start_has_a_row_for_every_attempt_that_came_to_a_step(runs):
    parts = {"launch": 1.0, "import": 9.0, "first_step": 2.0}
    first, *_ = runs[0].goodput.attempts
    attempts = (dataclasses.replace(first, startup=parts), dataclasses.replace(first, startup={"launch": 1.0}))
    started = dataclasses.replace(runs[0], goodput=dataclasses.replace(runs[0].goodput, attempts=attempts))
    assert startup_rows([started]) == [{"run": "dp1", "attempt": first.attempt, "whole": 12.0, "seconds": parts}]
    old = dataclasses.replace(runs[0], goodput=dataclasses.replace(runs[0].goodput, attempts=(attempts[1],)))
    assert startup_rows([old]) == []
