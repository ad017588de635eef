"""Fault after fault, in an order that chance has chosen: one job trains through all of them, on a real cluster.

It takes a quarter of an hour, and each of its faults has a test of its own: MEGABOA_STORM=1 runs it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator

import matrix
import pytest
from faults import AT_ONCE, NAME, SAVE_INTERVAL, Faults
from lab import Lab
from site_clone import SiteClone

pytestmark = [pytest.mark.slow, pytest.mark.skipif("MEGABOA_STORM" not in os.environ, reason="only by MEGABOA_STORM=1")]

PART = "Several faults"
SEED = 19
STEPS = "training.train_iters: 160"
RUNS = {"quiet": STEPS, "storm": f"{STEPS}, {AT_ONCE}, recovery.budget: 20, recovery.no_progress_minutes: 0.5"}
SECONDS = 10  # without a supervisor that does anything, or without a controller


class Storm:
    """What can happen to a run; each fault returns what its attempt's end may be called, nothing if it has none."""

    def __init__(self, faults: Faults):
        self.faults, self.start = faults, {}

    def rank(self) -> set[str]:
        self.faults.signal_rank(self.start["nodes"][1], "KILL")
        return {"killed"}

    def srun(self) -> set[str]:
        pattern = "^srun .*train_rank.py"
        self.faults.lab.on_node(self.start["nodes"][0], ["pkill", "-KILL", "-f", pattern], user="root")
        return {"killed"}

    def supervisor(self) -> set[str]:
        self.faults.signal_supervisor(self.start["nodes"][0], "KILL")
        return {"lost"}

    def hang(self) -> set[str]:
        self.faults.signal_rank(self.start["nodes"][1], "STOP")
        return {"hang"}

    def requeue(self) -> set[str]:
        self.faults.admin("requeue", self.faults.job("storm"))
        return {"requeued"}

    def power(self) -> set[str]:
        """Of the host without the supervisor; it is back at once, and looks well."""
        self.faults.lab.crash(self.start["nodes"][1])
        self.faults.lab.boot(self.start["nodes"][1])
        return {"node_failure", "killed"}  # srun may fail before SLURM knows of the boot

    def supervisor_stands_still(self) -> None:
        self.faults.signal_supervisor(self.start["nodes"][0], "STOP")
        time.sleep(SECONDS)
        self.faults.signal_supervisor(self.start["nodes"][0], "CONT")

    def controller(self) -> None:
        self.faults.lab.kill_controller()
        time.sleep(SECONDS)
        self.faults.lab.start_controller()

    def order(self) -> list[Callable[[], set[str] | None]]:
        found = [self.rank, self.rank, self.srun, self.supervisor, self.hang, self.requeue, self.power, self.power]
        found += [self.rank, self.supervisor_stands_still, self.controller]
        random.Random(SEED).shuffle(found)
        return found


@pytest.fixture(scope="module")
def faults(make_lab: Callable[..., Lab]) -> Iterator[Faults]:
    lab = make_lab(nodes=4, memory_mb=32000)
    found = Faults(lab, SiteClone(lab), RUNS)
    found.prepare("quiet")
    yield found
    matrix.write(PART, found.rows)


def test_a_storm(faults):
    process, storm = faults.start("storm"), Storm(faults)
    attempt, causes = 1, {}
    for fault in storm.order():
        # So many that a checkpoint is complete, wherever the attempt has begun: the storm doesn't stop the run.
        faults.wait_for_steps("storm", attempt, SAVE_INTERVAL + 2)
        storm.start = faults.clone.starts(NAME, "storm")[-1]
        attempt = storm.start["attempt"]
        if possible := fault():
            causes[attempt] = possible
            faults.wait_for_start("storm", attempt + 1)
            attempt += 1
    faults.finish("storm", process)
    ends = {end["attempt"]: end for end in faults.ends("storm")}
    assert all(ends[attempt]["cause"] in possible for attempt, possible in causes.items()), ends
    assert ends[max(ends)]["outcome"] == "completed"
    event = (
        f"{len(storm.order())} faults one after the other, in an order of chance: ranks, srun and supervisor killed, "
    )
    event += "a hang, a requeue, two power cuts, the supervisor stopped, slurmctld killed"
    faults.record(event, "resumes each time, in the same job")


def test_the_page_has_this_event(faults):
    matrix.check(PART, faults.rows)
