"""What people do to runs that they, or others, have called for already: for real, on a real cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import matrix
import pytest
from faults import AT_ONCE, NAME, ONE_HOST, SAVE_INTERVAL, STEPS, WAIT, Faults
from lab import UID, Lab
from site_clone import SiteClone

from megaboa.files import read_json

pytestmark = pytest.mark.slow

PART = "Calls, queues"
PARKED = ("limit", "second", "clones", "environment", "held", "started")
WAITING = ("waiting", "edited")
FAILING, REMEMBERING = "failing", "remembering"  # one fails twice on a host, which the other one avoids
RUNS = {
    "quiet": STEPS,
    # It takes no notice of its own failures: else the host would not be given to it again.
    FAILING: f"{STEPS}, {AT_ONCE}, launch.health_check: true, recovery.exclude_hours: 0",
    **dict.fromkeys((REMEMBERING, *PARKED, *WAITING), f"{STEPS}, {AT_ONCE}"),
}
PARTITION = "gpu"  # that runs are trained in
EDITED_RATE = 0.5
WALL_TIME = 60  # seconds: SLURM knows no shorter one


@pytest.fixture(scope="module")
def faults(make_lab: Callable[..., Lab]) -> Iterator[Faults]:
    lab = make_lab(nodes=4, memory_mb=32000)
    found = Faults(lab, SiteClone(lab), RUNS, ONE_HOST)
    found.prepare("quiet")
    yield found
    matrix.write(PART, found.rows)


@pytest.fixture(scope="module")
def call(faults: Faults) -> Iterator[subprocess.Popen]:
    """Snakemake with several runs that have begun; their ranks are stopped until a test resumes them."""
    call = faults.start(*PARKED)
    for run in PARKED:
        faults.park(run)
    return call


@pytest.fixture(scope="module")
def others(faults: Faults) -> SiteClone:
    """Another clone with the same store."""
    clone = SiteClone(faults.lab, "other")
    text = (faults.clone.path / faults.config).read_text()
    (clone.path / faults.config).write_text(f"store: {faults.clone.path}/store\n{text}")
    subprocess.run(["chown", f"{UID}:{UID}", str(clone.path / faults.config)], check=True)
    clone.before_training(faults.config)
    return clone


def test_a_host_on_which_a_run_fails_twice_is_avoided_by_another_run(faults):
    """The host that is given out first: the other run is in the queue again before anything has started there."""
    (first,) = faults.clone.starts(NAME, "quiet")
    (bad,) = first["nodes"]
    process = faults.start(FAILING)
    faults.clone.wait(lambda: faults.kill_health_rank(bad), WAIT, f"the health check of {bad}")
    faults.clone.wait_for_step(NAME, FAILING, 3)
    hit = time.time()
    faults.lab.crash(bad)
    try:  # the administrator is quicker than SLURM, which takes half a minute to notice
        faults.admin("update", f"nodename={bad}", "state=down", "reason=power")
        faults.wait_for_start(FAILING, 2)
    finally:
        faults.lab.boot(bad)
    faults.finish(FAILING, process)
    (refused,) = (one for one in faults.clone.ledger(NAME, FAILING) if one["event"] == "unhealthy")
    lost, done = faults.ends(FAILING)
    assert (refused["bad_nodes"], lost["cause"], lost["bad_nodes"]) == ([bad], "node_failure", [bad])
    assert done["outcome"] == "completed"
    begun, again = faults.clone.starts(NAME, FAILING)
    assert begun["nodes"] == [bad] != again["nodes"] and (begun["restarts"], again["restarts"]) == (1, 2)
    event = "a host fails the check before the first start, and loses its power when it is given to the job again"
    outcome = "unhealthy, node failure: the same job goes on, and the store remembers both"
    faults.record(f"{event} (recovery.exclude_hours: 0)", outcome, since=hit)
    faults.lab.wait_idle()
    faults.finish(REMEMBERING)
    entries = faults.clone.ledger(NAME, REMEMBERING)
    assert [entry["event"] for entry in entries] == ["call", "left", "start", "end"]
    assert entries[1]["nodes"] == [bad]
    assert bad not in entries[2]["nodes"]
    shown = faults.clone.megaboa("nodes", bad)
    assert ", avoided for " in shown and shown.count(f"({NAME}/{FAILING}") == 2
    assert "unhealthy: processors: no result" in shown and f"node failure: node {bad} is DOWN" in shown
    faults.clone.megaboa("nodes", bad, "--forget")
    assert len(faults.clone.jobs(REMEMBERING)) == 1
    outcome = "the same job starts on another, from the queue"
    faults.record("a host is given to the job on which another run of the store has just failed twice", outcome)


def test_a_second_call(faults, call):
    output = faults.clone.snakemake(f"results/{NAME}/runs/second/train.json", "--configfile", faults.config, code=1)
    assert f"is being worked on by snakemake, process {call.pid}" in output or "is being worked on by" in output
    faults.unpark("second")
    faults.trained("second")
    assert [entry["event"] for entry in faults.clone.ledger(NAME, "second")] == ["call", "start", "end"]
    assert call.poll() is None
    outcome = "refused: it says which process on which host works on the experiment"
    faults.record("a second call while Snakemake lives", outcome)


@pytest.mark.parametrize(
    ("run", "exported"),
    [("clones", {}), ("environment", {"SQUEUE_PARTITION": "cpu"})],
    ids=["", "SQUEUE_PARTITION"],
)
def test_two_clones_with_one_store(faults, call, others, run, exported):
    """squeue lists one partition only where SQUEUE_PARTITION is exported, and that isn't the run's."""
    second = others.start(f"results/{NAME}/runs/{run}/train.json", "--configfile", faults.config, env=exported)
    said = others.results(NAME, "logs", "progress.log")
    try:
        others.wait(
            lambda: (said.exists() and f"{run} " in said.read_text()) or len(faults.clone.starts(NAME, run)) > 1,
            300,
            "the second job",
        )
        lines = [line for line in said.read_text().splitlines() if f" {run} " in line]
        assert f"is being trained by SLURM job {faults.job(run)}" in lines[0], lines
        faults.unpark(run)
        faults.trained(run)
        others.wait(others.results(NAME, "runs", run, "train.json").exists, WAIT, "the result in the second clone")
    finally:
        os.killpg(second.pid, signal.SIGKILL)
        second.wait()
    assert [entry["event"] for entry in faults.clone.ledger(NAME, run)] == ["call", "start", "end"]
    assert others.store(NAME, run) == faults.store(run)
    event = "two clones with one store train the same run"
    event += ", SQUEUE_PARTITION exported in the second" if exported else ""
    faults.record(event, "the second job waits for the first, and takes its result")


def test_the_wall_time_is_shortened(faults, call):
    """To less than the job has used. The supervisor, which asks now and then, can't hear of it: it stands still."""
    (start,) = faults.clone.starts(NAME, "limit")
    job, host = start["job"], start["nodes"][0]
    time.sleep(max(0.0, start["time"] + WALL_TIME - time.time()))
    faults.run = "limit"
    faults.signal_supervisor(host, "STOP")
    faults.admin("update", f"JobId={job}", "TimeLimit=1")
    hit = time.time()
    faults.clone.wait(lambda: faults.queue(job)[0] != "RUNNING", WAIT, "the end of the wall time")
    for number in faults.ranks(host) + faults.supervisor(host):  # SLURM has done so already
        faults.lab.on_node(host, ["kill", "-CONT", str(number)], user="root", check=False)
    faults.clone.wait(lambda: faults.ends("limit"), WAIT, "the end of the attempt")
    faults.clone.wait(lambda: faults.queue(job)[0] == "PENDING", WAIT, "the job to be put back")
    faults.admin("update", f"JobId={job}", "TimeLimit=60")
    faults.trained("limit")
    end = faults.ends("limit")[0]
    assert end["cause"] == "time_limit" and end["action"] == "requeue"
    event = "scontrol update TimeLimit= to less than the job has used"
    faults.record(event, "time limit: same job goes on in the queue", since=hit)


