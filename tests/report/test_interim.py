"""The interim report: what is there of an experiment some of whose runs are not."""

import made
import pytest
from called import called
from fake_runs import START, FakeExperiment, end_event, start_event, step_event, write_attempt
from markupsafe import escape

from megaboa.commands import interim as interim_command
from megaboa.errors import InputError
from megaboa.files import read_json, write_json, write_text
from megaboa.observe import status
from megaboa.paths import RunFolder
from megaboa.records import ExportSpec, Proof, write
from megaboa.report import exported
from megaboa.report.build import CAPTIONS
from megaboa.report.checks import proofs_so_far
from megaboa.report.interim import load_interim
from megaboa.run import claims
from megaboa.run.identity import identity_of
from megaboa.run.versions import Version
from megaboa.store_paths import RunStore

TRAINED, FAILED, WORKING, WAITING = "trained", "failed", "working", "waiting"


@pytest.fixture
def experiment(tmp_path):
    """One run of every kind. The trained one has no metrics yet."""
    made = FakeExperiment(tmp_path)
    made.completed_run(TRAINED, steps=8)
    broken = {"outcome": "failed", "cause": "nan", "detail": "found NaN in grad norm", "action": "stop", "rank": 0}
    begin(made, FAILED, [start_event(1), end_event(1, 0, last_step=3, first_step=1, **broken)], steps=3)
    begin(made, WORKING, [start_event(1)], steps=5)
    made.plan_run(WAITING, steps=8)
    for run in (TRAINED, FAILED, WORKING, WAITING):
        configure(made, run)
    settings = {"title": None, "agreements": [], "proofs": [], "values": {}, "invalid": []}
    settings["agreements"] = [{"reference": TRAINED, "runs": [WORKING], "tolerance": 1e-5}]
    write_json(made.results / "specs" / "report.json", settings)
    return made


def begin(experiment, run, attempts, steps):
    store = experiment.plan_run(run, steps=8)
    events = [step_event(step, START + step) for step in range(1, steps + 1)]
    write_attempt(store, 1, [{"event": "train_start", "time": START, "step": 0}, *events], torn='{"event": "st')
    experiment.begin(run, store, attempts)


def configure(experiment, run, **changed):
    """Runs of a recipe, whose identity hangs on no other file."""
    folder = experiment.results / "runs" / run
    asked = read_json(folder / "run.json") | {"data": {}, "optimizer": {"lr": 3e-4}, **changed}
    asked["model"] = {"name": "dense", "recipe": "gpt_tiny", "tokenizer": None}
    write_json(folder / "run.json", asked)
    write_json(folder / "launch.json", {"peak_tflops": None, "checkpoint": {}})
    identity = identity_of(RunFolder(folder))
    if not changed and (folder / "attempts.jsonl").exists():
        write((folder / "attempts.jsonl").resolve().with_name("identity.json"), identity)
    if not changed and (folder / "train.json").exists():
        write_json(folder / "train.json", read_json(folder / "train.json") | {"identity": identity.digest})


def load(experiment):
    runs, interim = load_interim(experiment.results)
    return {run.name: run for run in runs}, {run.run: run for run in interim.missing}


def test_every_run_stands_where_it_is(experiment):
    runs, missing = load(experiment)
    assert {name: run.state for name, run in runs.items()} == {
        TRAINED: "PASS",
        FAILED: "FAIL",
        WORKING: "NOT_RUN",
        WAITING: "NOT_RUN",
    }
    assert missing[FAILED].why == "failed, step 3/8: nan (attempt 1, step 4, rank 0; cause: nan)"
    assert missing[WAITING].why == "has not begun"
    assert runs[WORKING].summary["steps"] == len(runs[WORKING].steps) == 5
    assert runs[TRAINED].summary["steps"] == 8 and not (experiment.results / "runs" / TRAINED / "metrics").exists()


def test_who_trains_at_the_moment_is_said_to_run(experiment):
    store = RunStore((experiment.results / "runs" / WORKING / "attempts.jsonl").resolve().parent)
    with claims.held(store.claims, claims.myself(None)):
        assert load(experiment)[1][WORKING].why == "running, step 5/8"


def test_metrics_are_taken_where_they_are_of_what_is_trained(experiment):
    experiment.measure(TRAINED)
    summary = experiment.results / "runs" / TRAINED / "metrics" / "summary.json"
    write_json(summary, read_json(summary) | {"attempts": 77})
    assert load(experiment)[0][TRAINED].summary["attempts"] == 77
    write_json(summary, read_json(summary) | {"identity": "another"})
    assert load(experiment)[0][TRAINED].summary["attempts"] == 1


def test_a_run_that_was_configured_anew_is_missing_and_nothing_of_it_is_shown(experiment):
    configure(experiment, TRAINED, optimizer={"lr": 3.0})
    runs, missing = load(experiment)
    assert runs[TRAINED].state == "NOT_RUN" and runs[TRAINED].summary is None and runs[TRAINED].checkpoint is None
    assert missing[TRAINED].why == "has not begun"


def test_proofs_that_are_not_there_have_not_run(experiment):
    there, absent = (experiment.results / "models" / name / "proof.json" for name in ("a", "b"))
    exported = experiment.results / "runs" / TRAINED / "proof.json"
    for path in (there, exported):
        write_json(path, {"state": "PASS", "checks": [{"name": "tensors", "state": "PASS", "detail": ""}]})
    runs = load_interim(experiment.results)[0]
    checks = {check.name: check.state for check in proofs_so_far([there, absent, exported], names(runs))}
    # The proof of the export is older than the run: its export.json isn't of this checkpoint.
    assert checks == {
        "import of a: tensors": "PASS",
        "import of b: proof": "NOT_RUN",
        f"export of {TRAINED}: proof": "NOT_RUN",
    }
    experiment.export(TRAINED)
    runs = load_interim(experiment.results)[0]
    assert [check.name for check in proofs_so_far([exported], names(runs))] == [f"export of {TRAINED}: tensors"]


