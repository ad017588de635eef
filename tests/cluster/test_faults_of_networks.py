"""What can happen to the network between hosts, and to their clocks: each for real, on a real cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import matrix
import pytest
from faults import AT_ONCE, HIT_AT, NAME, STEPS, Faults
from lab import Lab
from site_clone import SiteClone

pytestmark = pytest.mark.slow

PART = "Networks, clocks"
CUT, AHEAD = 60, 600  # seconds
# A cut that is shorter than SLURM waits for a host (300 s by default), and one that is longer.
PATIENT, IMPATIENT = 300, 10
RUNS = {
    "quiet": STEPS,
    **dict.fromkeys(("cut", "cut-save", "link", "link-first"), f"{STEPS}, {AT_ONCE}"),
    # Of both the clock's error is more than half.
    "clock": f"{STEPS}, {AT_ONCE}, recovery.no_progress_minutes: 8, resources.runtime: 12m",
}


@pytest.fixture(scope="module")
def faults(make_lab: Callable[..., Lab]) -> Iterator[Faults]:
    lab = make_lab(memory_mb=32000, extra_conf=[f"SlurmdTimeout={PATIENT}"])
    found = Faults(lab, SiteClone(lab), RUNS)
    found.prepare("quiet")
    yield found
    matrix.write(PART, found.rows)


def test_the_network_is_cut_for_a_minute(faults):
    """In training, and in a save of another run: both stand still until the network is cut."""
    process = faults.start("cut", "cut-save")
    faults.park("cut-save")
    faults.park("cut", HIT_AT)
    saving = faults.park_in_a_save("cut-save")
    second = {faults.clone.starts(NAME, run)[0]["nodes"][1] for run in ("cut", "cut-save")}
    for host in second:
        faults.lab.isolate(host)
    try:
        for run in ("cut", "cut-save"):
            faults.unpark(run)
        time.sleep(CUT)
        assert not (saving / "complete.json").exists()
    finally:
        for host in second:
            faults.lab.reconnect(host)
    faults.trained("cut-save")
    faults.finish("cut", process)
    for run, when in (("cut", "in training"), ("cut-save", "in a save")):
        assert [end["outcome"] for end in faults.ends(run)] == ["completed"]
        faults.run = run
        event = f"the network between two hosts is cut for {CUT} s {when}, SlurmdTimeout being {PATIENT} s"
        faults.record(event, "nothing: the ranks wait for each other and go on")


@pytest.mark.parametrize(("run", "place", "whose"), [("link", 1, "a"), ("link-first", 0, "the supervisor's")])
def test_a_link_goes_down(faults, run, place, whose):
    """SLURM gives the host up; what it runs lives on there, and reaches the file system."""
    faults.lab.configure(SlurmdTimeout=IMPATIENT)
    process, start = faults.start_and_wait(run)
    lost, hit = start["nodes"][place], time.time()
    ranks = faults.ranks(lost)
    faults.lab.isolate(lost)
    try:
        faults.wait_for_steps(run, 2)
        assert set(ranks) <= set(faults.ranks(lost)), "the ranks of the lost host live"
        faults.finish(run, process)
    finally:
        faults.lab.reconnect(lost)
        faults.lab.wait_idle()
    end, again = faults.ends(run)[0], faults.clone.starts(NAME, run)[1]
    assert [end["attempt"] for end in faults.ends(run)] == [1, 2]
    assert end["cause"] == "node_failure" and end["bad_nodes"] == [lost]
    assert lost not in again["nodes"] and faults.clone.steps(NAME, run, 1)[-1]["time"] < again["time"]
    outcome = "node failure: same job on other hosts; ranks that live on the lost one write nothing more"
    faults.record(f"the link of {whose} host goes down", outcome, since=hit)


def test_a_clock_is_ahead(faults):
    """Of the supervisor's host, and of the first rank."""
    faults.lab.wait_idle()
    faults.lab.set_clock_ahead("n1", AHEAD)
    shown = float(faults.lab.on_node("n1", ["date", "+%s"]).stdout)
    assert shown - time.time() == pytest.approx(AHEAD, abs=30)
    process, start = faults.start_and_wait("clock")
    assert start["nodes"][0] == "n1" and start["time"] - time.time() > AHEAD - 120
    faults.finish("clock", process)
    assert [end["outcome"] for end in faults.ends("clock")] == ["completed"]
    event = f"a host's clock is {AHEAD // 60} minutes ahead; wall time 12 minutes, recovery.no_progress_minutes 8"
    faults.record(event, "nothing: a hang is told by its own watch, the wall time by SLURM's clock")


def test_the_page_has_these_events(faults):
    matrix.check(PART, faults.rows)
