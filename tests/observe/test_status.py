"""The table of an experiment's runs, and the script that prints it."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_runs import START, FakeExperiment, end_event, start_event, step_event, write_attempt
from rich.console import Console

from megaboa.observe.status import experiment_progress, progress_table

SCRIPT = Path(__file__).parents[2] / "workflow" / "scripts" / "status.py"


@pytest.fixture
def experiment(tmp_path):
    """A run that is done, one that runs, one that failed and one that waits; in this order in the plan."""
    experiment = FakeExperiment(tmp_path)
    experiment.completed_run("done1")
    store = experiment.plan_run("busy")
    write_attempt(store, 1, [step_event(step, START + step) for step in range(1, 13)])
    experiment.begin("busy", store, [start_event(1)])
    store = experiment.plan_run("bad")
    experiment.begin("bad", store, [start_event(1), end_event(1, 0, outcome="failed", detail="rank 0: exit code 1")])
    experiment.plan_run("later")
    return experiment


def states(experiment):
    return {run.run: run.state for run in experiment_progress(experiment.results)}


def test_runs_come_in_the_order_of_the_plan_with_their_states(experiment):
    expected = [("done1", "done"), ("busy", "running"), ("bad", "failed"), ("later", "waiting")]
    assert list(states(experiment).items()) == expected


def test_a_run_that_was_configured_anew_waits_whatever_its_old_attempts_did(experiment):
    experiment.plan_run("done1", steps=50)
    assert states(experiment)["done1"] == "waiting"


def test_a_run_that_was_killed_after_its_last_checkpoint_is_done_once_it_has_its_manifest(experiment):
    store = experiment.plan_run("killed")
    experiment.begin("killed", store, [start_event(1, pid=2**22 + 1)])
    assert states(experiment)["killed"] == "interrupted"
    experiment.finish("killed", store, 30)
    assert states(experiment)["killed"] == "done"


def test_the_table_shows_every_run_and_counts_them(experiment):
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(progress_table("tiny", experiment_progress(experiment.results)))
    text = console.export_text()
    assert "12/30" in text
    assert "rank 0: exit code 1" in text
    assert "1 running, 1 done, 1 failed, 1 waiting" in text


def test_markup_in_a_name_is_not_obeyed(tmp_path):
    experiment = FakeExperiment(tmp_path)
    store = experiment.plan_run("[red]x")
    experiment.begin("[red]x", store, [start_event(1), end_event(1, 0, outcome="failed", detail="[bold]")])
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(progress_table("tiny", experiment_progress(experiment.results)))
    assert "[red]x" in (text := console.export_text())
    assert "[bold]" in text


def run_script(experiment, *arguments):
    command = [sys.executable, SCRIPT, "--results", experiment.results.parent, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_script_prints_json_for_machines(experiment):
    done = run_script(experiment, "tiny", "--json")
    runs = {run["run"]: run for run in json.loads(done.stdout)["tiny"]}
    assert (runs["busy"]["step"], runs["busy"]["total"], runs["busy"]["eta_seconds"]) == (12, 30, 18.0)


def test_the_script_says_when_there_is_no_such_experiment(experiment):
    done = run_script(experiment, "tinny")
    assert done.returncode == 1
    assert "no experiment `tinny`" in done.stderr
