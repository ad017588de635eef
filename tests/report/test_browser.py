"""The report in a real Chromium, opened as a file: light, dark, narrow, printed. Pictures stay below `artefacts/`."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
from called import called
from chromium import PROGRAM, Chromium
from fake_runs import FakeExperiment

from megaboa.files import read_json, write_json
from megaboa.records import Energy, Memory, Mfu, Spread, Stragglers, Summary, read, write

REQUIRED = bool(os.environ.get("MEGABOA_REQUIRE_CHROMIUM"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None and not REQUIRED, reason="there is no chromium here (Debian: chromium)"),
]
ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "artefacts" / "report"
VIEWS = {"light": {}, "dark": {"scheme": "dark"}, "narrow": {"width": 390}, "print": {"media": "print", "width": 718}}


def report_of(experiment, **settings):
    """The page that `megaboa report` makes of an experiment."""
    experiment_yaml, out = experiment.root / "my.yaml", experiment.results / "report" / "index.html"
    experiment_yaml.write_text("experiment: tiny\n")
    write_json(experiment.results / "specs" / "report.json", settings)
    command = [sys.executable, ROOT / "workflow" / "scripts" / "megaboa", "report", "--out", out]
    command += ["--settings", experiment.results / "specs" / "report.json", "--config-file", experiment_yaml]
    subprocess.run([*command, "--captions", ROOT / "workflow" / "report" / "captions.yaml"], check=True)
    return out


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    experiment = FakeExperiment(tmp_path_factory.mktemp("browser"))
    for run, layout in (("dp1", {}), ("tp2", {"tp": 2, "sp": "true"}), ("pp2", {"pp": 2})):
        experiment.completed_run(run, noise=1e-7 * len(layout), world_size=1 + bool(layout), **layout)
        experiment.measure(run)
    experiment.completed_run("broken", losses={4: float("nan")})
    experiment.measure("broken")
    experiment.plan_run("later")
    agreements = [{"reference": "dp1", "runs": ["tp2", "pp2"], "tolerance": 1e-5}]
    figure = {"name": "mine", "kind": "scatter", "x": "tokens_per_second", "y": "loss.last", "caption": "My own."}
    return report_of(experiment, title="A report to look at", agreements=agreements, proofs=[], figures=[figure])


@pytest.fixture(scope="module")
def browser(page):
    with Chromium() as browser:
        browser.look()
        browser.open(page)
        yield browser


def test_the_page_opens_without_a_word_in_the_console_or_a_request(browser):
    assert browser.run("document.title") == "A report to look at"
    assert browser.run("document.querySelector('h1').getBoundingClientRect().width") > 100
    assert browser.complaints == []


def test_every_figure_can_be_seen(browser):
    sizes = browser.run(
        "[...document.querySelectorAll('figure')].map(f => { const s = f.querySelector('svg'), b = s.getBBox(),"
        " r = s.getBoundingClientRect(); return [f.id, r.width, r.height, b.width, b.height] })"
    )
    names = {name for name, *_ in sizes}
    assert {"figure-loss", "figure-agreement", "figure-step_times", "figure-goodput", "figure-mine"} <= names
    assert all(min(rest) > 100 for _, *rest in sizes), sizes
    widths = browser.run(
        "Promise.all([...document.querySelectorAll('a[href$=\".png\"]')].map(a => new Promise(done => {"
        " const i = new Image(); i.onload = () => done(i.naturalWidth); i.onerror = () => done(0); i.src = a.href })))"
    )
    assert len(widths) == len(sizes) and min(widths) > 500


def test_every_link_leads_somewhere(browser, page):
    links = browser.run("[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))")
    assert len(links) > 20
    for link in links:
        if link.startswith("#"):
            assert browser.run(f"document.getElementById({link[1:]!r}) !== null"), link
        else:
            assert (page.parent / unquote(link)).is_file(), link


def column(browser, table, number):
    rows = f"document.querySelector('#{table} ~ .table table').tBodies[0].rows"
    return browser.run(f"[...{rows}].map(row => row.cells[{number}].firstChild?.textContent.trim() ?? '')")


def click(browser, table, number):
    heads = f"document.querySelector('#{table} ~ .table table').tHead.rows[0].cells"
    browser.run(f"{heads}[{number}].querySelector('button').click()")
    return browser.run(f"{heads}[{number}].getAttribute('aria-sort')")


def test_a_click_on_a_head_sorts_its_table(browser):
    heads = browser.run("[...document.querySelector('#runs ~ .table table').tHead.rows[0].cells].map(c => c.innerText)")
    runs, times = heads.index("run"), heads.index("step time")
    assert column(browser, "runs", runs) == ["dp1", "tp2", "pp2", "broken", "later"]
    assert click(browser, "runs", runs) == "ascending"
    assert column(browser, "runs", runs) == ["broken", "dp1", "later", "pp2", "tp2"]
    assert click(browser, "runs", runs) == "descending"
    assert column(browser, "runs", runs) == ["tp2", "pp2", "later", "dp1", "broken"]
    assert click(browser, "runs", times) == "ascending"
    found = column(browser, "runs", times)
    assert found[-1] == ""  # of the run that has not run
    milliseconds = [float(re.match(r"[\d.]+", text).group()) for text in found[:-1]]
    assert milliseconds == sorted(milliseconds) and len(milliseconds) == 4


def test_light_dark_narrow_and_print(browser, page):
    papers = {}
    for name, view in VIEWS.items():
        browser.look(**view)
        papers[name] = browser.run("getComputedStyle(document.body).backgroundColor")
        ink = browser.run("getComputedStyle(document.querySelector('figure svg text')).fill")
        assert ink != papers[name]
        wide = browser.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{name}: the page is {wide} pixels too wide"
        browser.picture(PICTURES / f"{name}.png")
    assert papers["light"] == papers["print"] == "rgb(255, 255, 255)" and papers["dark"] != papers["light"]
    browser.look()
    browser.print(PICTURES / "report.pdf")
    assert (PICTURES / "report.pdf").read_bytes().startswith(b"%PDF-")
    assert browser.complaints == []


def test_printing_opens_what_is_folded_and_closes_it_again(browser):
    count = "document.querySelectorAll('details[open]').length"
    before = browser.run(count)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(count) == browser.run("document.querySelectorAll('details').length") > before
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run(count) == before


@pytest.fixture(scope="module")
def long_names(tmp_path_factory):
    """A report with names and details as long as real ones."""
    experiment, model = FakeExperiment(tmp_path_factory.mktemp("long")), "qwen3-moe-small-scratch"
    reference, *others = [f"{layout}-lr0.0003-gbs512-seed1234" for layout in ("dp1", "tp2-pp2-vpp2-sp", "ep4-etp1-sp")]
    for run in (reference, *others):
        experiment.completed_run(run, model=model, noise=1e-7 * (run != reference))
        experiment.measure(run)
        summary = experiment.results / "runs" / run / "metrics" / "summary.json"
        measured = replace(
            read(Summary, summary),
            mfu=Mfu(median=0.4, peak_tflops=989.5, peak_from="megaboa's table"),
            energy=Energy(joules_per_gpu_and_step=Spread(median=190.0, p5=180.0, p95=200.0, n=20)),
            stragglers=Stragglers(
                slowest_over_fastest=Spread(median=1.034, p5=1.01, p95=1.08, n=20), slowest={"1": 18, "0": 2}
            ),
            memory=Memory(peak_bytes={"allocated": 2**30}),
        )
        write(summary, measured)
    name, digest = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight", "0123456789abcdef" * 4
    details = [f"128 of 128 come from tensors of the model; without a source: {name}", f"{digest}/{digest}/{name}"]
    checks = [{"name": "Megatron parameters", "state": "PASS", "detail": detail} for detail in details]
    proof = experiment.results / "models" / model / "proof.json"
    write_json(proof, {"state": "PASS", "checks": [*checks, {"name": "logits", "state": "PASS", "detail": "1e-06"}]})
    agreements = [{"reference": reference, "runs": others, "tolerance": 1e-9}]
    return report_of(experiment, title="Long names", agreements=agreements, proofs=[str(proof)])


def test_no_table_is_cut_in_a_window_of_a_laptop(browser, long_names):
    browser.look(width=1100)
    browser.open(long_names)
    browser.run("document.querySelectorAll('details').forEach(one => { one.open = true })")
    browser.picture(PICTURES / "laptop.png")
    cut = "[...document.querySelectorAll('.table')].filter(t => t.scrollWidth > t.clientWidth)"
    assert browser.run(f"{cut}.map(t => [t.textContent.trim().slice(0, 60), t.scrollWidth, t.clientWidth])") == []
    assert browser.run("document.querySelectorAll('.table').length") >= 6


def test_runs_of_several_tasks_fit_a_window_and_tables_that_do_not_can_be_scrolled(browser, tmp_path):
    experiment, values = FakeExperiment(tmp_path), {}
    for name, task in (("cont", "pretrain"), ("tuned", "sft"), ("lora", "lora")):
        experiment.completed_run(name)
        experiment.measure(name)
        asked = experiment.results / "runs" / name / "run.json"
        parent = {"experiment": "paper", "run": "lr0.003-seed1", "iteration": 20, "weights_only": True}
        parent["load"] = {"optimizer": False, "rng": False}
        write_json(asked, read_json(asked) | {"parent": parent})
        values[name] = {"continue_from": "paper/lr0.003-seed1@20", "training.train_iters": 30, "data.blend": name}
        values[name] |= {"optimizer.lr": 0.001 * len(name), "task": task, "tuning.rank": len(values)}
    values["cont"] |= {"continue_from": "paper/lr0.003-seed2@20", "training.train_iters": 60}
    page = report_of(experiment, title="Tasks", agreements=[], proofs=[], values=values)
    table, head = "document.querySelector('#runs ~ .table')", "th:last-child"
    for width, fits in ((1200, True), (700, False)):
        browser.look(width=width)
        browser.open(page)
        browser.picture(PICTURES / f"tasks-{width}.png")
        assert browser.run(f"{table}.scrollWidth <= {table}.clientWidth") == fits
        browser.run(f"{table}.scrollLeft = 10000")
        right = "getBoundingClientRect().right"
        assert browser.run(f"{table}.querySelector('{head}').{right} <= {table}.{right} + 1")
    heads = browser.run(f"[...{table}.querySelectorAll('th')].map(one => one.textContent)")
    assert heads[4:8] == ["task", "blend", "lr", "train_iters"]


def test_the_page_of_a_fleet_fits_and_sorts(browser, tmp_path):
    """Opened after the others: it takes their place in the browser."""
    experiment = FakeExperiment(tmp_path, "an-experiment-with-a-long-name-of-its-own")
    for run in ("dp1-lr0.0003-gbs512-seed1234", "dp2"):
        experiment.completed_run(run)
    (FakeExperiment(tmp_path, "torn").plan_run("x") / "attempts.jsonl").write_text('{"event": "start", "time": 1}\n')
    page = tmp_path / "fleet.html"
    done = called("fleet", tmp_path / "store", "--price", "2.1", "--page", page)
    assert done.returncode == 0, done.stderr
    for width in (1100, 390):
        browser.look(width=width)
        browser.open(page)
        wide = browser.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"the page is {wide} pixels too wide for {width}"
        browser.picture(PICTURES / f"fleet-{width}.png")
    assert click(browser, "runs", 0) == "ascending"
    assert browser.run("document.querySelector('.bar').getBoundingClientRect().width") > 100
    assert browser.complaints == []
