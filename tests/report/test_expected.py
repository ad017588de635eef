"""Predictions and measurements, side by side."""

import dataclasses

import pytest
from fake_runs import FakeExperiment

from megaboa.check import overview
from megaboa.files import read_json, write_json, write_text
from megaboa.report.expected import load_expected
from megaboa.report.runs import load_runs


@pytest.fixture
def experiment(tmp_path):
    experiment = FakeExperiment(tmp_path)
    experiment.completed_run("a", steps=20)
    experiment.measure("a")
    experiment.plan_run("later")
    return experiment


def expect(experiment, **values):
    row = dict.fromkeys(overview.COLUMNS) | {"run": "a", "state": "PASS", "tokens": 1000, "tensors_gib": 11.0, **values}
    write_text(experiment.results / "preflight.tsv", overview.tsv([row]))


def test_a_peak_that_was_measured_stands_beside_the_prediction(experiment):
    expect(experiment, step_seconds=0.5, step_source="measured", disk_bytes=2.5e9)
    summary = experiment.results / "runs" / "a" / "metrics" / "summary.json"
    memory = {"attempt": 1, "peak_bytes": {"allocated": 10 * 2**30, "reserved": 12 * 2**30}, "by_rank": {}}
    write_json(summary, {**read_json(summary), "memory": memory})
    [found] = load_expected(experiment.results, load_runs(experiment.results))
    assert (found.predicted_gib, found.measured_gib, found.memory_error) == (11.0, 10.0, "+10.0%")
    assert (found.tokens, found.disk, found.predicted_seconds) == ("1k", "2.5 GB", 0.5)
    assert found.measured_seconds > 0


def test_without_a_gpu_there_is_no_peak(experiment):
    expect(experiment)
    [found] = load_expected(experiment.results, load_runs(experiment.results))
    assert found.measured_gib is None and found.memory_error == ""
    assert dataclasses.replace(found, measured_gib=0.0).memory_error == ""


def test_a_run_that_was_left_out_is_shown_as_invalid(experiment):
    path = experiment.results / "plan.tsv"
    head, *rows = path.read_text().splitlines()
    columns = head.split("\t")
    out = dict(zip(columns, rows[0].split("\t"), strict=True)) | {"run": "out", "state": "INVALID", "why": "no"}
    lines = ["\t".join([*columns, "state", "why"]), *(f"{row}\t-\t-" for row in rows), "\t".join(out.values())]
    path.write_text("\n".join(lines) + "\n")
    runs = {run.name: run for run in load_runs(experiment.results)}
    assert (runs["out"].state, runs["out"].reasons) == ("INVALID", ["no"])
    assert runs["a"].state == "PASS"


def test_without_preflight_nothing_is_shown(experiment):
    assert load_expected(experiment.results, load_runs(experiment.results)) == []
