"""The page: what it shows, that it needs nothing else, and that nobody's name can break it."""

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from fake_runs import FakeExperiment

from megaboa.check import overview
from megaboa.files import write_text
from megaboa.records import AgreementSpec, Counts
from megaboa.report.agreement import agreement_checks
from megaboa.report.checks import number_checks
from megaboa.report.contents import Contents
from megaboa.report.corpora import CorpusCard
from megaboa.report.drawing import draw
from megaboa.report.expected import load_expected
from megaboa.report.frames import Frames
from megaboa.report.notes import ReportError, read_captions
from megaboa.report.page import FIGURES, render, verdict_text
from megaboa.report.runs import load_runs
from megaboa.report.style import Shades
from megaboa.report.tables import settings_table, swept_columns

CAPTIONS = Path(__file__).parents[2] / "workflow" / "report" / "captions.yaml"
AGREEMENTS = [AgreementSpec(reference="dp1", runs=("tp2", "broken", "later"), tolerance=1e-5)]
PROVENANCE = {
    "versions": {"torch": "2.9.1"},
    "commit": None,
    "command": "snakemake",
    "config": [{"path": "config/x.yaml", "text": "title: <b>&"}],
}
CARD = CorpusCard("stdlib", 3, 30, 3.5, [0, 0, 0, 2, 1], [], "none", "gigatoken 0.10.0", "3 documents")
KINDS = ("pdf", "png", "svg")
# What there is to show of the runs below: all ranks' numbers, but no GPU and no sweep.
DRAWN = {
    "loss",
    "validation",
    "agreement",
    "learning_rate",
    "step_time",
    "step_times",
    "throughput",
    "lengths",
    "goodput",
}
DRAWN |= {"scaling"}
FILES = {f"{name}.{kind}" for name in DRAWN for kind in (*KINDS, "txt")} | {f"data/{name}.tsv" for name in DRAWN}
HOSTILE = '<script>alert("x")</script>&$\\frac'


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    experiment = FakeExperiment(tmp_path_factory.mktemp("page"))
    experiment.completed_run("dp1", steps=20)
    experiment.completed_run("tp2", steps=20, noise=2e-6, world_size=2, tp=2, sp="true")
    experiment.completed_run("broken", steps=20, losses={4: float("nan")})
    for run in ("dp1", "tp2", "broken"):
        experiment.measure(run)
    experiment.plan_run("later")
    return experiment


def page(runs, folder, title="Title", agreements=AGREEMENTS, captions=None, data=(), corpora=(CARD,), published=None):
    drawn = draw(runs, corpora, agreements, captions or read_captions(CAPTIONS), folder)
    checks = agreement_checks(agreements, runs)
    return render(shown(runs, title, checks=checks, drawn=drawn, data=data, corpora=corpora, published=published))


def shown(runs, title="t", **given):
    return Contents(title, "tiny", runs, provenance=PROVENANCE, **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def html(experiment, folder):
    return page(load_runs(experiment.results), folder)


def rows(html):
    """Text of every table row, cells joined by `|`."""
    found = re.findall(r"<tr[^>]*>(.*?)</tr>", html, re.DOTALL)
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in found]
    return ["|".join(" ".join(re.sub(r"<[^>]+>", " ", cell).split()) for cell in row) for row in cells]


def figure(html, name):
    return re.search(rf'<figure id="figure-{name}" class="\w+">.*?</figure>', html, re.DOTALL).group()


def test_every_run_has_a_row_with_its_state(html):
    table = rows(html)
    assert any(row.startswith("tp2|PASS|dense|tp2 sp|1|8|20/20|") for row in table)
    assert any(row.startswith("broken|INVALID no finite loss at step 4|") for row in table)
    assert any(row.startswith("later|NOT_RUN it has no metrics|") for row in table)


