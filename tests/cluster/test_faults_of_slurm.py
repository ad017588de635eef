"""What can happen to hosts and jobs, and to SLURM itself: each for real, on a real cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import matrix
import pytest
from faults import AT_ONCE, NAME, SAVE_INTERVAL, STEPS, WAIT, Faults
from lab import Lab
from site_clone import SiteClone

from megaboa.store_paths import RunStore

pytestmark = pytest.mark.slow

PART = "Hosts, jobs, SLURM"
COPIED_EVERY = 4
SPARE = "node failure: its ranks start on the spare, in the same job, from the copies of the host that is left"
RUNS = {
    "quiet": STEPS,
    **dict.fromkeys(("power-off", "power-cycle", "scancel", "requeue", "controller", "status", "accounting"), STEPS),
    "time-limit": f"{STEPS}, resources.runtime: 2m",
    "spare": f"{STEPS}, resources.spare_nodes: 1, checkpoint.local.every: {COPIED_EVERY}",
    "spare-supervisor": f"{STEPS}, resources.spare_nodes: 1",
    "prescreened": f"{STEPS}, resources.spare_nodes: 1, launch.health_check: true",
    "slow": f"{STEPS}, resources.spare_nodes: 1, checkpoint.save_interval: 2, recovery.stragglers.replace: true",
    "preempt-requeue": f"{STEPS}, resources.partition: low",
    "preempt-cancel": f"{STEPS}, resources.partition: lowcancel",
}


@pytest.fixture(scope="module")
def faults(make_lab: Callable[..., Lab]) -> Iterator[Faults]:
    lab = make_lab(memory_mb=32000)
    found = Faults(lab, SiteClone(lab), {run: f"{values}, {AT_ONCE}" for run, values in RUNS.items()})
    found.prepare("quiet")
    yield found
    matrix.write(PART, found.rows)


def test_a_host_loses_its_power(faults):
    process, start = faults.start_and_wait("power-off")
    lost = start["nodes"][1]
    hit = time.time()
    faults.lab.crash(lost)
    try:
        noticed = faults.given_up(lost)
        faults.finish("power-off", process)
        end, last = faults.ends("power-off")[0], faults.clone.starts(NAME, "power-off")[-1]
        assert end["cause"] == "node_failure" and end["bad_nodes"] == [lost] and end["action"] == "requeue"
        assert lost not in last["nodes"] and start["nodes"][0] in last["nodes"], "only the failed host is avoided"
    finally:
        faults.lab.boot(lost)
        faults.lab.wait_idle()
    faults.tell_phases("power-off", hit, noticed)
    faults.record("a host loses its power", "node failure: same job on other hosts, the lost one avoided", since=hit)


def test_a_host_loses_its_power_and_returns(faults):
    """The supervisor's own host: nobody is left to write the end of the attempt, and the host looks well again."""
    process, start = faults.start_and_wait("power-cycle")
    lost = start["nodes"][0]
    hit = time.time()
    faults.lab.crash(lost)
    time.sleep(2)
    faults.lab.boot(lost)
    faults.finish("power-cycle", process)
    faults.lab.wait_idle()
    end, last = faults.ends("power-cycle")[0], faults.clone.starts(NAME, "power-cycle")[-1]
    assert end["cause"] == "node_failure" and end["bad_nodes"] == [lost] and "started again" in end["detail"]
    assert lost not in last["nodes"]
    outcome = "node failure: same job on other hosts, the restarted one avoided"
    faults.record("the supervisor's host loses its power and returns", outcome, since=hit)


