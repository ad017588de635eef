"""megaboa.scheduler.slurm.job_ends: nodes that fell, and what became of a job."""

import time
from dataclasses import replace

import pytest

from megaboa.scheduler.slurm import job_ends
from megaboa.scheduler.slurm.job_ends import fallen, fallen_of
from megaboa.scheduler.slurm.queries import Job, Node

LATER = time.time() + 3600
JOB = Job("17", "RUNNING", nodes="n[1-2]", requeue=True, partition="gpu", start=1000.0, end=LATER)
SINCE = 2000.0
N1_IS_DOWN = (
    "NodeName=n1 OS=Linux 6.1 State=DOWN* BootTime=1970-01-01T00:00:01 SlurmdStartTime=None "
    "Reason=Not responding [root@2026-11-20T16:29:52]\n"
    "NodeName=n2 OS=Linux 6.1 State=IDLE BootTime=1970-01-01T00:00:01 SlurmdStartTime=None\n"
)


@pytest.mark.parametrize(
    ("node", "down"),
    [
        (Node("n1", "ALLOCATED", started=SINCE - 1), False),
        (Node("n1", "ALLOCATED"), False),
        (Node("n1", "DOWN+NOT_RESPONDING", started=SINCE - 1), True),
        (Node("n1", "IDLE+DRAIN", started=SINCE - 1), False),
        (Node("n1", "IDLE", booted=SINCE + 1), True),  # it was away in between
        (Node("n1", "IDLE", started=SINCE + 1), False),  # its slurmd was upgraded
    ],
)
def test_a_node_that_fell(node, down):
    assert fallen([node], SINCE) == ([node] if down else [])


def test_slurms_words_on_a_fallen_node(fake_command):
    fake_command("scontrol", f"cat <<end\n{N1_IS_DOWN}end")
    assert fallen_of(["n1", "n2"], time.time()) == {"n1": "node n1 is DOWN* (Not responding)"}


def test_nothing_is_concluded_from_silence(unreachable_slurm):
    assert fallen_of(["n1"], 0) == {}


@pytest.mark.parametrize(
    ("now", "cause"),
    [
        (JOB, None),
        (replace(JOB, preempted=True), "preempted"),
        (replace(JOB, state="PENDING", restarts=1, nodes=""), "requeued"),
        (replace(JOB, state="RUNNING", restarts=1), "requeued"),
        (replace(JOB, state="PENDING", restarts=1, preempted=True), "preempted"),
        (replace(JOB, state="TIMEOUT"), "time_limit"),
        (replace(JOB, state="DEADLINE"), "time_limit"),
        (replace(JOB, state="CANCELLED"), "cancelled"),
        (replace(JOB, state="COMPLETING", reason="None"), "cancelled"),
        (replace(JOB, state="CANCELLED", restarts=1), "cancelled"),  # while it waited again
        (replace(JOB, state="COMPLETING", reason="None", restarts=1), "requeued"),
        (replace(JOB, state="COMPLETING", reason="None", preempted=True), "preempted"),
        (replace(JOB, state="COMPLETING", reason="NodeDown"), "node_failure"),
        (replace(JOB, state="COMPLETING", reason="OutOfMemory"), "out_of_memory"),
        (replace(JOB, state="OUT_OF_MEMORY", reason="OutOfMemory"), "out_of_memory"),
    ],
)
def test_what_slurm_did_to_the_job(now, cause):
    failure = job_ends.interruption(JOB, now)
    assert (failure and failure.cause) == cause


@pytest.mark.parametrize("end", [LATER, time.time() - 1], ids=["left", "over"])
def test_whether_the_wall_time_was_used_up_is_what_slurm_says_now(end):
    """An administrator can shorten it to less than has been used; then the end that we have read lies in the future."""
    then = replace(JOB, end=end)
    assert job_ends.interruption(then, replace(then, state="COMPLETING", reason="TimeLimit")).cause == "time_limit"
    assert job_ends.interruption(then, replace(then, state="TIMEOUT", reason="TimeLimit")).cause == "time_limit"
    assert job_ends.interruption(then, replace(then, state="COMPLETING", reason="None")).cause == "cancelled"
    assert job_ends.interruption(then, replace(then, state="RUNNING")) is None