def test_the_table_of_runs_has_the_swept_values(experiment, tmp_path, svg_alone):
    runs = load_runs(experiment.results)
    seeds = {run.name: {"training.seed": seed, "optimizer.lr": 1e-3} for seed, run in enumerate(runs)}
    seeds["tp2"] |= {"parallel.tp": 2, "a.o_<_e": 1, "a.two": 2, "a.three": 3}
    swept = swept_columns(runs, Frames(runs, seeds, unset={"dp1": {"parallel.tp": 1}}))
    html = render(shown(runs, swept=swept, excluded=("wild", "lr0.1")))
    assert "<p>Left out of the sweep: wild, lr0.1.</p>" in html
    table = rows(html)
    assert table[0].startswith("run|state|model|layout|seed|tp|o_ &lt;_ e|two|dp|")
    assert table[1].startswith("dp1|PASS|dense|dp only|0|1|||1|") and table[2].startswith(
        "tp2|PASS|dense|tp2 sp|1|2|1|2|1|"
    )
    assert "The runs also differ in three: see the table as TSV." in html


def test_settings_and_numbers_that_are_not_finite_are_shown(experiment, svg_alone):
    runs = [dataclasses.replace(run, evaluation={"acc": float("nan")}) for run in load_runs(experiment.results)[:2]]
    values = {run.name: {"training.seed": seed} for seed, run in enumerate(runs)}
    settings = settings_table(runs, Frames(runs, values))
    html = render(shown(runs, settings=settings, checks=number_checks(runs)))
    table = rows(html)
    place = table.index("model|n|missing|last loss|loss, mean of the last tenth|validation loss")
    assert re.fullmatch(r"dense\|2\|0(\|\d\.\d+ \(\d\.\d+ to \d\.\d+\)){3}", table[place + 1])
    assert "dp1|NaN" in table and any(row.startswith("dp1|evaluation|finite numbers|FAIL|acc is NaN") for row in table)


def test_what_the_column_of_steps_says_of_a_parent_has_no_column_of_its_own(experiment, svg_alone):
    runs = [run for run in load_runs(experiment.results) if run.name in ("dp1", "tp2")]
    parent = {"experiment": "old", "run": "base", "iteration": 5, "load": {"optimizer": True, "rng": True}}
    runs[1] = dataclasses.replace(runs[1], asked={**runs[1].asked, "parent": parent})
    values = {"dp1": {"task": "pretrain"}, "tp2": {"task": "sft", "continue_from": "old/base@5"}}
    swept = swept_columns(runs, Frames(runs, values))
    table = rows(render(shown(runs, swept=swept)))
    assert table[0].startswith("run|state|model|layout|task|dp|") and "base@5" in table[2]
    unknown = [runs[0], dataclasses.replace(runs[1], asked={})]
    table = rows(render(shown(unknown, swept=swept)))
    assert table[0].startswith("run|state|model|layout|task|continue_ from|dp|") and "|sft|old/base@5|" in table[2]


def test_columns_of_what_was_expected_are_left_out_where_no_run_has_them(experiment):
    runs = load_runs(experiment.results)[:1]
    row = dict.fromkeys(overview.COLUMNS) | {"run": "dp1", "state": "PASS", "tokens": 1000, "step_source": "unknown"}
    for more, head in (
        ({}, "step measured"),
        ({"tensors_gib": 3.0}, "step measured|GiB expected"),
        ({"step_seconds": 0.5, "model_seconds": 0.5}, "step expected|by|step measured|by the model|of it|error"),
    ):
        write_text(experiment.results / "preflight.tsv", overview.tsv([row | more]))
        html = render(shown(runs, expected=load_expected(experiment.results, runs)))
        found = rows(html)
        place = found.index(f"run|tokens|FLOP|on disk|{head}")
        assert found[place + 1].count("|") == found[place].count("|")
        assert ("The model of speed" in html) == ("model" in head)
    (experiment.results / "preflight.tsv").unlink()


