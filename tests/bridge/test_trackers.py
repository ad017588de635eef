"""Trackers: what is not installed is said by preflight; with MLflow all attempts are one run."""

import os
import subprocess
import sys

import pytest

from megaboa.bridge import preflight
from megaboa.config.models.outputs import Trackers
from megaboa.config.models.resources import Launch
from megaboa.files import read_json
from megaboa.records import LaunchSpec, parse
from megaboa.store_paths import RunStore

# As Bridge's logger does it (GlobalState.mlflow_logger).
ATTEMPT = """
import sys
from pathlib import Path
from megaboa.bridge.trackers import continue_mlflow_run
from megaboa.store_paths import RunStore
store, loaded = RunStore(Path(sys.argv[1])), sys.argv[2]
continue_mlflow_run(store, store.mlflow_uri)
import mlflow
mlflow.set_tracking_uri(store.mlflow_uri)
mlflow.set_experiment("tiny")
mlflow.start_run(run_name="dp2", tags={"megaboa.attempt": loaded}, description=None)
mlflow.log_params({"checkpoint.load": loaded, "new." + loaded: 1})
mlflow.log_metrics({"loss": 1.0}, step=len(loaded))
"""


@pytest.mark.slow
def test_all_attempts_are_one_run_and_a_changed_parameter_ends_none(tmp_path):
    pytest.importorskip("mlflow", reason="mlflow is not among this project's packages")
    store = RunStore(tmp_path / "store")
    store.path.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ids = []
    for loaded in ("None", "iter_20"):
        subprocess.run([sys.executable, "-c", ATTEMPT, store.path, loaded], check=True, env=environment)
        ids.append(read_json(store.mlflow_run)["run_id"])
    assert ids[0] == ids[1]
    import mlflow

    mlflow.set_tracking_uri(store.mlflow_uri)
    run = mlflow.get_run(ids[0])
    assert run.data.params == {"checkpoint.load": "None", "new.None": "1", "new.iter_20": "1"}
    assert run.data.tags["megaboa.attempt"] == "iter_20"


def test_a_tracker_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    trackers = Trackers(wandb={}).model_dump(mode="json")
    start, here = Launch().model_dump(mode="json"), {"trackers": trackers}
    [reason] = preflight.missing_trackers(parse(LaunchSpec, {**here, "start": start}, "a test"))
    assert reason.startswith("trackers.wandb: the package wandb is not installed here")
    elsewhere = parse(LaunchSpec, {**here, "start": {**start, "python": "/opt/python"}}, "a test")
    assert preflight.missing_trackers(elsewhere) == []
    assert preflight.missing_trackers(parse(LaunchSpec, {"start": start}, "a test")) == []
    inside = {"runtime": "pyxis", "mounts": [], "secrets": [], "workdir": "/w"}
    in_image = parse(LaunchSpec, {**here, "image": inside}, "a test")
    assert preflight.missing_trackers(in_image) == []
    [reason] = preflight.missing_trackers(in_image, inside=True)
    assert "is not installed in the image" in reason
