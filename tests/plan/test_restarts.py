"""megaboa.plan.restarts: no run begins at step 0 unasked while its name has unfinished work."""

import os
from pathlib import Path

import pytest

from megaboa.files import link, write_json
from megaboa.plan import restarts
from megaboa.plan.shared import Shared
from megaboa.records import Identity, write
from megaboa.run.checkpoints import MARKER
from megaboa.run.identity import store_of

SWEEP = "sweep: {runs: {a: {optimizer.lr: %s}, b: {optimizer.lr: 2.0e-3}}}"


@pytest.fixture
def plan(plan_of, tmp_path, monkeypatch):
    """The plan of two runs, `a` with this learning rate."""
    monkeypatch.chdir(tmp_path)
    return lambda lr: plan_of(SWEEP % lr, training__train_iters=60)


def leave_unfinished(plan, run, step=20):
    folder = plan[run].folder("results", plan.name)
    identity = Identity(run=folder.document("run"), model="d1", corpora={"text": "d2"})
    store = store_of(folder, identity)
    write(store.identity, identity)
    write_json(store.checkpoints / f"iter_{step:07d}" / MARKER, {"iteration": step, "files": {}})
    return store


def test_where_nothing_lies_nothing_is_asked(plan):
    assert restarts.check(plan("1.0e-3"), "results", []) == []


def test_an_edit_of_an_unfinished_run_stops_with_keys_and_ways_on(plan):
    leave_unfinished(plan("1.0e-3"), "a")
    assert restarts.check(plan("1.0e-3"), "results", []) == [], "it is resumed"
    with pytest.raises(restarts.UnfinishedWorkError) as stopped:
        restarts.check(plan("3.0e-3"), "results", [])
    said = str(stopped.value)
    assert "run a would start at step 0" in said and "step 20 of 60" in said
    assert "  optimizer.lr: 0.001 → 0.003" in said and "--config restart=a" in said and "Undo the change" in said
    assert "(continue_from: itself)" in said


def test_ending_an_unfinished_run_early_names_the_key_and_the_page(plan, plan_of):
    leave_unfinished(plan("1.0e-3"), "a")
    shorter = plan_of(SWEEP % "1.0e-3", training__train_iters=20)
    way = r"\(continue_from: itself, and training.train_iters above 20; docs/how-to/checkpoints.md, 'End a run early'\)"
    with pytest.raises(restarts.UnfinishedWorkError, match=way):
        restarts.check(shorter, "results", [])
    page = Path(__file__).parents[2] / restarts.HOW_TO_END.partition(",")[0]
    assert "\n## End a run early\n" in page.read_text(encoding="utf-8")


def test_continuing_is_no_way_where_the_plan_would_refuse_it(plan_of, plan):
    leave_unfinished(plan("1.0e-3"), "a")
    other = plan_of(SWEEP % "1.0e-3", training__train_iters=60, models__dense__config__hidden_size=512)
    with pytest.raises(restarts.UnfinishedWorkError, match="Undo the change to resume it or restart it: --config"):
        restarts.check(other, "results", [])


def test_what_differs_by_content_alone_is_left_to_the_job_where_it_is_not_known_yet(plan, monkeypatch):
    asked = plan("1.0e-3")
    leave_unfinished(asked, "a")
    now = Identity(run=asked["a"].documents["run"], model="d1", corpora={"text": "d3"})
    monkeypatch.setattr("megaboa.run.unfinished.identity_of", lambda folder: now)
    with pytest.raises(restarts.UnfinishedWorkError, match=r"corpora.text: d2 → d3 \(its content\)"):
        restarts.check(asked, "results", [])
    assert restarts.check(asked, "results", [], lambda run: run.name == "a") == []
    with pytest.raises(restarts.UnfinishedWorkError, match=r"optimizer\.lr"):
        restarts.check(plan("3.0e-3"), "results", [], lambda run: True)


def test_who_is_told_to_begin_again_does(plan):
    leave_unfinished(plan("1.0e-3"), "a")
    assert restarts.check(plan("3.0e-3"), "results", ["a"]) == ["a"]
    assert restarts.check(plan("3.0e-3"), "results", ["all"]) == ["a", "b"]
    lines = list(plan("3.0e-3").submitted(["a"]))
    assert [line.get("restart") for line in lines] == [True, None]
    with pytest.raises(restarts.UnfinishedWorkError, match="run a would start"):
        restarts.check(plan("3.0e-3"), "results", ["b"])
    with pytest.raises(restarts.UnfinishedWorkError, match="restart: there is no run 'c'"):
        restarts.check(plan("3.0e-3"), "results", ["c"])


