"""A finished run whose name has changed isn't trained again, and nothing that knows its former name is lost."""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from pretended_run import Run

from megaboa.calls import beginning
from megaboa.files import read_json, write_json
from megaboa.paths import RunFolder
from megaboa.records import RunsSpec, write
from megaboa.run import claims, renamed, supervisor
from megaboa.run.call import TrainingFailed
from megaboa.store_paths import stores


@pytest.fixture
def run(tmp_path, monkeypatch):
    return Run(tmp_path, monkeypatch)


def name(run, to, planned=None):
    """Give the run another name, as the plan does when the sweep's form changes."""
    now = run.folder.path.with_name(to)
    now.mkdir()
    for document in ("run.json", "launch.json", "profile.json"):
        shutil.copy(run.folder.path / document, now)
    run.folder = RunFolder(now)
    write(run.folder.experiment_folder.specs.runs, RunsSpec(runs=tuple(planned or [to])))


def test_a_finished_run_is_taken_over_by_its_new_name(run, tmp_path, capsys):
    was = run.folder
    run.train()
    former = run.store.path
    name(run, "best")
    made = run.train()
    assert run.attempts == [(0, "completed", None)] and run.store.path.is_dir() and not run.store.path.is_symlink()
    assert f"is the same training as child, which is finished: its store is {run.store.path} now" in said(capsys)
    assert made.store == str(run.store.path) and run.folder.attempts_link.resolve() == run.store.ledger
    assert former.is_symlink() and former.resolve() == run.store.path
    assert Path(read_json(was.train_manifest)["checkpoint"]).is_dir() and was.attempts_link.exists()
    assert [one.path for one in stores(tmp_path / "store")] == [run.store.path], "it is counted once"
    name(run, "third")
    run.train()
    assert run.attempts == [(0, "completed", None)] and former.resolve() == run.store.path
    run.folder = was
    write(was.experiment_folder.specs.runs, RunsSpec(runs=("child",)))
    run.train()
    assert run.attempts == [(0, "completed", None)], "the former name finds it, too"


def test_without_a_link_in_its_place_the_store_stays_where_it_is(run, monkeypatch):
    run.train()
    former = run.store.path
    name(run, "best")

    def no_links(target, path):
        raise PermissionError(errno.EPERM, "no links here", path)

    monkeypatch.setattr(renamed.files, "link", no_links)
    with pytest.raises(PermissionError):
        run.train()
    assert former.is_dir() and not former.is_symlink() and not run.store.path.exists()


def said(capsys):
    printed = capsys.readouterr()
    return printed.out + printed.err


@pytest.mark.parametrize("why", ["planned", "restart", "other", "unfinished"])
def test_a_run_is_trained_if_the_other_one_is_planned_or_unfinished_or_another_one_or_on_request(run, why):
    if why == "unfinished":
        run.launch(budget=0)
        run.misfortune("if step == 4: sys.exit(1)")
        with pytest.raises(TrainingFailed):
            run.train()
        run.misfortune("pass")
    else:
        run.train()
    former = run.store.path
    name(run, "best", planned=["best", "child"] if why == "planned" else None)
    if why == "other":
        write_json(run.folder.path / "run.json", {**run.folder.document("run"), "data": {"split": "1,0,0"}})
    supervisor.train(RunFolder(run.folder.path, {**run.folder.documents, "restart": why == "restart"}))
    assert run.attempts == [(0, "completed", None)] and run.store.path != former and not former.is_symlink()
    assert len(run.entries) == 3 and claims.newest(run.store.claims) == 1


def test_the_plan_says_of_runs_that_they_are_trained_under_another_name(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run.train()
    documents, names = run.folder.documents, [f"best{number}" for number in range(7)]
    runs = [
        SimpleNamespace(
            name=one, folder=lambda results, name, one=one: RunFolder(run.folder.path.parent / one, documents)
        )
        for one in names
    ]
    plan = SimpleNamespace(name="new", experiment=SimpleNamespace(store="store"), runs=runs)
    first, *_, last = lines = beginning.begun_elsewhere(plan, names[1:])
    assert first == (
        "best1: the same training as child, which is finished: taken over, not trained again "
        "(--config restart=best1 trains it)"
    )
    assert len(lines) == 6 and last == "and 1 more run with training under another name"
    shutil.rmtree(run.store.checkpoints / "iter_0000006")
    [line] = beginning.begun_elsewhere(plan, names[:1])
    assert line == (
        "best0: the same training as child, which has saved step 4: to resume it, name the run child under sweep.runs"
    )
    runs.append(SimpleNamespace(name="child"))
    assert beginning.begun_elsewhere(plan, names) == [], "its name is the plan's"
