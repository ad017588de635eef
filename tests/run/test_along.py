"""Exports along a run's training: which checkpoints, what is made again, and what is said of failures.

The commands are a script that notes its calls and leaves records, as those of `megaboa` would.
"""

import threading
from dataclasses import dataclass, replace
from pathlib import Path

import made
import pytest
from fake_runs import FakeExperiment

from megaboa.errors import InputError
from megaboa.files import link, write_json, write_text
from megaboa.paths import AlongFolder, RunFolder, run_of
from megaboa.records import AlongSpec, Identity, plain, read, write
from megaboa.run import along, checkpoints
from megaboa.store_paths import RunStore

COMMAND = """\
import json, sys
from pathlib import Path
kind, words = sys.argv[1], dict(zip(sys.argv[2::2], sys.argv[3::2]))
here, out = Path(__file__).parent, Path(words["--out"])
with (here / "calls").open("a") as calls:
    calls.write(f"{kind} {out.parent.name}\\n")
if (here / f"{kind}-fails-{out.parent.name}").exists():
    sys.exit("a traceback\\nerror: it can't be")
out.write_text((here / f"{kind}.json").read_text())
"""
SPEC = AlongSpec(run="a", every=None, file_gb=5.0, license=None, command="true")
ALL = ("export-model", "prove-export", "evaluate")


def made_evaluation(**given):
    return made.evaluation(values={"acc": 0.5}, **given)


@dataclass
class Training:
    """A run that is not finished."""

    folder: RunFolder
    checkpoints: Path
    scripts: Path

    def save(self, *iterations):
        for iteration in iterations:
            folder = checkpoints.folder(self.checkpoints, iteration)
            folder.mkdir(parents=True)
            (folder / checkpoints.LAST_WRITTEN).write_text("x")
        checkpoints.mark_complete(self.checkpoints)

    def export(self, spec=SPEC, **more):
        return along.export_along(self.folder, spec, lambda said: None, **more)

    def makes(self, digest):
        """What the commands leave from now on: of an export with this digest."""
        write_json(self.scripts / "export-model.json", plain(made.export(path=str(self.scripts), digest=digest)))
        write_json(self.scripts / "prove-export.json", {"state": "PASS", "checks": [], "digest": digest})
        self.evaluates(export=digest)

    def evaluates(self, **given):
        write_json(self.scripts / "evaluate.json", plain(made_evaluation(**given)))

    def calls(self):
        """Those since it was asked last."""
        path = self.scripts / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def run(tmp_path, monkeypatch):
    scripts, experiment = tmp_path / "scripts", FakeExperiment(tmp_path)
    write_text(scripts / "megaboa", COMMAND)
    monkeypatch.setattr(along, "SCRIPTS", scripts)
    store = experiment.plan_run("a", steps=30)
    experiment.begin("a", store, [])
    folder = RunFolder(experiment.results / "runs" / "a")
    write_json(folder.file("launch"), {"store": str(tmp_path / "store")})
    write(folder.source_manifest, made.source())
    training = Training(folder, store / "checkpoints", scripts)
    training.makes("1")
    return training


def test_every_checkpoint_so_far_is_exported_proved_and_evaluated_once(run):
    run.save(10, 20)
    found = run.export()
    assert [(one.iteration, one.values) for one in found.exports] == [(10, {"acc": 0.5}), (20, {"acc": 0.5})]
    assert run.calls() == [f"{kind} {step}" for step in (10, 20) for kind in ALL]
    run.save(30)
    assert [one.iteration for one in run.export().exports] == [10, 20, 30]
    assert run.calls() == [f"{kind} 30" for kind in ALL]


def test_a_number_of_steps_chooses_and_without_a_command_nothing_is_evaluated(run):
    run.save(10, 20, 30)
    assert [one.iteration for one in run.export(replace(SPEC, every=20, command=None)).exports] == [20]
    assert run.calls() == ["export-model 20", "prove-export 20"]


def test_after_it_was_continued_in_place_those_of_earlier_versions_count_too(run, tmp_path):
    run.save(10, 20, 30)
    run.export()
    run.calls()
    first = RunStore.of(run.folder.attempts_link)
    parent = {
        "experiment": "tiny",
        "run": "a",
        "iteration": 20,
        "load": {"optimizer": True, "rng": True},
        "identity": read(Identity, first.identity).digest,
    }
    store = RunStore(first.path.with_name("later"))
    write_json(store.identity, {"run": {**read(Identity, first.identity).run, "parent": parent}})
    store.ledger.touch()
    link(store.ledger, run.folder.attempts_link)
    later = Training(run.folder, store.checkpoints, run.scripts)
    later.save(40)
    assert [one.iteration for one in later.export().exports] == [10, 20, 40]
    assert run.calls() == [f"{kind} 40" for kind in ALL]


@pytest.mark.parametrize("change", [{"file_gb": 1.0}, {"license": "mit"}])
def test_what_it_was_made_for_has_changed(run, change):
    run.save(10)
    run.export()
    run.calls()
    run.makes("2")
    run.export(replace(SPEC, **change))
    assert run.calls() == [f"{kind} 10" for kind in ALL]


