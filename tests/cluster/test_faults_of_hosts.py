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
RUNS = {"quiet": STEPS, "cancelled": STEPS}


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


def test_the_page_has_these_events(faults):
    matrix.check(PART, faults.rows)
