"""Fault after fault, each chosen by chance, while two runs train on a cluster of four hosts.

A short storm is a test that `.ci/run` never leaves out. `MEGABOA_STORM_MINUTES=20` makes a long one, with every kind of
fault, and `MEGABOA_STORM_SEED` another one; both are printed, with what happened when.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import matrix
import pytest
from faults import AT_ONCE, NAME, SAVE_INTERVAL, WAIT, Faults, fill
from lab import Lab
from site_clone import SiteClone

from megaboa.observe.fleet import REFUSED, UNRECORDED

pytestmark = pytest.mark.slow

PART = "Several faults"
MINUTES = float(os.environ.get("MEGABOA_STORM_MINUTES", "0"))
SEED = int(os.environ.get("MEGABOA_STORM_SEED", "19"))
SHORT = ("rank", "supervisor", "requeue", "snakemake")
ITERATIONS = round(90 * MINUTES) or 100  # a run has some left when the storm is over
STEPS = f"training.train_iters: {ITERATIONS}, {AT_ONCE}, checkpoint.keep_last: 2"
STEPS += ", recovery.budget: 200, recovery.no_progress_minutes: 1, recovery.exclude_hours: 0.01"  # all hosts are needed
WITH_SPARE = f"{STEPS}, resources.spare_nodes: 1, checkpoint.local.every: 4"
RUNS = {"quiet": STEPS, "first": WITH_SPARE, "second": f"{STEPS}, resources.partition: low"}
HIT = tuple(RUNS)[1:]
SOON = SAVE_INTERVAL + 2  # so many steps that a checkpoint is complete, wherever an attempt began
REACH = ("preempt", "power", "power_of_the_supervisors_host", "link", "disk_full")  # also the other run
PAUSE = 8  # seconds of a fault that passes
LOST = {"node_failure", "killed", "transient", "lost", "requeued", "hang"}  # as SLURM, srun or a rank is first to tell


class Storm:
    """What can happen. Each fault is done to a run, and returns what the end of its attempt may be called."""

    def __init__(self, faults: Faults, disk: Path):
        self.faults, self.lab, self.disk = faults, faults.lab, disk
        self.run, self.start = "", {}

    def aim(self, run: str) -> None:
        """The supervisor is on the job's first host, also where a spare has replaced that one."""
        self.run = self.faults.run = run
        self.start = self.faults.clone.starts(NAME, run)[-1]

    def rank(self) -> set[str]:
        """SIGKILL of a rank"""
        self.faults.signal_rank(self.start["nodes"][1], "KILL")
        return {"killed"}

    def srun(self) -> set[str]:
        """SIGKILL of srun"""
        self.faults.kill_srun(self.start["host"])
        return {"killed"}

    def supervisor(self) -> set[str]:
        """SIGKILL of the supervisor"""
        self.faults.signal_supervisor(self.start["host"], "KILL")
        return {"lost"}

    def hang(self) -> set[str]:
        """SIGSTOP of a rank"""
        self.faults.signal_rank(self.start["nodes"][1], "STOP")
        return {"hang"}

    def requeue(self) -> set[str]:
        """scontrol requeue"""
        self.faults.admin("requeue", self.start["job"])
        return {"requeued"}

    def hold(self) -> set[str]:
        """scontrol requeuehold, and a release later"""
        self.faults.admin("requeuehold", self.start["job"])
        time.sleep(PAUSE)
        self.faults.admin("release", self.start["job"])
        return {"requeued"}

    def preempt(self) -> set[str]:
        """a job with a higher priority, if the run may be preempted"""
        words = ["sbatch", "--partition=gpu", "--nodes=2", "--exclusive", "--account=lab", "--output=/dev/null"]
        self.lab.run([*words, "--wrap=sleep 5"])
        return {"requeued", "preempted"}

    def power(self) -> set[str]:
        """a power cut of a host"""
        return self._power_cut(self.start["nodes"][1])

    def power_of_the_supervisors_host(self) -> set[str]:
        """a power cut of the supervisor's host"""
        return self._power_cut(self.start["host"])

    def _power_cut(self, host: str) -> set[str]:
        """Now and then it is back before SLURM has noticed."""
        self.lab.crash(host)
        time.sleep(random.choice((0, PAUSE)))
        self.lab.boot(host)
        return LOST

    def link(self) -> set[str]:
        """a link that is down"""
        host = self.start["nodes"][1]
        self.lab.isolate(host)
        time.sleep(PAUSE)
        self.lab.reconnect(host)
        return LOST

    def drain(self) -> set[str]:
        """scontrol drain of a host, and a resume later"""
        host = self.start["nodes"][1]
        self.faults.admin("update", f"nodename={host}", "state=drain", "reason=storm")
        time.sleep(PAUSE)
        self.faults.return_to_service()
        return set()

    def disk_full(self) -> set[str]:
        """a full disk, if the run's store is there"""
        ballast = fill(self.disk)
        time.sleep(PAUSE)
        ballast.unlink()
        return {"disk_full"}

    def supervisor_stands_still(self) -> set[str]:
        """SIGSTOP of the supervisor, and SIGCONT"""
        host = self.start["host"]
        self.faults.signal_supervisor(host, "STOP")
        time.sleep(PAUSE)
        self.faults.signal_supervisor(host, "CONT")
        return set()

    def controller(self) -> set[str]:
        """SIGKILL of slurmctld, which is started again"""
        self.lab.kill_controller()
        time.sleep(PAUSE)
        self.lab.start_controller()
        return set()

    def snakemake(self) -> set[str]:
        """SIGKILL of Snakemake, and another call"""
        self.faults.start(*HIT)
        return set()


