"""megaboa.run.leaving: the way back into the queue, and a cancellation that comes before it."""

import json
import time
from dataclasses import replace

import pytest

from megaboa import files
from megaboa.config.models.resources import Launch, Recovery
from megaboa.launch import slurm
from megaboa.launch.ranks import Ended
from megaboa.paths import RunFolder, RunStore
from megaboa.run import leaving, site, supervisor
from megaboa.run.call import Call, Interrupted, Requeued, TrainingFailed
from megaboa.run.lives import Signals
from megaboa.run.progress import read_progress
from megaboa.run.watch import Watched

SHOWN = "JobId=17 JobState={} Reason={} Restarts={} BatchFlag=1 Requeue=1 NumNodes=2 NodeList=n[1-2] Partition=gpu"
JOB = slurm.parse_job(SHOWN.format("RUNNING", "None", 0) + " ExcNodeList=n7")
N2_IS_DOWN = "NodeName=n1 State=ALLOCATED\nNodeName=n2 State=DOWN* Reason=Not responding [root@2026-11-22T20:03:36]\n"


@pytest.fixture
def call(tmp_path, fake_command):
    """A supervisor's life in job 17, whose attempt has just ended; `show` sets what SLURM says of the job now."""
    folder = RunFolder(tmp_path / "results" / "my" / "runs" / "a")
    start = Launch().model_dump(mode="json")
    launch = {"nodes": 2, "gpus_per_node": 1, "cpus_per_rank": 1, "start": start}
    files.write_json(folder.path / "launch.json", launch | {"recovery": Recovery().model_dump(mode="json")})
    store = RunStore(tmp_path / "store")
    store.path.mkdir()
    files.write_json(store.identity, {"run": {"training": {"train_iters": 20}}})
    for entry in (
        {"event": "call", "job": "17", "restarts": 0, "excluded": ["n7"]},
        {"event": "start", "attempt": 1, "job": "17", "restarts": 0, "resumed_from": 0, "host": "n1", "pid": 1},
        {"event": "end", "attempt": 1, "outcome": "failed", "cause": "node_failure", "bad_nodes": ["n2"]}
        | {"iteration": 0, "action": "requeue", "detail": "node failure"},
    ):
        files.append_line(store.ledger, json.dumps({"time": time.time(), **entry}))
    fake_command("sinfo", "for n in 1 2 3 4 5 6 7; do echo n$n idle; done")
    told = tmp_path / "told"
    (tmp_path / "nodes").write_text(N2_IS_DOWN)
    fake_command(
        "scontrol",
        f"""case "$*" in
"-o show job"*) cat {tmp_path}/job;;
"-o show node"*) cat {tmp_path}/nodes;;
"show hostnames n[1-2]") echo n1; echo n2;;
"show hostnames"*) echo $3;;
*) echo "$*" >>{told};;
esac""",
    )
    found = Call(folder, store, site.Allocation(JOB, folder.launch, "cpu"), Signals(), 0, lambda text: None)
    found.show = lambda *words: (tmp_path / "job").write_text(SHOWN.format(*words))
    found.told = lambda: told.read_text().splitlines() if told.exists() else []
    found.show("RUNNING", "None", 0)
    return found


def test_a_requeue_excludes_the_users_nodes_and_those_that_failed(call):
    with pytest.raises(Requeued):
        leaving.leave(call, "node failure")
    assert call.told() == ["requeue 17", "update JobId=17 ExcNodeList=n2,n7"]


def test_after_exclude_hours_only_the_users_nodes_are_left(call):
    patient = call.folder.launch
    call.folder.__dict__["launch"] = replace(patient, recovery=replace(patient.recovery, exclude_hours=0.0))
    with pytest.raises(Requeued):
        leaving.leave(call, "time limit")
    assert call.told() == ["requeue 17", "update JobId=17 ExcNodeList=n7"]


def test_a_job_that_was_cancelled_on_the_way_is_not_put_back_and_the_ledger_says_so(call):
    call.show("COMPLETING", "None", 0)
    with pytest.raises(Interrupted, match="SLURM job 17 was cancelled"):
        leaving.leave(call, "node failure: node n2 is DOWN*")
    assert call.told() == []
    last = call.entries[-1]
    assert (last.event, last.detail) == ("cancelled", "SLURM job 17 was cancelled, and is not put back")
    found = read_progress(call.payload.path)
    assert (found.state, found.goes_on, found.detail) == ("interrupted", False, last.detail)
    assert found.event == f"stopped: {last.detail}"


def test_what_can_not_be_put_back_for_another_reason_has_failed(call, monkeypatch):
    monkeypatch.setattr(site, "PATIENCE_SECONDS", -1.0)
    call.site.job = site.replace(JOB, requeue=False)
    with pytest.raises(TrainingFailed, match="SLURM did not put the job back"):
        leaving.leave(call, "node failure")


@pytest.mark.parametrize("reason", ["cancelled", None])  # by scancel's signal, or by what srun says of the dead node
def test_scancel_goes_before_a_dead_node(call, reason):
    call.show("COMPLETING", "None", 0)
    watched = Watched(Ended(returncode=1), reason, "the supervisor got SIGTERM" if reason else "")
    failure = supervisor._why(call, call.payload.attempt(1), watched, time.time())
    assert failure.cause == "cancelled"
    assert failure.evidence == "SLURM job 17 was cancelled; node n2 is DOWN* (Not responding)"


@pytest.mark.parametrize("job", [("COMPLETING", "None", 1), ("PENDING", "BeginTime", 1)])
def test_where_slurm_put_the_job_back_the_signal_is_its_own(call, job):
    call.show(*job)
    watched = Watched(Ended(returncode=1), "cancelled", "the supervisor got SIGTERM")
    failure = supervisor._why(call, call.payload.attempt(1), watched, time.time())
    assert failure.cause == "node_failure" and failure.nodes == ("n2",)


def test_a_signal_between_attempts_is_written_down(call):
    leaving.heed_signals(call)
    call.signals.seen.append("SIGTERM")
    with pytest.raises(Interrupted):
        leaving.heed_signals(call)
    assert call.entries[-1].event == "cancelled" and call.entries[-1].detail == "the supervisor got SIGTERM"
    call.show("COMPLETING", "None", 0)
    with pytest.raises(Interrupted, match="SLURM job 17 was cancelled"):
        leaving.heed_signals(call)
    assert call.told() == []


def test_a_preemption_between_attempts_puts_the_job_back(call):
    call.signals.seen.append("SIGTERM")
    with (call.payload.path.parent / "job").open("a") as job:
        job.write(" PreemptTime=2026-11-22T20:01:08")
    with pytest.raises(Requeued):
        leaving.heed_signals(call)
    assert call.told()[0] == "requeue 17"


def test_a_call_after_a_cancellation_trains_again(call):
    call.signals.seen.append("SIGTERM")
    with pytest.raises(Interrupted):
        leaving.heed_signals(call)
    files.append_line(call.payload.ledger, json.dumps({"event": "call", "job": "18", "time": time.time()}))
    assert read_progress(call.payload.path).state == "running"