def test_a_spare_takes_the_place_of_a_host_that_loses_its_power(faults):
    """In the same job, without a queue; SLURM tells when it has given the host up. Its partner has its copies."""
    process, start = faults.start_and_wait("spare")
    lost, (spare,) = start["nodes"][1], start["spares"]
    hit = time.time()
    faults.lab.crash(lost)
    try:
        noticed = faults.given_up(lost)
        faults.finish("spare", process)
    finally:
        faults.lab.boot(lost)
        faults.lab.wait_idle()
    end, last = faults.ends("spare")[0], faults.clone.starts(NAME, "spare")[-1]
    assert end["cause"] == "node_failure" and end["bad_nodes"] == [lost] and end["action"] == "resume"
    assert (last["job"], last["restarts"], last.get("spares", [])) == (start["job"], 0, [])
    assert set(last["nodes"]) == {start["nodes"][0], spare}
    done = faults.ends("spare")[1]
    assert last["resumed_from"] == SAVE_INTERVAL < done["local"], "newer than the checkpoint"
    assert end["last_step"] - done["local"] <= COPIED_EVERY  # which may be hit before a copy is made
    faults.tell_phases("spare", hit, noticed)
    event = f"a host loses its power, resources.spare_nodes being 1 and checkpoint.local.every {COPIED_EVERY}"
    faults.record(event, SPARE, since=hit)


def test_a_spare_takes_the_place_of_a_host_that_is_slow(faults):
    process, start = faults.start_and_wait("slow", 3)
    slow, (spare,) = start["nodes"][1], start["spares"]
    faults.slow_down(slow)
    hit = time.time()
    faults.finish("slow", process)
    # The first two: on a busy machine other ranks are slow as well, later.
    starts = faults.clone.starts(NAME, "slow")
    assert len(starts) > 1, RunStore(faults.store("slow")).attempt(1).paces.read_text()
    end, last = faults.ends("slow")[0], starts[1]
    assert end["cause"] == "slow" and end["bad_nodes"] == [slow] and end["rank"] == 1 and end["action"] == "resume"
    assert f"rank 1 on {slow} calculates" in end["detail"] and end["last_step"] - last["resumed_from"] < SAVE_INTERVAL
    assert (last["job"], set(last["nodes"])) == (start["job"], {start["nodes"][0], spare})
    outcome = "slow: from the last save on, its rank runs on the spare, in the same job"
    event = "a rank stands still for five sixths of the time; a spare is there, and every 2 steps are saved"
    faults.record(event, outcome, since=hit)


def test_a_spare_takes_the_place_of_a_host_that_the_health_check_refuses(faults):
    """Before the first step: what tests one of its processors or GPUs dies of that."""
    process, hit = faults.start("prescreened"), time.time()
    broken = faults.lab.nodes[1]
    faults.clone.wait(lambda: faults.kill_health_rank(broken), WAIT, f"the health check of {broken}")
    faults.finish("prescreened", process)
    (refused,) = (entry for entry in faults.clone.ledger(NAME, "prescreened") if entry["event"] == "unhealthy")
    assert refused["bad_nodes"] == [broken] and "processors: no result" in refused["detail"]
    (start,) = faults.clone.starts(NAME, "prescreened")
    assert (start["nodes"], start["restarts"]) == ([faults.lab.nodes[0], faults.lab.nodes[2]], 0)
    troubles = {one.node: one.troubles[-1] for one in faults.remembered("prescreened")}
    assert troubles[broken].what == "unhealthy" and troubles[broken].run == f"{NAME}/prescreened"
    outcome = "unhealthy: the spare takes its place before the first step, and the store's runs remember it"
    faults.record("a host fails the check before the first start; a spare is there", outcome, since=hit)


def test_the_supervisors_host_loses_its_power_though_the_job_has_a_spare(faults):
    """SLURM would leave the job without its script: another of its hosts puts it back. It waits for a third host."""
    process, start = faults.start_and_wait("spare-supervisor")
    lost, hit = start["host"], time.time()
    faults.lab.crash(lost)
    try:
        faults.clone.wait(lambda: faults.queue(start["job"])[0] == "PENDING", WAIT, "the job to be put back")
    finally:
        faults.lab.boot(lost)
    faults.finish("spare-supervisor", process)
    faults.lab.wait_idle()
    end, last = faults.ends("spare-supervisor")[0], faults.clone.starts(NAME, "spare-supervisor")[-1]
    assert end["cause"] == "node_failure" and end["bad_nodes"] == [lost] and last["restarts"] == 1
    assert lost not in last["nodes"] and last["spares"] == [lost], "what failed waits"
    outcome = "node failure: put back by another host of the job, same job goes on"
    faults.record("the supervisor's host loses its power, resources.spare_nodes being 1", outcome, since=hit)


