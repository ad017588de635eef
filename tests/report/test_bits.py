"""megaboa.report.bits: validation losses that can be compared between tokenizers."""

import json
import math

import made
import pytest
from fake_runs import FakeExperiment
from test_page import page, rows

from megaboa.files import write_json
from megaboa.records import TextRead, Verification, write
from megaboa.report.figures import standard_figures
from megaboa.report.frames import Frames
from megaboa.report.runs import load_runs
from megaboa.report.tables import settings_table

LOSS, FAR = 2.0 * math.log(2), 6.0 * math.log(2)  # nats per token
SIZES = {"small": 2.0, "large": 4.0}  # bytes per token of each tokenizer's corpora


def write_corpus(results, name, size, text="a", tokenizer="1", documents=30):
    """A corpus of two text keys, the first of which has three quarters of the tokens."""
    source = TextRead(path=f"{text}.jsonl", kind="jsonl", size=1, sha256=text, documents=documents)
    keys = [("q", 300, size and size - 0.5), ("a", 100, size and size + 1.5)]
    datasets = [made.dataset(key=key, tokens=n, bytes_per_token=b, documents=documents) for key, n, b in keys]
    write(results / "data" / f"{name}.json", made.corpus(*datasets, sources=(source,), tokenizer_digest=tokenizer))


def write_run(experiment, run, corpus, far, **more):
    folder = experiment.results / "runs" / run
    data = {"blend": {corpus: 1.0}, "split": "98,1,1", "validation_sets": {"far": {far: 1.0}}, **more.pop("data", {})}
    write_json(folder / "run.json", {"data": data, **more})
    path = folder / "metrics" / "summary.json"
    summary = json.loads(path.read_text())
    summary["validation"] = [{"step": 10, "losses": {"lm loss": LOSS, "valid/far": FAR}}]
    write_json(path, summary)


@pytest.fixture
def experiment(tmp_path):
    """Two runs on the same texts, by two tokenizers, with a corpus for each."""
    made_of = FakeExperiment(tmp_path)
    for run, size in SIZES.items():
        made_of.completed_run(run, steps=10)
        made_of.measure(run)
        write_corpus(made_of.results, run, size, tokenizer=run)
        write_corpus(made_of.results, f"far-{run}", size, text="far", tokenizer=run)
        write_run(made_of, run, run, f"far-{run}")
    return made_of


def test_runs_of_two_tokenizers_are_compared_per_byte(experiment, tmp_path, svg_alone):
    runs = load_runs(experiment.results)
    html = page(runs, tmp_path / "report", agreements=[])
    table = rows(html)
    assert "don't hold all of the text" not in html and 'compare their <a href="#bits-per-byte">' in html
    at = table.index("run|main|far")  # one column for the same documents, whose corpora have two names
    assert table[at + 1 : at + 3] == ["small|1.0000|3.0000", "large|0.5000|1.5000"]
    frames = Frames(runs)
    assert frames.runs["bits_per_byte"].tolist() == [1.0, 0.5]
    sets = ["main", "far (all of far-small)", "main", "far (all of far-large)"]
    assert frames.validation["set"].tolist() == sets
    assert frames.validation["bits_per_byte"].tolist() == [1.0, 3.0, 0.5, 1.5]
    assert [one.y for one in standard_figures(frames) if one.name == "validation"] == ["bits_per_byte"]
    seeds = Frames(runs, {run.name: {"training.seed": place} for place, run in enumerate(runs)})
    assert settings_table(runs, seeds)["bits_per_byte"].tolist() == [0.75]


def test_tokens_that_lose_text_are_named(experiment, tmp_path, svg_alone):
    """Such as those of a tokenizer for lower case."""
    verified = Verification(corpus="far-small", digest="1", compared=200, decoded_exactly=25)
    write(experiment.results / "data" / "far-small" / "verification.json", verified)
    html = page(load_runs(experiment.results), tmp_path / "report", agreements=[])
    assert "documents that their tokens restore: small 12.5%." in " ".join(html.split())


def test_sets_of_other_documents_have_columns_of_their_own(experiment, tmp_path, svg_alone):
    write_corpus(experiment.results, "far-large", 4.0, text="further", tokenizer="large")
    table = rows(page(load_runs(experiment.results), tmp_path / "report", agreements=[]))
    assert "run|main|far (all of far-small)|far (all of far-large)" in table


def test_with_one_tokenizer_losses_are_compared_as_they_are(experiment, tmp_path, svg_alone):
    for run, size in SIZES.items():
        write_corpus(experiment.results, run, size)
        write_corpus(experiment.results, f"far-{run}", size, text="far")
    runs = load_runs(experiment.results)
    assert 'id="bits-per-byte"' not in page(runs, tmp_path / "report", agreements=[])
    frames = Frames(runs)
    assert frames.runs["bits_per_byte"].tolist() == [1.0, 0.5], "for figures of the user's own"
    assert [one.y for one in standard_figures(frames) if one.name == "validation"] == ["loss"]


@pytest.mark.parametrize(
    "more",
    [{"task": "sft"}, {"data": {"eod_mask_loss": True}}, {"data": {"fim": {"rate": 0.5}}}, {"data": {"blend": {}}}],
)
def test_a_loss_of_other_tokens_than_the_texts_has_no_bits(experiment, more):
    write_run(experiment, "small", "small", "none", **more)
    small, large = load_runs(experiment.results)
    assert not small.bits_per_byte and large.bits_per_byte


def test_tokens_without_text_have_no_bits_and_keep_the_figure_of_losses(experiment):
    write_corpus(experiment.results, "small", None, tokenizer="small")
    runs = load_runs(experiment.results)
    assert [list(run.bits_per_byte) for run in runs] == [["far (all of far-small)"], ["main", "far (all of far-large)"]]
    assert [one.y for one in standard_figures(Frames(runs)) if one.name == "validation"] == ["loss"]


def test_a_blend_has_the_mean_of_its_shares(experiment):
    write_run(experiment, "small", "small", "far-small", data={"blend": {"small": 3.0, "large": 1.0}})
    assert load_runs(experiment.results)[0].bits_per_byte["main"] == pytest.approx(2 / 2.5)