def test_what_runs_took_of_their_gpus_is_shown_where_it_is_known(experiment, html, tmp_path, svg_alone):
    runs = load_runs(experiment.results)
    energy = {"joules_per_gpu_and_step": {"median": 1897.4}, "watts_per_gpu": {"median": 668.0}}
    known = [dataclasses.replace(run, summary=run.summary and run.summary | {"energy": energy}) for run in runs]
    table = rows(page(known, tmp_path))
    [(place, head)] = [(number, row.split("|")) for number, row in enumerate(table) if "joules per GPU" in row]
    cells = next(row.split("|") for row in table[place:] if row.startswith("tp2|"))
    shown = {name: cell for name, cell in zip(head, cells, strict=True) if cell}
    assert shown == {"run": "tp2", "joules per GPU and step": "1,897", "watts per GPU": "668"}
    assert "joules per GPU" not in html


def test_only_runs_that_passed_are_plotted(html):
    for name in DRAWN - {"lengths", "scaling"}:
        drawn = figure(html, name)
        assert "tp2" in drawn or name == "learning_rate", "both have the same rates, so that one curve is drawn"
        assert "broken" not in drawn
        assert "later" not in drawn


def test_checks_are_shown_with_their_numbers(html):
    table = rows(html)
    [row] = [row for row in table if row.startswith("tp2|dp1|PASS")]
    assert re.search(r"within rounding: .*\|\d\.?\d?e-06\|\d+\|1\|\|1e-05$", row), row
    assert any(row.startswith("broken|dp1|INVALID") for row in table)


def test_what_failed_stands_at_the_top_and_leads_to_its_row(experiment, tmp_path, svg_alone):
    top = page(load_runs(experiment.results), tmp_path).split("<main>")[0]
    assert re.findall(r'<a href="#([^"]+)">([^<]+)</a>: ([^<]+)', top) == [
        ("run-broken", "run broken", "no finite loss at step 4")
    ]
    runs = [run for run in load_runs(experiment.results) if run.name != "broken"]
    html = page(runs, tmp_path, agreements=[AgreementSpec(reference="dp1", runs=("tp2",), tolerance=1e-12)])
    [(link, name, why)] = re.findall(r'<a href="#([^"]+)">([^<]+)</a>: ([^<]+)', html.split("<main>")[0])
    assert name == "tp2 agrees with dp1" and "differ by more than" in why and f'<tr id="{link}">' in html