def test_the_wall_time_ends(faults):
    """Once: the run stands still until then, as a fast machine would be done before.

    Then the administrator gives more time, as a slow machine would need life after life.
    """
    process = faults.start("time-limit")
    faults.park("time-limit")
    faults.wait_for_the_word_to_stop("time-limit")
    faults.unpark("time-limit")
    faults.wait_for_end("time-limit", 1)
    faults.admin("update", f"jobid={faults.job('time-limit')}", "TimeLimit=60")
    faults.finish("time-limit", process)
    ends = faults.ends("time-limit")
    assert len(ends) > 1 and {end["cause"] for end in ends[:-1]} == {"time_limit"}
    assert all(end["iteration"] == end["last_step"] for end in ends), "saved before the end: nothing is done twice"
    assert faults.lost_steps("time-limit") == 0
    since = ends[0]["time"]
    faults.record("the wall time ends", "time limit: saves, same job goes on in the queue", since=since)


@pytest.mark.parametrize(("run", "mode"), [("preempt-requeue", "REQUEUE"), ("preempt-cancel", "CANCEL with a grace")])
def test_a_job_with_a_higher_priority_comes(faults, run, mode):
    process, _ = faults.start_and_wait(run)
    hit = time.time()
    wrap = [
        "sbatch",
        "--partition=gpu",
        "--nodes=3",
        "--exclusive",
        "--account=lab",
        "--output=/dev/null",
        "--wrap=sleep 5",
    ]
    faults.lab.run(wrap)
    faults.finish(run, process)
    end = faults.ends(run)[0]
    assert end["cause"] == ("preempted" if run == "preempt-cancel" else "requeued") and end["action"] == "requeue"
    assert end["outcome"] == "interrupted"
    faults.record(f"preemption (PreemptMode {mode})", f"{end['cause']}: saves, same job waits its turn", since=hit)


def test_scancel_stops_the_run_and_the_next_call_resumes(faults):
    process, _ = faults.start_and_wait("scancel")
    faults.lab.run(["scancel", faults.job("scancel")])
    faults.snakemake_ends(process, code=1)
    end = faults.ends("scancel")[0]
    assert end["cause"] == "cancelled" and end["action"] == "stop"
    again = time.time()
    faults.finish("scancel")
    faults.record("scancel", "cancelled: saves and stops; the next call resumes", jobs=2, since=again)


def test_the_administrator_requeues(faults):
    process, _ = faults.start_and_wait("requeue")
    hit = time.time()
    faults.lab.run(["scontrol", "requeue", faults.job("requeue")], user="root")
    faults.finish("requeue", process)
    end = faults.ends("requeue")[0]
    assert end["cause"] == "requeued"
    faults.record("scontrol requeue by the administrator", "requeued: saves, same job goes on", since=hit)


def test_slurmctld_is_restarted(faults):
    process, _ = faults.start_and_wait("controller", 5)
    faults.lab.restart_controller()
    faults.snakemake_ends(process)
    assert [end["outcome"] for end in faults.ends("controller")] == ["completed"]
    faults.record("slurmctld is restarted", "nothing: the ranks go on")


def test_status_commands_fail_for_a_minute(faults):
    process, _ = faults.start_and_wait("status", 5)
    faults.lab.break_commands()
    time.sleep(60)
    assert process.poll() is None
    faults.lab.mend_commands()
    faults.snakemake_ends(process)
    assert [end["outcome"] for end in faults.ends("status")] == ["completed"]
    faults.record("squeue, sacct and scontrol fail for 60 s", "nothing: Snakemake asks again")


def test_slurmdbd_is_away(faults):
    process, _ = faults.start_and_wait("accounting", 5)
    faults.lab.stop_accounting()
    try:
        faults.finish("accounting", process)
    finally:
        faults.lab.start_accounting()
    assert [end["outcome"] for end in faults.ends("accounting")] == ["completed"]
    faults.record("slurmdbd is away", "nothing: it isn't asked")


def test_the_page_has_these_events(faults):
    matrix.check(PART, faults.rows)
