"""Profiles in the report: figures, summary, findings."""

import re
import shutil
from dataclasses import replace

import pytest
import test_page
from fake_runs import FakeExperiment
from synthetic import ALL_REDUCE, NCCL
from test_analysis import tell

from megaboa.layout import Layout
from megaboa.observe.traces.analysis import Expected, analyse
from megaboa.records import NetworkCounter, write
from megaboa.report import style
from megaboa.report.notes import read_captions
from megaboa.report.page import render
from megaboa.report.profiles import FIGURES, Profile, bytes_text, draw_profiles, load_profiles
from megaboa.report.runs import load_runs


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """Four ranks of which one is slow, over messages of different sizes."""
    folder = tmp_path_factory.mktemp("captures")
    for rank in range(4):
        story = tell(count=8, rank=rank, world_size=4, slow=40.0 * (rank == 2), host=f"node-{rank // 2}")
        for step in range(8):
            story.kernel(ALL_REDUCE, step * 1000 + 600, 20, stream=NCCL, size=2 ** (12 + step), group=4)
        story.nsys(folder)
    return analyse([folder], Expected(layout=Layout(4)))


@pytest.fixture(scope="module")
def experiment(tmp_path_factory, document):
    experiment = FakeExperiment(tmp_path_factory.mktemp("profiles"))
    experiment.completed_run("dp4", steps=10)
    experiment.measure("dp4")
    write(experiment.results / "runs" / "dp4" / "analysis.json", document)
    return experiment


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("figures")


@pytest.fixture(scope="module")
def figures(experiment, folder):
    return draw_profiles(load_profiles(experiment.results, ["dp4"]), read_captions(test_page.CAPTIONS), folder)


def text_of(svg):
    return re.sub(r"<[^>]+>", " ", str(svg))


def test_every_figure_is_drawn_and_named(experiment, folder, figures):
    profiles = load_profiles(experiment.results, ["dp4", "later"])
    assert [profile.run for profile in profiles] == ["dp4"] and profiles[0].tool == "nsys"
    drawn = figures["dp4"]
    assert [figure.name for figure in drawn] == list(FIGURES)
    words = {figure.name: text_of(figure.svg) for figure in drawn}
    assert "rank 3" in words["ranks"] and "GEMM" in words["classes"] and "AllReduce" in words["sizes"]
    assert (
        "stream 20" in words["timeline"] and "exposed communication" in words["exposed"] and "rank 2" in words["heat"]
    )
    assert drawn[0].note == "Steps 4 to 9, n = 24." and drawn[-1].note == "Step 7 of rank 0."
    assert {path.suffix for path in folder.iterdir()} == {".svg", ".pdf", ".png"}


def test_the_page_says_what_to_look_at_first(experiment, document, figures):
    runs = load_runs(experiment.results)
    profiles = load_profiles(experiment.results, ["dp4"])
    counters = {"n": 2, "mean": 200.0, "max": 300}
    sent = NetworkCounter(rank=0, card=9, metric="Bytes sent", unit="B/s", **counters)
    active = NetworkCounter(rank=0, card=1, metric="SMs Active [Throughput %]", unit=None, **counters)
    document = replace(profiles[0].document, network=(sent,), gpu_metrics=(active,))
    profiles = [replace(profiles[0], document=document)]
    html = render(test_page.shown(runs, profiles=profiles, profile_figures=figures))
    assert '<td class="name">Bytes sent</td><td class="number">0</td><td class="number">9</td>' in html
    assert "Network cards: 1 counter<" in html and "SMs Active [Throughput %]" in html
    assert "Rank 2 on node-1 is slow" in html and document.summary[0] in html
    assert html.count("<svg") == len(FIGURES)
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert "Profiles" not in render(test_page.shown(runs))


def test_figures_of_profiles_that_are_gone_are_removed(folder, figures, tmp_path):
    report = shutil.copytree(folder, tmp_path / "report")
    assert len(list(report.iterdir())) == len(style.KINDS) * len(FIGURES)
    assert draw_profiles([], read_captions(test_page.CAPTIONS), report) == {} and list(report.iterdir()) == []


def test_without_anything_to_draw_there_is_no_figure(tmp_path):
    empty = analyse([tmp_path])
    assert all(make(empty) is None for make in FIGURES.values())
    profile = Profile("a", empty)
    assert draw_profiles([profile], read_captions(test_page.CAPTIONS), tmp_path) == {"a": []} and profile.tool == ""


def test_many_ranks_are_drawn_as_one_band(document):
    rows = tuple(replace(row, rank=rank) for rank in range(20) for row in document.budget if row.rank == 0)
    many = replace(document, budget=rows, ranks=tuple(replace(document.ranks[0], rank=rank) for rank in range(20)))
    assert all(FIGURES[name](many) is not None for name in ("exposed", "heat", "ranks"))


def test_sizes_are_written_in_powers_of_two():
    assert [bytes_text(size) for size in (512, 1 << 16, 3 << 20, 1 << 30)] == [
        "512 B",
        "64 KiB",
        "3 MiB",
        "1 GiB",
    ]