def test_a_job_is_put_back_and_held(faults, call):
    faults.run = "held"
    job = faults.job("held")
    faults.unpark("held")
    faults.clone.wait_for_step(NAME, "held", SAVE_INTERVAL + 1)
    faults.admin("requeuehold", job)
    faults.clone.wait(lambda: faults.queue(job) == ("PENDING", "job requeued in held state"), WAIT, "the held job")
    released = time.time()
    faults.admin("release", job)
    faults.trained("held")
    end, again = faults.ends("held")[0], faults.clone.starts(NAME, "held")[1]
    assert end["cause"] == "requeued" and again["time"] > released and call.poll() is None
    outcome = "requeued: saves, same job goes on when it is released"
    faults.record("scontrol requeuehold, and later release", outcome)


@pytest.fixture(scope="module")
def waiting(faults: Faults, call: subprocess.Popen) -> Iterator[None]:
    """Runs whose jobs wait for a partition that is down, one of them held; who submitted them, Snakemake, is killed."""
    faults.admin("update", f"PartitionName={PARTITION}", "State=DOWN")
    try:
        faults.start(*WAITING)
        for run in WAITING:
            faults.clone.wait(lambda run=run: faults.clone.jobs(run), WAIT, f"the job of {run}")
            (job,) = faults.clone.jobs(run)
            faults.clone.wait(lambda job=job: faults.queue(job) == ("PENDING", "PartitionDown"), WAIT, "its wait")
        faults.end_call()
        faults.admin("hold", *faults.clone.jobs("waiting"))
        yield
    finally:
        faults.admin("update", f"PartitionName={PARTITION}", "State=UP")


