"""`megaboa report`, from an experiment's results to its page and its checks."""

import json
from pathlib import Path

import made
import pytest
from called import called
from fake_runs import FakeExperiment
from markupsafe import escape

from megaboa.files import write_json
from megaboa.records import AttemptEnd, write
from megaboa.run.ledger import append

ROOT = Path(__file__).parents[2]


@pytest.fixture
def experiment(tmp_path):
    experiment = FakeExperiment(tmp_path)
    for run, noise in (("dp1", 0.0), ("dp2", 1e-3)):
        experiment.completed_run(run, steps=8, noise=noise)
        experiment.measure(run)
    packages = {"torch": "2.9.1", "megatron_core": "0.19.2"}
    image = {"runtime": "none", "digest": "1", "python": "3.12.4", "packages": packages}
    write_json(experiment.results / "image.json", image)
    agreements = [{"reference": "dp1", "runs": ["dp2"], "tolerance": 1e-5}]
    settings = {"title": None, "agreements": agreements, "proofs": []}
    write_json(experiment.results / "specs" / "report.json", settings)
    (tmp_path / "my.yaml").write_text("experiment: tiny # mine\n")
    return experiment


def report(experiment, captions, *words):
    out = experiment.results / "report" / "index.html"
    command = ["report", "--out", out, "--settings", experiment.results / "specs" / "report.json"]
    command += ["--captions", captions, *words]
    command += ["--config-file", experiment.root / "my.yaml", "--command", "snakemake --configfile my.yaml"]
    return called(*command), out


def test_report_of_an_experiment(experiment):
    done, out = report(experiment, ROOT / "workflow" / "report" / "captions.yaml")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}: FAIL. All 2 runs passed. 0 of 1 checks passed; 1 FAIL.\n"
    html = out.read_text()
    for text in ("<h1>tiny</h1>", "snakemake --configfile my.yaml", "experiment: tiny # mine", "0.19.2", "3.12.4"):
        assert text in html
    checks = json.loads((out.parent / "checks.json").read_text())
    assert checks["state"] == "FAIL"
    assert [(check["name"], check["state"]) for check in checks["checks"]] == [("dp2 agrees with dp1", "FAIL")]
    assert (out.parent / "loss.png").exists()


def test_a_figure_with_nothing_to_show_is_named_by_the_call(experiment, svg_alone):
    path = experiment.results / "specs" / "report.json"
    figure = {"name": "mine", "kind": "bar", "x": "run", "y": "loss.last", "filter": {"model": "moe"}}
    write_json(path, json.loads(path.read_text()) | {"figures": [figure]})
    done, out = report(experiment, ROOT / "workflow" / "report" / "captions.yaml")
    warning = "warning: report.figures: mine has nothing to show: no run has model moe; there are dense."
    assert done.returncode == 0 and done.stdout.splitlines()[1:] == [warning]
    assert json.loads((out.parent / "checks.json").read_text())["notes"] == [warning]


def test_figures_that_can_not_be_drawn_say_so_in_their_places_and_fail(experiment, svg_alone):
    """There was no report, and the one of an earlier call stayed."""
    experiment.export("dp1")
    write(experiment.results / "runs" / "dp1" / "evaluation.json", made.evaluation(values={"acc": 0.5, "f1": 0.25}))
    path = experiment.results / "specs" / "report.json"
    bars = {"kind": "bar", "x": "run"}
    ys = {"typo": "evaluation.ac", "text": "layout", "scores": "evaluation.acc"}
    figures = [{"name": name, "y": y} | bars for name, y in ys.items()]
    write_json(path, json.loads(path.read_text()) | {"figures": figures})
    (path.parents[1] / "report").mkdir()
    (path.parents[1] / "report" / "typo.svg").write_text("of an earlier report")
    done, out = report(experiment, ROOT / "workflow" / "report" / "captions.yaml")
    assert done.returncode == 0, done.stderr
    html, checks = out.read_text(), json.loads((out.parent / "checks.json").read_text())
    why = "can't be drawn: no run has the column 'evaluation.ac'; did you mean 'evaluation.acc'?"
    failed = [(one["name"], one["detail"], one["anchor"]) for one in checks["failed"][-2:]]
    assert failed[0] == ("figure typo", why, "figure-typo") and failed[1][0] == "figure text"
    assert failed[1][1].startswith("can't be drawn as bar: ") and checks["state"] == "FAIL"
    assert f'<a href="#figure-typo">figure typo</a>: {escape(why)}' in html
    assert f"typo {escape(why)}" in html.split('id="figure-typo"')[1] and "notes" not in checks
    assert not (out.parent / "typo.svg").exists() and (out.parent / "scores.svg").exists()


def test_attempts_that_failed_have_a_section(experiment, svg_alone):
    captions = ROOT / "workflow" / "report" / "captions.yaml"
    assert "Failures" not in report(experiment, captions)[1].read_text()
    ledger = (experiment.results / "runs" / "dp1" / "attempts.jsonl").resolve()
    ended = {"detail": "<b>Connection reset", "cause": "transient", "action": "resume"}
    append(ledger, AttemptEnd(attempt=2, outcome="failed", iteration=4, **ended))
    html = report(experiment, captions)[1].read_text()
    line = "dp1, attempt 2: communication: &lt;b&gt;Connection reset. no step; checkpoint of iteration 4 is kept"
    assert line in html.split('<h2 id="failures">Failures</h2>')[1]


def test_captions_that_cannot_be_used_are_named(experiment):
    captions = experiment.root / "captions.yaml"
    captions.write_text("loss: hm\n")
    done, out = report(experiment, captions)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {captions}: must have one caption for each")
    assert not out.exists()
