"""The plan says of a run that it has been trained under a name that it had before."""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from pretended_run import Run

from megaboa.calls import beginning
from megaboa.paths import RunFolder
from megaboa.records import Identity, read
from megaboa.run import renamed


@pytest.fixture
def run(tmp_path, monkeypatch):
    return Run(tmp_path, monkeypatch)


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
        "best1: the same training as child, which is finished: to keep its result instead of training again, name the "
        "run child under sweep.runs"
    )
    assert len(lines) == 6 and last == "and 1 more run with training under another name"
    shutil.rmtree(run.store.checkpoints / "iter_0000006")
    [line] = beginning.begun_elsewhere(plan, names[:1])
    assert line == (
        "best0: the same training as child, which has saved step 4: to resume it, name the run child under sweep.runs"
    )
    runs.append(SimpleNamespace(name="child"))
    assert beginning.begun_elsewhere(plan, names) == [], "its name is the plan's"


def test_of_several_names_the_finished_one_counts_and_folders_of_others_are_passed_over(run, tmp_path, monkeypatch):
    run.train()
    root, identity = tmp_path / "store", read(Identity, run.store.identity)
    began = run.store.path.parents[1] / "zz" / run.store.path.name
    began.mkdir(parents=True)
    shutil.copy(run.store.identity, began / "identity.json")
    (run.store.path.parents[1] / "a-file").touch()
    best = RunFolder(run.folder.path.parent / "best", run.folder.documents)
    others = renamed.stores_of_others(root, best.experiment, {"best"})
    assert {one.path.parent.name for one in others} == {"child", "zz"}
    assert renamed.same_training(best, identity, others).path == run.store.path
    iterdir = Path.iterdir

    def refused(path):
        if path.name == "child":
            raise PermissionError(errno.EACCES, "not yours", path)
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refused)
    assert [one.path.parent.name for one in renamed.stores_of_others(root, best.experiment, {"best"})] == ["zz"]
