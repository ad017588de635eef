"""What the page says about the data that runs read."""

import json

import pytest
from fake_runs import FakeExperiment
from test_page import page, rows

from megaboa.files import write_json
from megaboa.records import CorpusRead, DataIndex, write
from megaboa.report.blends import DataRead, last_validation, load_data
from megaboa.report.runs import load_runs

CORPORA = [
    CorpusRead(name="web", weight=0.75, tokens_asked=3000, tokens=10000, epochs=0.3),
    CorpusRead(name="law", weight=0.25, tokens_asked=1000, tokens=100, epochs=10.0),
]


@pytest.fixture
def experiment(tmp_path):
    experiment = FakeExperiment(tmp_path)
    for run, index in (("a", "one"), ("b", "two"), ("c", "one"), ("d", None)):
        experiment.completed_run(run, steps=10)
        experiment.measure(run)
        write_json(experiment.results / "runs" / run / "launch.json", {"index": index})
    for index in ("one", "two"):
        manifest = DataIndex(name=index, cache="cache", samples={}, corpora=tuple(CORPORA), max_epochs=4.0)
        write(experiment.results / "data" / "indexes" / f"{index}.json", manifest)
    return experiment


def test_runs_that_share_an_index_are_named_together(experiment):
    found = load_data(experiment.results, load_runs(experiment.results))
    assert found == [DataRead(["a", "c"], CORPORA, 4.0), DataRead(["b"], CORPORA, 4.0)]


def test_the_page_shows_weights_and_epochs_and_where_they_are_too_many(experiment, tmp_path):
    runs = load_runs(experiment.results)
    table = rows(page(runs, tmp_path / "report", agreements=[], data=load_data(experiment.results, runs)))
    assert "a, c|web|0.75|3,000|10,000|0.3" in table
    assert "a, c|law|0.25|1,000|100|10 more than 4" in table


def test_the_page_shows_the_loss_of_every_validation_set(experiment, tmp_path):
    path = experiment.results / "runs" / "b" / "metrics" / "summary.json"
    summary = json.loads(path.read_text())
    summary["validation"] = [{"step": 10, "losses": {"lm loss": 3.5, "valid/far": 4.25}}]
    write_json(path, summary)
    runs = load_runs(experiment.results)
    assert last_validation(runs) == [("b", {"main": 3.5, "far": 4.25})]
    table = rows(page(runs, tmp_path / "report", agreements=[]))
    assert "b|main|3.5000" in table and "b|far|4.2500" in table