def test_the_file_is_edited_and_planned_after_snakemake_was_killed(faults, waiting):
    """One job has begun and one waits; what is planned meanwhile is trained by nobody."""
    runs = ("started", "edited")
    path = faults.clone.path / faults.config
    text = path.read_text()
    for run in runs:
        assert text.count(f" {run}: {{") == 1
        path.write_text(path.read_text().replace(f" {run}: {{", f" {run}: {{optimizer.lr: {EDITED_RATE}, "))
    targets = [f"results/{NAME}/runs/{run}/train.json" for run in runs]
    # On a fast machine the run has saved before it stands still, and then an edited one is planned only to restart.
    restart = ("--config", "restart=started")
    said = faults.clone.snakemake("-n", *targets, "--configfile", faults.config, *restart)
    assert "optimizer.lr" in said and "runs.json changed" in said
    planned = faults.clone.results(NAME, "preview", "runs", "edited", "run.json")
    assert read_json(planned)["optimizer"]["lr"] == EDITED_RATE, "the plan is of the edited file"
    path.write_text(text)
    faults.unpark("started")
    faults.clone.wait_for_step(NAME, "started", SAVE_INTERVAL + 1)
    faults.admin("requeue", faults.job("started"))  # its next life reads again what it is to train
    faults.admin("update", f"PartitionName={PARTITION}", "State=UP")
    faults.trained("started")
    faults.trained("edited")
    for run, which in (("started", "runs, and is requeued"), ("edited", "waits")):
        faults.run = run
        asked = [read_json(path)["run"]["optimizer"] for path in faults.store(run).glob("attempts/*/asked.json")]
        assert len(asked) == len(faults.clone.starts(NAME, run)) and all(one.get("lr") != EDITED_RATE for one in asked)
        event = f"SIGKILL of snakemake while a job {which}; the file is edited, planned (-n), and the edit undone"
        faults.record(event, "what was submitted is trained")


def test_a_partition_goes_down(faults, waiting):
    """It is UP again; the job that is held waits all the same."""
    (job,) = faults.clone.jobs("waiting")
    assert faults.queue(job) == ("PENDING", "JobHeldAdmin") and not faults.clone.ledger(NAME, "waiting")
    faults.admin("update", f"PartitionName={PARTITION}", "State=UP")
    faults.admin("release", job)
    faults.trained("waiting")
    assert [end["outcome"] for end in faults.ends("waiting")] == ["completed"]
    event = "the partition goes DOWN, a waiting job is held (scontrol hold), the partition comes UP, release"
    faults.record(event, "nothing: the job waits, and trains when it may")


def test_the_page_has_these_events(faults):
    matrix.check(PART, faults.rows)