@pytest.mark.parametrize("change", [{"command": "other"}, {"files": {"a.py": "2"}}])
def test_another_command_or_script_evaluates_again_and_exports_nothing(run, change):
    run.save(10)
    run.evaluates(files={"a.py": "1"})
    before = replace(SPEC, files={"a.py": "1"})
    run.export(before)
    run.export(before)
    assert run.calls() == [f"{kind} 10" for kind in ALL]
    run.evaluates(**{"files": {"a.py": "1"}, **change})
    for _ in range(2):
        run.export(replace(before, **change))
    assert run.calls() == ["evaluate 10"]


def test_an_evaluation_of_another_export_is_made_again(run):
    run.save(10)
    run.export()
    run.calls()
    write(AlongFolder(run.folder.path, iteration=10).evaluation, made_evaluation(export="9"))
    run.export()
    assert run.calls() == ["evaluate 10"]


def test_files_that_the_command_writes_evaluate_nothing(run):
    run.save(10)
    run.evaluates(files={"a.py": "1"}, written=("eval.log",))
    for log in ("1", "2"):
        run.export(replace(SPEC, files={"a.py": "1", "eval.log": log}))
    assert run.calls() == [f"{kind} 10" for kind in ALL]


def test_exports_of_earlier_versions_stay_valid(run):
    """They noted the evaluation's command with what the export depends on."""
    run.save(10)
    run.export()
    folder = AlongFolder(run.folder.path, iteration=10)
    step = along._Step(folder, RunStore.of(run.folder.attempts_link), SPEC, print)
    write_text(folder.asked_for, step._asked_for(made_evaluation()))
    run.calls()
    run.export()
    assert run.calls() == []
    run.evaluates(command="other")
    run.export(replace(SPEC, command="other"))
    assert run.calls() == ["evaluate 10"]


def test_a_proof_that_is_gone_or_an_export_that_is_gone_is_made_again(run):
    run.save(10)
    run.export()
    folder = AlongFolder(run.folder.path, iteration=10)
    folder.proof.unlink()
    run.calls()
    run.export()
    assert run.calls() == ["export-model 10", "prove-export 10"], "the evaluation is of the same export"


@pytest.mark.parametrize("kind", ALL)
def test_what_failed_for_other_settings_does_not_count_for_these(run, kind):
    run.save(10)
    run.export()
    failing = run.scripts / f"{kind}-fails-10"
    failing.touch()
    run.makes("2")
    with pytest.raises(InputError):
        run.export(replace(SPEC, file_gb=1.0))
    failing.unlink()
    run.calls()
    run.makes("3")
    run.export()
    assert run.calls() == [f"{kind} 10" for kind in ALL]


@pytest.mark.parametrize("kind", ALL)
def test_one_that_fails_stops_no_other_and_is_tried_again(run, kind):
    run.save(10, 20)
    (run.scripts / f"{kind}-fails-10").touch()
    with pytest.raises(InputError) as caught:
        run.export()
    what = {"export-model": "export", "prove-export": "proof"}.get(kind, kind)
    log = run.folder.experiment_folder.logs / "export" / f"a@10.{what}.log"
    name = "evaluation" if kind == "evaluate" else what
    assert str(caught.value) == f"run a: the {name} of step 10 failed: it can't be ({log})"
    assert [call for call in run.calls() if call.endswith(" 20")] == [f"{kind} 20" for kind in ALL]
    (run.scripts / f"{kind}-fails-10").unlink()
    assert [one.iteration for one in run.export().exports] == [10, 20]


def test_what_is_there_without_the_step_that_failed(run):
    """For the report after a failed call: the export of step 20 is proved, and its evaluation failed."""
    run.save(10, 20, 30)
    (run.scripts / "evaluate-fails-20").touch()
    (run.scripts / "export-model-fails-30").touch()
    with pytest.raises(InputError):
        run.export()
    found = [(one.iteration, one.values) for one in along.so_far(run.folder, SPEC)]
    assert found == [(10, {"acc": 0.5}), (20, {})]


def test_a_cause_is_told_once(run):
    run.save(10, 20, 30)
    for failing in ("evaluate-fails-10", "export-model-fails-20", "evaluate-fails-30"):
        (run.scripts / failing).touch()
    with pytest.raises(InputError) as caught:
        run.export()
    logs = run.folder.experiment_folder.logs / "export"
    assert str(caught.value) == (
        f"run a: the evaluation of steps 10, 30 failed: it can't be ({logs}/a@10.evaluate.log); "
        f"the export of step 20 failed: it can't be ({logs}/a@20.export.log)"
    )


def test_following_ends_with_the_run(run, monkeypatch):
    monkeypatch.setattr(along, "LOOK_SECONDS", 0.01)
    run.save(10)
    found = []
    thread = threading.Thread(target=lambda: found.append(run.export(follow=True)))
    thread.start()
    while not (run.scripts / "calls").exists():
        thread.join(0.01)
    run.save(20, 30)
    thread.join(60)
    assert [one.iteration for one in found[0].exports] == [10, 20, 30]


def test_a_run_that_has_not_begun_says_so(run):
    run.folder.attempts_link.unlink()
    with pytest.raises(InputError, match="run a has not begun"):
        run.export()


def test_a_manifest_is_its_runs_or_that_of_a_run_at_a_checkpoint():
    path = Path("results/tiny/runs/a")
    assert run_of(path / "export.json") == RunFolder(path)
    found = run_of(path / "along" / "40" / "proof.json")
    assert (found.iteration, found.name, found.experiment, found.path) == (40, "a", "tiny", path)
    assert found.proof == path / "along" / "40" / "proof.json" and found.file("run") == path / "run.json"
