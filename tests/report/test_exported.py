"""Exports and scores count if they are of the run as it is trained now, and by the command and files of the plan."""

import made
import pytest
from fake_runs import FakeExperiment

from megaboa.paths import RunFolder
from megaboa.records import Along, AlongSpec, EvaluateSpec, ExportedStep, TrainRecord, read, write
from megaboa.report.exported import along_of
from megaboa.report.runs import load_runs

SCRIPT = {"my.py": "a" * 64}


@pytest.fixture
def experiment(tmp_path):
    experiment = FakeExperiment(tmp_path)
    experiment.completed_run("dp1", steps=10)
    experiment.measure("dp1")
    experiment.export("dp1")
    folder = experiment.results / "runs" / "dp1"
    write(folder / "evaluation.json", made.evaluation(command="python my.py", files=SCRIPT, values={"acc": 0.5}))
    plan(experiment, "python my.py", SCRIPT)
    return experiment


def plan(experiment, command, files):
    write(experiment.results / "specs" / "evaluate.json", EvaluateSpec(command=command, files=files))


def shown(experiment):
    (run,) = load_runs(experiment.results)
    return run.export, run.evaluation


def test_the_present_export_and_its_scores_are_shown(experiment):
    assert shown(experiment) == ("store/exports/a", {"acc": 0.5})


def test_nothing_of_an_earlier_training_is_shown(experiment):
    """The run was trained again, and isn't exported any more."""
    path = experiment.results / "runs" / "dp1" / "train.json"
    write(path, made.trained(run="dp1", store=f"{read(TrainRecord, path).store}-later", identity="2"))
    assert shown(experiment) == (None, {})


def test_scores_of_an_earlier_export_are_not_shown(experiment):
    experiment.export("dp1", digest="2")
    assert shown(experiment) == ("store/exports/a", {})


@pytest.mark.parametrize(
    ("command", "files"), [("python my.py", {"my.py": "b" * 64}), ("python my.py --fast", SCRIPT), (None, {})]
)
def test_scores_by_another_command_or_script_are_not_shown(experiment, command, files):
    """A run that isn't among `evaluate.runs` any more keeps its scores, and the next runs are scored by an edit."""
    plan(experiment, command, files)
    assert shown(experiment) == ("store/exports/a", {})


def test_exports_along_the_training_are_shown_while_they_are_asked_for(experiment):
    folder = RunFolder(experiment.results / "runs" / "dp1")
    step = ExportedStep(iteration=10, path="p", digest="1", loss=2.0, values={"acc": 0.4})
    write(folder.along, Along(run="dp1", identity=read(TrainRecord, folder.train_manifest).identity, exports=(step,)))
    assert along_of(folder) is None and not load_runs(experiment.results)[0].along
    asked = AlongSpec(run="dp1", every=None, file_gb=5.0, license=None, command=None)
    write(folder.experiment_folder.specs.of("along", "dp1"), asked)
    assert load_runs(experiment.results)[0].along == (step,)
