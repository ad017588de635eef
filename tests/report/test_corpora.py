"""The data card."""

import json
import math
import re
from dataclasses import replace

import made
import pytest
from fake_runs import FakeExperiment
from test_page import page, rows

from megaboa.files import write_json
from megaboa.records import (
    BadRecords,
    CorpusRead,
    DataIndex,
    ExamplesRead,
    Filtered,
    ShownExample,
    Verification,
    read,
    write,
)
from megaboa.report.corpora import DataRead, left_out, load_corpora, load_data, visible
from megaboa.report.figures import tokens_text
from megaboa.report.runs import load_runs

CORPORA = [
    CorpusRead(name="web", weight=0.75, tokens_asked=3000, tokens=10000, epochs=0.3),
    CorpusRead(name="law", weight=0.25, tokens_asked=1000, tokens=100, epochs=10.0),
    CorpusRead(name="law", prefix="/data/law_1", weight=0.05, tokens_asked=200, tokens=100, epochs=2.0),
]


def manifest(name, keys=("text",)):
    dataset = {
        "documents": 30,
        "tokens": 12_000,
        "bytes_per_token": 3.456,
        "lengths": [0] * 6 + [10, 15, 5] + [0] * 23,
        "frequent": [[5, 900, " the"], [7, 500, "\n\t"], [8, 1, "<b>"]],
        "dropped": {"blank": 2},
    }
    datasets = [made.dataset(key=key, **dataset) for key in keys]
    return made.corpus(*datasets, name=name, encoders=("gigatoken 0.10.0",), bad=BadRecords(records=3))


def test_a_card_says_what_a_corpus_is(tmp_path):
    experiment = FakeExperiment(tmp_path)
    experiment.completed_run("a", steps=5)
    results = experiment.results
    for name, keys in (("one", ("text",)), ("two", ("q", "a"))):
        write_json(results / "specs" / "corpora" / f"{name}.json", {})
        write(results / "data" / f"{name}.json", manifest(name, keys))
    write_json(results / "specs" / "corpora" / "planned.json", {})
    verified = Verification(corpus="one", digest="1", compared=200, decoded_exactly=200)
    write(results / "data" / "one" / "verification.json", verified)
    cards = load_corpora(results)
    assert [card.name for card in cards] == ["one", "two: q", "two: a"]
    html = page([], tmp_path / "report", agreements=[], corpora=cards)
    expected = "one|30|12,000|3.46|2 blank, 3 unusable|gigatoken 0.10.0|200 documents|␣the ⏎⇥ &lt;b&gt;"
    assert expected in rows(html)
    assert "two: q|30|12,000|3.46|2 blank, 3 unusable|gigatoken 0.10.0|–|␣the ⏎⇥ &lt;b&gt;" in rows(html)
    assert re.search(r'id="figure-lengths"', html) and "given as tokens" not in html
    assert (tmp_path / "report" / "lengths.png").exists()


def test_a_card_of_tokens_that_no_tokenizer_reads_has_their_numbers(tmp_path):
    results = FakeExperiment(tmp_path).results
    write_json(results / "specs" / "corpora" / "old.json", {})
    dataset = made.dataset(
        documents=3, tokens=8, bytes_per_token=None, lengths=[1, 1, 1] + [0] * 37, frequent=[[5, 5], [7, 1]]
    )
    write(results / "data" / "old.json", made.corpus(dataset, name="old", encoders=(), is_given=True))
    html = page([], tmp_path / "report", agreements=[], corpora=load_corpora(results))
    assert "old|3|8|–|none|–|–|5 7" in rows(html)
    assert "<p>old: given as tokens. A dash stands for what only their text would show" in html


def test_a_card_shows_unknown_tokens_and_sequences_of_documents(tmp_path):
    results = FakeExperiment(tmp_path).results
    write_json(results / "specs" / "corpora" / "c.json", {})
    dataset = made.dataset(
        documents=30, whole_documents=10, tokens=1000, unknown=123, lengths=[0] * 4 + [30] + [0] * 27
    )
    write(results / "data" / "c.json", made.corpus(dataset, name="c"))
    html = page([], tmp_path / "report", agreements=[], corpora=load_corpora(results))
    assert "c|30 sequences of 10 documents|1,000 12% unknown to the tokenizer|" in "".join(rows(html))