class Structure(HTMLParser):
    """Ids, references and the nesting of a page."""

    VOID = ("meta", "link", "br")

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.references = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        self._read(attributes)

    def handle_startendtag(self, tag, attributes):
        self._read(attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def _read(self, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href"):
                self.references.append(value)


def test_the_page_is_well_formed_and_asks_for_nothing_from_outside(html):
    structure = Structure()
    structure.feed(html)
    assert structure.open == []
    assert len(structure.ids) == len(set(structure.ids))
    inside = {f"#{name}" for name in structure.ids}
    assert set(structure.references) <= inside | FILES | {"data:,"}
    assert not re.search(r"url\((?!#)|@import", html)


def test_names_titles_and_reasons_are_text_whatever_they_hold(experiment, tmp_path, svg_alone):
    runs = load_runs(experiment.results)
    runs = [dataclasses.replace(run, name=run.name + HOSTILE, reasons=[HOSTILE]) for run in runs]
    html = page(runs, tmp_path, title=HOSTILE, agreements=[])
    assert html.count("<script") == 1  # the page's own
    assert "<b>&" not in html
    assert html.count("&lt;script&gt;") > 6


def test_the_page_and_the_figures_beside_it_are_the_same_every_time(experiment, html, folder, tmp_path):
    assert page(load_runs(experiment.results), tmp_path) == html
    for place in (folder, tmp_path):
        assert {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()} == FILES
    for name in FILES:
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_an_edited_caption_changes_the_page(experiment, tmp_path, html, svg_alone):
    captions = {**read_captions(CAPTIONS), "loss": "My own words."}
    changed = page(load_runs(experiment.results), tmp_path, captions=captions)
    assert "My own words." in figure(changed, "loss")
    assert "My own words." not in html


@pytest.mark.parametrize("captions", [{"loss": "only one"}, {**dict.fromkeys(FIGURES, "x"), "lose": "x"}, ["loss"]])
def test_captions_that_fit_no_figure_are_refused(tmp_path, captions):
    path = tmp_path / "captions.yaml"
    path.write_text(yaml.safe_dump(captions))
    with pytest.raises(ReportError, match="one caption for each of loss, loss_by_tokens"):
        read_captions(path)


def test_an_experiment_of_which_nothing_has_run_has_a_page(tmp_path):
    experiment = FakeExperiment(tmp_path)
    experiment.plan_run("later")
    write_text(tmp_path / "report" / "loss.png", "of an earlier report")
    html = page(load_runs(experiment.results), tmp_path / "report", agreements=[], corpora=())
    assert list((tmp_path / "report").iterdir()) == []
    assert "nothing to plot" in html
    assert "0 of 1 runs passed; 1 NOT_RUN." in html


def test_every_run_of_one_model_has_a_colour_as_long_as_they_can_be_told_apart(experiment):
    first = load_runs(experiment.results)[0]

    for count, colours in ((1, 1), (8, 8), (12, 8), (24, 8), (40, 1)):
        names = [f"lr{index}" for index in range(count)]
        shades = Shades(Frames([dataclasses.replace(first, name=name) for name in names]))
        assert shades.column == "run" and len({shades.of(name) for name in names}) == colours
        looks = {(shades.of(name), str(shades.dash(name)), shades.marker(name)) for name in names}
        assert count > 24 or len(looks) == count, "with their dashes or markers all can be told apart"


def test_a_value_of_a_column_has_the_colour_of_its_first_run(experiment):
    first = load_runs(experiment.results)[0]
    frames = Frames([dataclasses.replace(first, name=name) for name in "abcd"])
    frames.runs["layout"] = ["dp only", "dp only", "tp2", "pp2"]
    by_run, by_layout = Shades(frames), Shades(frames, "layout")
    assert [by_layout.of(one) for one in ("dp only", "tp2", "pp2")] == [by_run.of(name) for name in "acd"]


@pytest.mark.slow
def test_many_runs_are_coloured_by_model_and_the_fastest_are_shown(tmp_path):
    experiment = FakeExperiment(tmp_path)
    for index in range(45):
        run = f"lr{index}"
        experiment.completed_run(run, model=["dense", "moe"][index % 2], steps=5, seconds=0.1 + index / 100)
        experiment.measure(run)
    html = page(load_runs(experiment.results), tmp_path / "report", agreements=[])
    assert "lr3" not in figure(html, "loss")
    assert "moe" in figure(html, "loss")
    assert "The 40 fastest of 45 runs." in figure(html, "throughput")
    assert ">lr1<" in figure(html, "throughput")
    assert ">lr44<" not in figure(html, "throughput")


@pytest.mark.parametrize(
    ("runs", "checks", "text"),
    [
        ({"PASS": 7}, {"PASS": 9}, "All 7 runs passed. All 9 checks passed."),
        ({"PASS": 1}, {}, "The only run passed. There are no checks."),
        (
            {"PASS": 5, "INVALID": 1, "NOT_RUN": 1},
            {"PASS": 1, "FAIL": 2},
            "5 of 7 runs passed; 1 INVALID, 1 NOT_RUN. 1 of 3 checks passed; 2 FAIL.",
        ),
    ],
)
def test_the_verdict_in_words(runs, checks, text):
    assert verdict_text(Counts(runs=runs, checks=checks)) == text


def test_published_values_stand_beside_measured_ones(experiment, tmp_path, svg_alone):
    values = {"step_seconds": [0.125, 0.125]}
    table = {"title": HOSTILE, "source": "a page", "conditions": {"gbs": 16}, "notes": {"step_seconds": "a note"}}
    table["rows"] = [{"name": "one", "conditions": {}, "values": values}]
    html = page(load_runs(experiment.results), tmp_path, published=table)
    (row,) = [row for row in rows(html) if row.startswith("one|")]
    assert row.startswith("one|step_seconds|0.125|dp1|0.1") and "gbs: 8 instead of 16" in row
    assert "a note" in html and HOSTILE not in html