@pytest.mark.parametrize(("wanted", "shown"), [("best", True), (4, True), ("final", False)])
def test_an_export_may_be_of_an_earlier_version_where_that_is_asked_for(experiment, monkeypatch, wanted, shown):
    folder = RunFolder(experiment.results / "runs" / TRAINED)
    earlier = RunStore(folder.store.with_name("earlier"))
    monkeypatch.setattr(exported, "versions", lambda _, store: [Version(store), Version(earlier, 4)])
    checkpoint = str(earlier.checkpoints / "iter_0000004")
    write(folder.export, made.export(path="store/exports/x", checkpoint=checkpoint))
    spec = ExportSpec(run=TRAINED, checkpoint=wanted, file_gb=5.0, license=None)
    write(folder.experiment_folder.specs.of("exports", TRAINED), spec)
    assert names(load_interim(experiment.results)[0]) == ({TRAINED} if shown else set())


def names(runs):
    """Of those that are exported as they are trained now."""
    return {run.name for run in runs if run.export}


def test_the_page_says_that_it_is_interim_and_touches_nothing_else(experiment):
    log = experiment.results / "logs" / "image.log"
    log.parent.mkdir()
    log.write_text("error: container.image: nvcr.io/x:1 can't be fetched: unauthorized\n")
    before = snapshot(experiment.results)
    done, out = report(experiment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{out}: interim, FAIL. 1 of 4 runs passed; 1 FAIL, 2 NOT_RUN.")
    html = out.read_text()
    top = html.split("<main>")[0]
    assert "<title>Interim: tiny</title>" in html and "3 of 4 runs are missing" in top
    assert "Jobs that failed: image: failed." in top
    assert "<b>failed</b>" in top and "cause: nan" in top and "<b>waiting</b>" in top
    shown = (out.parent / "data" / "loss.tsv").read_text()
    assert TRAINED in shown and WORKING not in shown and FAILED not in shown, "only what passed is plotted"
    assert "working is not trained" in html.split('<h2 id="agreement">')[1]
    assert {path: stat for path, stat in snapshot(experiment.results).items() if "interim" not in path} == before


def test_after_failed_evaluations_a_figure_of_their_scores_says_that_they_failed(experiment, svg_alone):
    """It ended the report, which was to show why they failed."""
    folder = RunFolder(experiment.results / "runs" / TRAINED)
    checkpoint = folder.store / "checkpoints" / "iter_0000008"
    write(folder.export, made.export(path="store/exports/x", checkpoint=str(checkpoint)))
    write(folder.proof, Proof(state="PASS", digest="1", checks=()))
    write_text(experiment.results / "logs" / "evaluate" / f"{TRAINED}.log", "error: evaluate.command: no licence\n")
    settings = experiment.results / "specs" / "report.json"
    figure = {"name": "mine", "kind": "bar", "x": "run", "y": "evaluation.acc"}
    write_json(settings, read_json(settings) | {"evaluated": [TRAINED], "figures": [figure]})
    out = experiment.results / "report" / "index.html"
    words = ["--settings", settings, "--captions", CAPTIONS, "--out", out, "--after-failure"]
    done = called("report", *words)
    assert done.returncode == 0, done.stderr
    failed = {one["name"]: one["detail"] for one in read_json(out.with_name("checks.json"))["failed"]}
    assert "no licence" in failed[f"evaluation of {TRAINED}: evaluation"]
    why = f"can't be drawn: no run has the column 'evaluation.acc', as the evaluation of run {TRAINED} failed"
    assert failed["figure mine"] == why
    assert f"mine {escape(why)}." in out.read_text().split('id="figure-mine"')[1]
    done, out = report(experiment)
    assert done.returncode == 0 and "figure-mine" not in out.read_text(), "an evaluation may be yet to come"


def test_of_results_that_cannot_be_written_a_copy_is_asked_for(experiment, monkeypatch):
    monkeypatch.setattr(interim_command, "closed", lambda folder: folder.parent)
    with pytest.raises(InputError, match=r"you can't write there, and the page would be .*/interim/index.html: copy "):
        interim_command.main([str(experiment.results)])


def test_where_nothing_is_missing_the_report_itself_is_named(experiment, svg_alone):
    plan = experiment.results / "plan.tsv"
    header, *rows = plan.read_text().splitlines()
    plan.write_text("\n".join([header, *(row for row in rows if row.startswith(TRAINED))]) + "\n")
    top = report(experiment)[1].read_text().split("<main>")[0]
    assert "No run is missing" in top and "Missing runs" not in top


def test_a_call_that_failed_names_its_runs_and_what_can_be_had(experiment):
    said = status.failed("tiny", status.missing(experiment.results))
    assert said[0].startswith("1 run failed, and report and bundle need every run")
    assert said[1] == "  failed: failed, step 3/8: nan (attempt 1, step 4, rank 0; cause: nan)"
    assert "megaboa interim tiny" in said[-1] and "`sweep.exclude`" in said[-1] and len(said) == 3
    assert status.failed("tiny", [one for one in status.missing(experiment.results) if one.run != FAILED]) == []


def snapshot(folder):
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def report(experiment):
    return called("interim", experiment.results), experiment.results / "interim" / "index.html"