def test_runs_that_begin_again_or_resume_are_told_and_many_are_counted(plan_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_of("sweep: {grid: {training.seed: [1, 2, 3, 4, 5, 6, 7, 8]}}", training__train_iters=60)
    names = [run.name for run in plan.runs]
    assert restarts.outlooks(plan, "results", names) == []
    for run in plan.runs[1:]:
        store = leave_unfinished(plan, run.name)
        link(store.ledger, run.folder("results", plan.name).attempts_link)
        store.ledger.touch()
    said = [f"{name} resumes at step 20 of 60" for name in names]
    assert restarts.outlooks(plan, "results", names) == [*said[1:6], "and 2 more that have begun"]
    assert restarts.outlooks(plan, "results", names[:2]) == [said[1]]
    after = "if what it reads has changed, which is known after get_model, merge_corpus"
    making = {names[1]: {"merge_corpus", "get_model"}}
    kept = f"{names[1]} stops, and keeps its step 20, {after}"
    assert restarts.outlooks(plan, "results", names[:2], making=making.__getitem__) == [kept]
    again = f"{names[1]} trains again {after}"
    assert restarts.outlooks(plan, "results", names[:2], names[:2], making.__getitem__) == [again]


def test_runs_with_nothing_to_continue_from_are_told(plan_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = "{a: {}, b: {training.seed: 2}, c: {training.seed: 3, continue_from: null}}"
    plan = plan_of(f"continue_from: itself\nsweep: {{runs: {runs}}}", training__train_iters=60)
    said = "nothing to continue from (continue_from: itself), so begins at step 0: a, b"
    assert restarts.outlooks(plan, "results", ["a", "b", "c"]) == [said]
    store = leave_unfinished(plan, "a")
    link(store.ledger, plan["a"].folder("results", plan.name).attempts_link)
    store.ledger.touch()
    assert restarts.outlooks(plan, "results", ["a", "b"]) == ["a resumes at step 20 of 60", said.replace("a, b", "b")]


def test_a_run_trains_again_with_those_that_it_continues_from(plan_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def plan(lr):
        chain = f"a: {{optimizer.lr: {lr}}}, b: {{continue_from: small/a@20}}, c: {{continue_from: small/b@40}}"
        return plan_of(f"sweep: {{runs: {{{chain}}}}}", training__train_iters=60, checkpoint__save_interval=20)

    before = plan("1.0e-3")
    for run in before.runs:
        store = leave_unfinished(before, run.name)
        link(store.ledger, run.folder("results", before.name).attempts_link)
        store.ledger.touch()
        store.attempt(1).path.mkdir(parents=True)
    names = [run.name for run in before.runs]
    assert restarts.outlooks(before, "results", names) == [f"{name} resumes at step 20 of 60" for name in names]
    a, *others = restarts.outlooks(plan("3.0e-3"), "results", names)
    assert a.startswith("a trains again from step 0: optimizer.lr: 0.001 → 0.003")
    assert others == [f"{name} trains again after {of}, which it continues from" for name, of in ("ba", "ca")]
    assert restarts.outlooks(plan("3.0e-3"), "results", ["b"]) == ["b resumes at step 20 of 60"], "a isn't trained now"


@pytest.mark.parametrize(
    ("given", "names"), [({}, []), ({"restart": "a"}, ["a"]), ({"restart": "a,b"}, ["a", "b"]), ({"restart": 1}, ["1"])]
)
def test_restart_is_no_key_of_the_experiment(given, names):
    assert restarts.split({"device": "cpu", **given}) == ({"device": "cpu"}, names)


def test_what_is_older_than_its_source_is_outdated(plan_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a"}\n')
    shared = Shared(plan_of("corpora: {text: {source: text.jsonl}}", training__train_iters=60))
    run = shared.plan.runs[0]
    made = [shared.paths.tokenizer("bpe"), shared.paths.corpus("text").manifest, shared.paths.model(run.model).source]
    for path in made:
        write_json(path, {})
    for number, path in enumerate((text, *made)):
        os.utime(path, (number, number))
    assert not shared.is_outdated(run)
    os.utime(text, (10, 10))
    assert shared.is_outdated(run)
