"""More than one fault at a time: for real, on a real cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import matrix
import pytest
from faults import AT_ONCE, NAME, STEPS, WAIT, Faults
from lab import Lab
from site_clone import SiteClone

pytestmark = pytest.mark.slow

PART = "Several faults"
# A host that doesn't answer is given up so late that somebody can cancel the job before.
PATIENT, USUAL = 60, 10
RUNS = dict.fromkeys(("quiet", "cancelled", "controller", "each"), STEPS)
AWAY = 20  # seconds without a controller


@pytest.fixture(scope="module")
def faults(make_lab: Callable[..., Lab]) -> Iterator[Faults]:
    lab = make_lab(memory_mb=32000, extra_conf=[f"SlurmdTimeout={PATIENT}"])
    found = Faults(lab, SiteClone(lab), {run: f"{values}, {AT_ONCE}" for run, values in RUNS.items()})
    found.prepare("quiet")
    yield found
    matrix.write(PART, found.rows)


def test_a_job_is_cancelled_while_a_host_is_dead(faults):
    process, start = faults.start_and_wait("cancelled")
    job, lost = start["job"], start["nodes"][1]
    faults.lab.crash(lost)
    try:
        # It doesn't answer, but its job is still running for SLURM.
        faults.clone.wait(lambda: faults.lab.state(lost).endswith("*"), PATIENT, f"the silence of {lost}")
        assert faults.queue(job)[0] == "RUNNING"
        faults.lab.run(["scancel", job])
        faults.lab.configure(SlurmdTimeout=USUAL)
        faults.clone.wait(lambda: faults.queue(job)[0] == "CANCELLED", WAIT, "the end of the job")
        faults.snakemake_ends(process, code=1)
        assert faults.queue(job)[0] == "CANCELLED", "it has come back"
    finally:
        faults.lab.boot(lost)
        faults.lab.wait_idle()
    assert faults.queue(job)[0] == "CANCELLED" and len(faults.clone.starts(NAME, "cancelled")) == 1
    again = time.time()
    faults.finish("cancelled")
    end = faults.ends("cancelled")[0]
    assert end["cause"] == "cancelled" and end["action"] == "stop"
    outcome = "cancelled: stops, and stays so; the next call resumes"
    faults.record("scancel while one of the hosts is dead", outcome, jobs=2, since=again)


def test_the_controller_is_killed_while_a_host_dies(faults):
    faults.lab.configure(SlurmdTimeout=USUAL)
    process, start = faults.start_and_wait("controller")
    lost, hit = start["nodes"][1], time.time()
    faults.lab.kill_controller()
    faults.lab.crash(lost)
    try:
        time.sleep(AWAY)
        faults.lab.start_controller()
        faults.finish("controller", process)
        end, last = faults.ends("controller")[0], faults.clone.starts(NAME, "controller")[-1]
    finally:
        faults.lab.boot(lost)
        faults.lab.wait_idle()
    assert end["cause"] == "node_failure" and end["bad_nodes"] == [lost] and lost not in last["nodes"]
    event = f"SIGKILL of slurmctld, then a host loses its power; slurmctld is started again after {AWAY} s"
    faults.record(event, "node failure: same job on other hosts, the lost one avoided", since=hit)


def test_each_of_three_hosts_dies_once(faults):
    """The last one with the supervisor, who alone could tell SLURM that the run can do without no other host."""
    faults.lab.configure(SlurmdTimeout=USUAL)
    process = faults.start("each")
    died = []
    for attempt in (1, 2, 3):
        faults.wait_for_steps("each", attempt, 3)
        start = faults.clone.starts(NAME, "each")[-1]
        if died:  # it is there again, and the run may not need it
            faults.lab.boot(died[-1])
            faults.lab.wait_idle(1)
        died.append([host for host in start["nodes"] if host not in died][-1])
        faults.lab.crash(died[-1])
    hit, job = time.time(), faults.job("each")
    try:
        assert start["nodes"][0] == died[-1] and sorted(died) == faults.lab.nodes
        faults.clone.wait(lambda: faults.queue(job)[0] == "PENDING", WAIT, "the job to be put back")
        faults.lab.wait_idle(2)
        faults.clone.megaboa("status", NAME)  # or Snakemake, within five minutes
        faults.finish("each", process)
    finally:
        faults.lab.boot(died[-1])
        faults.lab.wait_idle()
    ends, last = faults.ends("each"), faults.clone.starts(NAME, "each")[-1]
    assert [end["cause"] for end in ends[:-1]] == ["node_failure"] * 3
    assert [end["bad_nodes"] for end in ends[:-1]] == [[host] for host in died]
    assert died[-1] not in last["nodes"]
    outcome = "node failure: what failed longest ago is given back when the run can't do without"
    faults.record("of three hosts each dies once, the last one with the supervisor", outcome, since=hit)


def test_the_page_has_these_events(faults):
    matrix.check(PART, faults.rows)
