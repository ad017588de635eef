import json
import time
from dataclasses import replace

import pytest
from called import called
from fake_runs import FakeExperiment, end_event, start_event

from megaboa.files import append_line, write_json
from megaboa.records import write
from megaboa.run import claims
from megaboa.run.stop import stop
from megaboa.scheduler.slurm import queries
from megaboa.store_paths import RunStore


@pytest.fixture
def store(tmp_path):
    store = RunStore(tmp_path / "store")
    store.path.mkdir()
    return store


@pytest.fixture
def held_by_job(store):
    me = {"host": "n1", "pid": 42, "job": "17", "restarts": 0, "time": time.time()}
    write_json(store.claims / "000001.json", me)
    return store


@pytest.fixture
def job(fake_command, tmp_path):
    """A job of this state; what it is told is kept."""
    fake_command("scancel", f'echo "$@" >{tmp_path}/cancelled')

    def install(state):
        fake_command("scontrol", f"echo JobId=17 JobState={state} Restarts=0 BatchFlag=1 NumNodes=1")
        return tmp_path / "cancelled"

    return install


def test_nobody_trains_it(store):
    assert stop(store) == (False, "it isn't running") and not store.stop.exists()
    with claims.held(store.claims, claims.myself(None)):
        pass
    assert stop(store) == (False, "it isn't running") and not store.stop.exists()


def test_a_process_is_asked(store):
    with claims.held(store.claims, claims.myself(None)):
        asked, said = stop(store)
    assert asked and said.startswith("asked process ") and said.endswith(" to save and stop") and store.stop.exists()


def test_a_killed_process_is_not_asked(store):
    write(store.claims / "000001.json", claims.myself(None))  # nobody holds its lock
    assert stop(store) == (False, "it isn't running") and not store.stop.exists()


def test_a_running_job_is_asked_and_not_cancelled(held_by_job, job):
    cancelled = job("RUNNING")
    assert stop(held_by_job) == (True, "asked SLURM job 17 to save and stop")
    assert held_by_job.stop.exists() and not cancelled.exists()


def test_a_waiting_job_is_taken_out_of_the_queue(held_by_job, job):
    cancelled = job("PENDING")
    assert "was waiting in the queue, and was cancelled" in stop(held_by_job).said
    assert cancelled.read_text() == "17\n"


@pytest.mark.parametrize("state", ["COMPLETED", "TIMEOUT", "NODE_FAIL"])
def test_an_ended_job_is_left_alone(held_by_job, job, state):
    cancelled = job(state)
    assert stop(held_by_job) == (False, "SLURM job 17 has ended already") and not cancelled.exists()


def test_a_job_is_asked_by_its_file_where_slurm_does_not_answer(held_by_job, unreachable_slurm):
    assert "SLURM doesn't answer" in stop(held_by_job).said and held_by_job.stop.exists()


@pytest.fixture
def on_beta(monkeypatch):
    monkeypatch.setattr(queries, "cluster", lambda: "beta")


def test_a_job_of_this_number_on_this_cluster_is_not_cancelled_for_one_on_another(held_by_job, job, on_beta):
    write(held_by_job.claims / "000001.json", replace(claims.last_holder(held_by_job.claims), cluster="alpha"))
    cancelled = job("PENDING")
    said = stop(held_by_job).said
    assert said.startswith("asked SLURM job 17 on cluster alpha ") and "if it runs: its cluster can't be asked" in said
    assert held_by_job.stop.exists() and not cancelled.exists()


def test_another_users_job_of_which_slurm_says_nothing_is_asked(held_by_job, fake_command):
    write(held_by_job.claims / "000001.json", replace(claims.last_holder(held_by_job.claims), user="anna"))
    fake_command("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert "of user anna" in stop(held_by_job).said and held_by_job.stop.exists()


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ({"outcome": "completed"}, "it has all its steps"),
        ({"outcome": "interrupted", "cause": "cancelled", "action": "stop"}, "it isn't running"),
    ],
)
def test_another_users_run_that_has_ended_is_left_alone(held_by_job, fake_command, end, said):
    """SLURM has forgotten the job, and would show it to its user alone."""
    write(held_by_job.claims / "000001.json", replace(claims.last_holder(held_by_job.claims), user="anna"))
    (held_by_job.claims / "000001.released").touch()
    for line in (start_event(1, job="17"), end_event(1, 40, **end)):
        append_line(held_by_job.ledger, json.dumps(line))
    fake_command("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert stop(held_by_job) == (False, said) and not held_by_job.stop.exists()


def test_another_users_run_that_waits_in_the_queue_again_is_asked(held_by_job, fake_command):
    write(held_by_job.claims / "000001.json", replace(claims.last_holder(held_by_job.claims), user="anna"))
    (held_by_job.claims / "000001.released").touch()
    end = end_event(1, 40, outcome="interrupted", cause="time_limit", action="requeue")
    for line in (start_event(1, job="17"), end):
        append_line(held_by_job.ledger, json.dumps(line))
    fake_command("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert stop(held_by_job).asked and held_by_job.stop.exists()


def test_an_experiment_is_stopped_run_by_run(tmp_path):
    experiment, stores = FakeExperiment(tmp_path), {}
    for name in ("ended", "new", "trained"):
        stores[name] = RunStore(experiment.plan_run(name))
        if name != "new":
            experiment.begin(name, stores[name].path, [start_event(1)])
    idle = called("stop", experiment.results)
    assert idle.returncode == 1 and idle.stderr == "tiny: no run is being trained, so there is nothing to stop\n"
    with claims.held(stores["trained"].claims, claims.myself(None)):
        done = called("stop", experiment.results)
        assert done.returncode == 0 and done.stdout.startswith("run trained: asked process "), done.stderr
    assert done.stdout.count("\n") == 1
    assert [name for name, store in stores.items() if store.stop.exists()] == ["trained"]
