"""The table of metrics: the report has what the plan accepts, and page and tables what runs took of their GPUs."""

import dataclasses
import types
import typing
from pathlib import Path

import pytest
from fake_runs import FakeExperiment

from megaboa import metrics
from megaboa.config.models.outputs import Figure
from megaboa.plan.planned_figures import column_problem
from megaboa.records import Goodput, Spread, Summary
from megaboa.report import page
from megaboa.report.frames import Frames
from megaboa.report.runs import load_runs
from megaboa.report.tables import runs_table

ROOT = Path(__file__).parents[2]

DOCUMENTS = {"summary": Summary, "goodput": Goodput}
TOOK = {
    "tokens_before": 1000,
    "tflops_per_rank": {"median": 568.2},
    "mfu": {"median": 0.574},
    "memory": {"peak_bytes": {"allocated": 57.5 * 2**30}},
    "energy": {"joules_per_gpu_and_step": {"median": 189.7}, "watts_per_gpu": {"median": 668.0}},
    "gpus": {
        "total": {"watts_peak": 702.4, "celsius_most": 71, "power_capped": 0.8, "too_hot": 0.0, "power_braked": 0.0},
    },
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
    [row] = page.machines(runs)
    assert row == {"run": "gpu", "values": row["values"], "slowest": "1, in 18 of 20 reports"}
    assert row["values"] == {
        "tflops_per_gpu": 568.2,
        "mfu": 0.574,
        "memory.measured_gib": 57.5,
        "energy.joules_per_gpu": 189.7,
        "energy.watts_per_gpu": 668.0,
        "gpus.watts_peak": 702.4,
        "gpus.celsius_most": 71,
        "gpus.power_capped": 0.8,
        "gpus.too_hot": 0.0,
        "gpus.power_braked": 0.0,
        "stragglers.slowest_over_fastest": 1.034,
    }


def test_they_are_columns_of_tables_and_figures(runs):
    table = runs_table(runs, Frames(runs)).set_index("run")
    assert table.loc["gpu", "energy.joules_per_gpu"] == 189.7 and table.loc["gpu", "energy.watts_per_gpu"] == 668.0
    assert table.loc["gpu", "stragglers.slowest_over_fastest"] == 1.034
    assert table.loc["gpu", "memory.measured_gib"] == 57.5


@pytest.mark.parametrize("rows", metrics.METRICS)
def test_a_figure_may_ask_for_every_column_that_its_table_has(runs, rows):
    """Energy and stragglers were columns of the report that the plan refused."""
    table = Frames(runs).table(rows)
    for name in metrics.columns(rows):
        assert name in table.columns
        assert column_problem(Figure(name="mine", kind="scatter", data=rows, x="run", y=name), ()) is None
    wrong = Figure(name="mine", kind="bar", x="run", y="energy.watts")
    assert column_problem(wrong, ())[1].startswith(
        "there is no column 'energy.watts'; did you mean 'energy.watts_per_gpu'?"
    )


@pytest.mark.parametrize("metric", [one for one in metrics.METRICS["runs"] if one.source], ids=lambda one: one.name)
def test_a_source_is_a_place_in_a_run_s_documents(metric):
    """A misspelt one is an empty column, which no table shows."""
    document, *path = metric.source.split(".")
    if document == "preflight":  # the report's own document
        assert path == ["tensors_gib"]
        return
    value = kind_at(DOCUMENTS[document], path)
    assert value in (int, float), f"metrics.py: {metric.name}: {metric.source} is no number: {value}"
    if metric.spread:
        assert path[-1] == "median" and kind_at(DOCUMENTS[document], path[:-1]) is Spread, metric.name


def kind_at(kind, path):
    """The type at this place of a record. Keys of mappings may be any."""
    for part in path:
        if typing.get_origin(kind) is tuple and part == "last":
            kind = typing.get_args(kind)[0]
        elif typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
        else:
            known = typing.get_type_hints(kind)
            assert part in known, f"{kind.__name__} (records/summaries.py) has no {part!r}: {sorted(known)}"
            kind = known[part]
        if isinstance(kind, types.UnionType):
            [kind] = [one for one in typing.get_args(kind) if one is not types.NoneType]
    return kind


def test_a_column_is_calculated_or_looked_up_not_both(runs):
    """The table of runs took `trained_tokens` from elsewhere than its source said."""
    [run] = [run for run in runs if run.name == "gpu"]
    row = Frames(runs).runs.set_index("run").loc["gpu"]
    for metric in metrics.METRICS["runs"]:
        value = metric.of({**run.documents, "preflight": {}}) if metric.source else None
        if value is not None:
            assert row[metric.name] == value, metric.name


def test_the_docs_name_every_column():
    text = (ROOT / "docs" / "how-to" / "report.md").read_text(encoding="utf-8")
    columns = {name for rows in metrics.METRICS for name in metrics.columns(rows) if name != "world_size"}
    missing = {name for name in columns if f"`{name.removesuffix('.p5').removesuffix('.p95')}`" not in text}
    assert not missing, "docs/how-to/report.md lacks columns"


def test_the_docs_name_every_field_of_a_summary_and_every_quantity_of_published_tables():
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    fields = text.split("## `summary.json`")[1].split("### GPUs")[0]
    known = {field.name for field in dataclasses.fields(Summary)} - {"more"}  # what newer versions wrote
    missing = {name for name in known if f"`{name}`" not in fields}
    assert not missing, "docs/reference/metrics.md, summary.json, lacks fields"
    quantities = text.split("Quantities are ")[1].split(".")[0]
    missing = {metric.name for metric in metrics.used("published") if f"`{metric.name}`" not in quantities}
    assert not missing, "docs/reference/metrics.md, published numbers, lacks quantities"


def test_units_are_written_as_people_read_them():
    assert [metrics.named(name).unit for name in ("mfu", "step_seconds", "resources.step_seconds", "loss")] == [
        *(metrics.SHARE, metrics.SECONDS, metrics.SECONDS, "")
    ]
    assert [metrics.label(name) for name in ("mfu", "optimizer.lr", "evaluation.accuracy", "gbs")] == [
        *("MFU", "learning rate", "accuracy", "gbs")
    ]
    scores = ("evaluation.validation loss", "evaluation.n", "evaluation.evaluation.n")
    assert tuple(map(metrics.label, scores)) == scores, "columns that the table of settings has already"
    assert all(
        map(metrics.is_timed, ("time", "seconds", "seconds.p25", "step_seconds.p5", "tokens_per_second_per_gpu"))
    )
    assert not any(map(metrics.is_timed, ("loss", "loss.last", "tokens", "optimizer.lr", "memory.measured_gib")))