def kinds() -> list[str]:
    return [name for name in vars(Storm) if not name.startswith("_") and name != "aim"]


def order() -> Iterator[str]:
    """For a short storm each kind once; a long one has all kinds, in turns of their own order."""
    names = kinds() if MINUTES else SHORT
    yield from random.sample(names, len(names))
    while MINUTES:
        yield from random.sample(names, len(names))


@pytest.fixture(scope="module")
def faults(make_lab: Callable[..., Lab], small_disk: Path) -> Iterator[Faults]:
    lab = make_lab(nodes=4, memory_mb=32000, shared=[small_disk])
    found = Faults(lab, SiteClone(lab), RUNS)
    found.prepare("quiet")
    yield found
    matrix.write(PART, found.rows)


class User:
    """What somebody does who looks at the queue: SLURM holds a job whose first host was lost five times, one that a
    host refused to start, and one that was released while its processes still ended.
    """

    def __init__(self, faults: Faults):
        self.faults, self.looked = faults, 0.0
        self.cancelled: dict[str, list[str]] = {run: [] for run in HIT}

    def look(self) -> None:
        if time.monotonic() < self.looked + PAUSE:
            return
        self.looked = time.monotonic()
        for run in HIT:
            if self.faults.clone.starts(NAME, run) and not is_trained(self.faults, run):
                job = self.faults.job(run)
                state, reason = self.faults.queue(job)
                if state == "REQUEUE_HOLD" and job not in self.cancelled[run]:
                    self._say(run, f"SLURM holds {job}: scancel, and another call")
                    self.faults.lab.run(["scancel", job])
                    self.cancelled[run].append(job)
                    self.faults.start(*HIT)
                elif reason in ("launch failed requeued held", "job requeued in held state"):
                    self._say(run, f"SLURM holds {job}: scontrol release")
                    self.faults.lab.run(["scontrol", "release", job])

    def _say(self, run: str, what: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {run}: {what}", flush=True)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        self.faults.clone.wait(lambda: self.look() or condition(), WAIT, what)


def is_trained(faults: Faults, run: str) -> bool:
    return faults.clone.results(NAME, "runs", run, "train.json").exists()


def is_ready(faults: Faults, run: str, after: tuple[int, int]) -> bool:
    """It trains, will do so for a while, and has made steps since the last fault, at `after`: its attempt and steps."""
    starts = faults.clone.starts(NAME, run)
    if not starts or len(faults.ends(run)) == len(starts) or faults.clone.last_step(NAME, run) > ITERATIONS - SOON:
        return False
    attempt = starts[-1]["attempt"]
    made = len(faults.clone.steps(NAME, run, attempt))
    return made >= SOON + (after[1] if attempt == after[0] else 0)


def is_clear(faults: Faults, after: dict[str, tuple[int, int]]) -> bool:
    """The next fault can be done, or there is no run left."""
    over = all(faults.clone.last_step(NAME, run) > ITERATIONS - SOON for run in HIT)
    return over or any(is_ready(faults, run, after[run]) for run in HIT)


def newest(faults: Faults, run: str) -> int:
    return faults.clone.starts(NAME, run)[-1]["attempt"]


def let_loose(faults: Faults, storm: Storm, user: User) -> tuple[list[str], dict[str, dict[int, set[str]]]]:
    """What happened, and by run and attempt the causes that its end may have."""
    happened: list[str] = []
    possible: dict[str, dict[int, set[str]]] = {run: defaultdict(set) for run in HIT}
    after = dict.fromkeys(HIT, (0, 0))
    deadline = time.monotonic() + 60 * MINUTES
    for kind in order():
        clear = functools.partial(is_clear, faults, after)
        user.wait(clear, f"a run that makes steps, after {happened[-1:]}")
        ready = [run for run in HIT if is_ready(faults, run, after[run])]
        if not ready or (MINUTES and time.monotonic() > deadline):
            break
        faults.return_to_service()
        run = random.choice(ready)
        storm.aim(run)
        attempt, hosts = storm.start["attempt"], storm.start["nodes"]
        print(f"{time.strftime('%H:%M:%S')} {run} attempt {attempt} on {', '.join(hosts)}: {kind}", flush=True)
        before = {one: newest(faults, one) for one in HIT}
        causes = getattr(storm, kind)()
        happened.append(kind)
        after[run] = (attempt, len(faults.clone.steps(NAME, run, attempt)))
        for one in HIT:  # what is done to a host or to the cluster may reach the other run, and its next attempt
            if one == run or kind in REACH:
                for number in range(before[one], newest(faults, one) + 1):
                    possible[one][number] |= causes
    return happened, possible


def test_a_storm(faults, small_disk):
    random.seed(SEED)
    print(f"\nMEGABOA_STORM_SEED={SEED} MEGABOA_STORM_MINUTES={MINUTES:g}")
    faults.keep_on(small_disk, "first")
    faults.start(*HIT)
    began = time.monotonic()
    user = User(faults)
    happened, possible = let_loose(faults, Storm(faults, small_disk), user)
    faults.return_to_service()
    lasted = (time.monotonic() - began) / 60
    user.wait(lambda: all(is_trained(faults, run) for run in HIT), "the end of both runs")
    for run in HIT:
        faults.job_ends(run)
    os.killpg(faults.process.pid, signal.SIGKILL)
    faults.process.wait()
    for run in HIT:
        honest(faults, run, possible[run], 1 + len(user.cancelled[run]))
    counted(faults)
    assert set(SHORT) <= set(happened) or MINUTES
    names = [str(getattr(Storm, kind).__doc__) for kind in dict.fromkeys(sorted(happened))]
    how_long = f"{lasted:.0f} minutes, {len(happened)} faults" if MINUTES else f"{len(happened)} faults"
    faults.run, jobs = HIT[1], len({start["job"] for start in faults.clone.starts(NAME, HIT[1])})
    faults.record(
        f"a storm over two runs, {how_long} in an order of chance: {', '.join(names)}", "resumes each time", jobs
    )


def honest(faults: Faults, run: str, possible: dict[int, set[str]], jobs: int) -> None:
    """The curve is that of a run that nothing disturbed; every attempt that started ranks has one start and one end,
    with a cause that it can have had; no two attempts trained at a time.
    """
    starts, ends = faults.clone.starts(NAME, run), faults.ends(run)
    told = faults.clone.results(NAME, "runs", run, "attempts.jsonl").read_text()
    numbers = [entry["attempt"] for entry in starts]
    assert numbers == sorted(set(numbers)) == [entry["attempt"] for entry in ends], told
    for number in {*range(1, numbers[-1])} - {*numbers}:  # its supervisor was killed before it could start ranks
        assert not (faults.store(run) / "attempts" / f"{number:02d}" / "srun.log").exists(), told
    assert [entry["outcome"] == "completed" for entry in ends] == [False] * (len(ends) - 1) + [True]
    causes = {end["attempt"]: end["cause"] for end in ends[:-1]}
    print(f"{run}: {causes}")
    unexplained = [end for end in ends[:-1] if end["cause"] not in possible[end["attempt"]]]
    assert not unexplained, (unexplained, possible)
    times = [[step["time"] for step in faults.clone.steps(NAME, run, start["attempt"])] for start in starts]
    made = [(min(one), max(one)) for one in times if one]
    assert all(last <= first for (_, last), (first, _) in itertools.pairwise(made)), "two trained at a time"
    assert faults.difference(run, "quiet") == 0
    assert faults.lost_steps(run) <= SAVE_INTERVAL * (len(ends) - 1)
    assert len({start["job"] for start in starts}) <= jobs, "a job more than needed has trained"


def counted(faults: Faults) -> None:
    """The view of all runs in the store adds up what the ledgers say, and no token twice."""
    fleet = json.loads(faults.clone.megaboa("fleet", "--json"))
    runs = {one["run"]: one for one in fleet["runs"]}
    assert not fleet["broken"] and set(runs) == set(RUNS)
    assert {one["state"] for one in runs.values()} == {"done"}
    assert {one["tokens"] for one in runs.values()} == {runs["quiet"]["tokens"]}
    for run in HIT:
        ends = [end for end in faults.ends(run) if end["cause"]]
        assert runs[run]["attempts"] == len(faults.clone.starts(NAME, run))
        assert runs[run]["ends"] == dict(Counter(end["cause"] for end in ends))
        assert set(runs[run]["lost"]) <= {*runs[run]["ends"], *REFUSED.values(), UNRECORDED}, runs[run]
        assert 0 < runs[run]["effective"] < 1
    assert fleet["held_seconds"] == pytest.approx(sum(one["held_seconds"] for one in runs.values()))
    assert fleet["held_seconds"] == pytest.approx(sum(node["held_seconds"] for node in fleet["nodes"].values()))


def test_the_page_has_this_event(faults):
    if not MINUTES:
        matrix.check(PART, faults.rows)
