"""A real SLURM whose hosts have two real GPUs each (`make test-gpu`): a task per rank, or one per node that forks them.

One run of each, one after the other, as each is timed: its start, and what a rank's death costs. Then two of each that
nothing disturbs, in turn, whose steps are timed. `-s` prints that. Two GPUs are one host, four are two.
MEGABOA_REHEARSAL=1 does the same on processors, where the steps' times are printed only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
from faults import AT_ONCE, NAME, Faults
from gpu_count import gpus
from lab import Lab
from rehearsal import REHEARSAL, devices, usable
from site_clone import SiteClone

from megaboa.records import read_gpu_events
from megaboa.store_paths import AttemptFolder

PER_HOST = 2
HOSTS = usable(4) // PER_HOST
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HOSTS, reason=f"two GPUs are needed, and {gpus()} found")]

# A checkpoint of its own is behind the first attempt when it is hit.
STEPS, SAVE_INTERVAL = (40, 10) if REHEARSAL else (300, 100)
LAYOUT = f"resources.nodes: {HOSTS}, resources.gpus_per_node: {PER_HOST}, parallel.tp: {PER_HOST}, {AT_ONCE}"


def settings(tasks: str, steps: int) -> str:
    return f"{LAYOUT}, launch.tasks: {tasks}, training.train_iters: {steps}"


HIT = {tasks: settings(tasks, STEPS) for tasks in ("rank", "node")}
# Its last steps are timed: what stands by for the next attempt has imported Bridge by then.
UNDISTURBED_STEPS, TIMED = (60, 15) if REHEARSAL else (150, 50)
IN_TURN = ("rank-1", "node-1", "node-2", "rank-2")
UNDISTURBED = {run: settings(run.partition("-")[0], UNDISTURBED_STEPS) for run in IN_TURN}
SLOWER = 1.1  # than the faster way, at most: what a host's own speed varies by
BF16 = 5e-2  # largest difference of a step's loss: a mean of bf16's own order on other ranks


class OneAfterTheOther(Faults):
    """Each run loses its last rank when the one after it stands by, if it does."""

    def train(self, run: str) -> None:
        begun = time.time()
        print(f"launch.tasks: {run}", flush=True)
        process = self.start(run)
        if run == "node":
            hit = self.kill_parked_rank(self.park_until_others_stand_by(run))
        else:
            self.clone.wait_for_step(NAME, run, SAVE_INTERVAL + 2)
            host = self.clone.starts(NAME, run)[0]["nodes"][-1]
            hit = time.time()
            self.signal_rank(host, "KILL")
        self.finish(run, process)
        first, again = self.clone.starts(NAME, run)
        print(f"from the call to the first start: {first['time'] - begun:.1f} s")
        for start in (first, again):
            phases = self.clone.phases(NAME, run, start["attempt"])
            said = ", ".join(f"{name} {moment - start['time']:.1f}" for name, moment in phases)
            print(f"attempt {start['attempt']}, seconds from its start: {said}")
        self.tell_phases(run, hit)
        for start in (first, again):
            seconds = self.seconds(run, start["attempt"])[5:]
            print(f"attempt {start['attempt']}, median step: {1000 * statistics.median(seconds):.1f} ms")

    def seconds(self, run: str, attempt: int) -> list[float]:
        """Of each step."""
        return [step["seconds"] for step in self.clone.steps(NAME, run, attempt)]


@pytest.fixture(scope="module")
def faults(make_lab: Callable[..., Lab]) -> OneAfterTheOther:
    every = devices(HOSTS * PER_HOST)
    owned = [every[first : first + PER_HOST] for first in range(0, len(every), PER_HOST)]
    lab = make_lab(nodes=HOSTS, cpus=8, memory_mb=64000, accounting=False, real_gpus=owned)
    found = OneAfterTheOther(lab, SiteClone(lab), HIT | UNDISTURBED, hosts="", save_interval=SAVE_INTERVAL)
    if not REHEARSAL:
        found.use_gpus()
    found.clone.before_training(found.config)
    return found


@pytest.fixture(scope="module")
def hit(faults: OneAfterTheOther) -> OneAfterTheOther:
    for run in HIT:
        faults.train(run)
    return faults


@pytest.mark.parametrize("run", HIT)
def test_ranks_continue_after_one_is_killed_which_is_named(hit, run):
    end, last = hit.ends(run)
    assert end["cause"] == "killed" and end["action"] == "resume" and last["cause"] is None
    ranks = range((HOSTS - 1) * PER_HOST, HOSTS * PER_HOST)
    host = hit.lab.nodes[-1]
    assert any(f"rank {rank} on {host} was killed by SIGKILL" in end["detail"] for rank in ranks), end
    assert len({start["job"] for start in hit.clone.starts(NAME, run)}) == 1
    assert hit.was_started_by_what_stood_by(run) == (run == "node")
    assert hit.lost_steps(run) <= 2 * SAVE_INTERVAL  # the last save may have been in the background still


def test_both_ways_have_the_same_losses(hit):
    one, other = ([float.fromhex(loss) for _, loss, _ in hit.curve(run)] for run in HIT)
    assert len(one) == STEPS
    assert max(abs(left - right) for left, right in zip(one, other, strict=True)) <= BF16


@pytest.mark.skipif(REHEARSAL, reason="processors have no driver")
@pytest.mark.parametrize("run", HIT)
def test_every_host_samples_its_own_gpus(hit, run):
    sampled = [read_gpu_events(path) for path in AttemptFolder(hit.store(run) / "attempts" / "01").sampled]
    assert [len(found[0].gpus) for found in sampled] == [PER_HOST] * HOSTS
    assert len({gpu.uuid for found in sampled for gpu in found[0].gpus}) == HOSTS * PER_HOST


def test_forked_ranks_are_as_fast(faults):
    medians = {}
    for run in IN_TURN:
        faults.finish(run)
        seconds = faults.seconds(run, 1)
        assert len(seconds) == UNDISTURBED_STEPS
        medians[run] = statistics.median(seconds[-TIMED:])
        print(f"{run}, median of the last {TIMED} steps: {1000 * medians[run]:.1f} ms", flush=True)
    rank, node = (min(medians[run] for run in IN_TURN if run.startswith(tasks)) for tasks in HIT)
    print(f"node's step is {node / rank - 1:+.1%} of rank's, each the faster of two", flush=True)
    assert REHEARSAL or node <= SLOWER * rank