def test_without_corpora_there_is_no_card(tmp_path):
    html = page([], tmp_path / "report", agreements=[], corpora=())
    assert 'id="data"' not in html and not (tmp_path / "report" / "lengths.png").exists()


def test_what_was_left_out_is_said_in_words():
    assert left_out({}, 0) == "none"
    assert left_out({"blank": 1204, "duplicate": 17}, 0) == "1,204 blank, 17 duplicate"
    filtered = Filtered(records=3, reasons={"German": 3})
    assert left_out({"blank": 2}, 1, filtered) == "2 blank, 1 unusable, 3 by the filter: German"


def test_what_a_filter_dropped_is_shown_once_for_all_keys_of_a_corpus(tmp_path):
    experiment = FakeExperiment(tmp_path)
    write_json(experiment.results / "specs" / "corpora" / "two.json", {})
    filtered = Filtered(records=1, reasons={"German": 1}, samples={"German": ["a.jsonl, byte 0: <b> ja"]})
    write(experiment.results / "data" / "two.json", replace(manifest("two", ("q", "a")), filtered=filtered))
    html = page([], tmp_path / "report", agreements=[], corpora=load_corpora(experiment.results))
    assert html.count("1 by the filter: German") == 2
    assert html.count("<li>German: a.jsonl, byte 0: &lt;b&gt; ja</li>") == 1


def test_blanks_can_be_seen_and_powers_of_two_are_short():
    assert visible(" a\r\n") == "␣a␍⏎"
    assert [tokens_text(2**power) for power in (0, 9, 10, 15, 20, 31)] == ["1", "512", "1k", "32k", "1M", "2G"]


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


def test_the_page_shows_weights_and_epochs_and_where_they_are_too_many(experiment, tmp_path, svg_alone):
    runs = load_runs(experiment.results)
    table = rows(page(runs, tmp_path / "report", agreements=[], data=load_data(experiment.results, runs)))
    assert "a, c|web|0.75|3,000|10,000|0.3" in table
    assert "a, c|law|0.25|1,000|100|10 more than 4" in table
    assert "a, c|law: /data/law_1|0.05|200|100|2" in table


def test_the_page_shows_an_example_and_which_of_its_tokens_count(experiment, tmp_path, svg_alone):
    pieces = (("<user>Is 1 < 2 & 3?", False), ("Yes.<end>", True))
    shown = ShownExample(corpus="chats", tokens=12, pieces=pieces)
    numbers = {"examples": 1920, "tokens": 500, "counted": 100, "longest": 90, "cut": 7, "silent": 3, "positions": 1000}
    path = experiment.results / "data" / "indexes" / "one.json"
    write(path, replace(read(DataIndex, path), examples=ExamplesRead(**numbers, template="none", shown=shown)))
    runs = load_runs(experiment.results)
    html = page(runs, tmp_path / "report", agreements=[], data=load_data(experiment.results, runs))
    text = html if isinstance(html, str) else (tmp_path / "report" / "index.html").read_text()
    assert '<pre class="example">&lt;user&gt;Is 1 &lt; 2 &amp; 3?<mark>Yes.&lt;end&gt;</mark></pre>' in text
    said = "1,920 examples of chats, 500 tokens, of which 100 count in the loss; 50.0% of the positions"
    assert said in " ".join(text.split()) and "7 are cut, and of 3 nothing that counts is left" in text


def test_the_page_shows_the_loss_of_every_validation_set(experiment, tmp_path, svg_alone):
    path = experiment.results / "runs" / "b" / "metrics" / "summary.json"
    summary = json.loads(path.read_text())
    summary["validation"] = [{"step": 10, "losses": {"lm loss": 3.5, "valid/far": 4.25, "valid/odd": None}}]
    summary["not_finite"] = {"validation.0.losses.valid/odd": "inf"}
    write_json(path, summary)
    runs = load_runs(experiment.results)
    assert runs[1].last_losses == {"main": 3.5, "far": 4.25, "odd": math.inf}
    table = rows(page(runs, tmp_path / "report", agreements=[]))
    assert table[table.index("run|main|far|odd") + 1] == "b|3.5000|4.2500|inf"
    assert "|last loss|valid. loss|step time|" in table[0] and "|3.5000|" in table[2]
