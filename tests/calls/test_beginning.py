"""megaboa.calls.beginning: what ends a call before anything is submitted, and SIGTERM."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from megaboa.calls.beginning import require_cluster


def plan(**nodes):
    runs = [
        SimpleNamespace(name=name, config=SimpleNamespace(resources=SimpleNamespace(nodes=count)))
        for name, count in nodes.items()
    ]
    return SimpleNamespace(runs=runs)


def test_several_nodes_are_had_from_slurm_only():
    require_cluster(plan(one=1, two=2), "slurm", {"one", "two"})
    require_cluster(plan(one=1), "local", {"one"})
    with pytest.raises(SystemExit, match=r"run two: resources\.nodes is 2.*--profile slurm"):
        require_cluster(plan(one=1, two=2), "local", {"one", "two"})


def test_what_starts_no_ranks_needs_no_nodes():
    require_cluster(plan(one=1, two=2), "local", set())
    require_cluster(plan(one=1, two=2), "local", {"one"})


SIGTERM_WHILE_IT_SELECTS_JOBS = """
import faulthandler, os, signal, sys, threading, time
from snakemake.scheduling.job_scheduler import JobScheduler
from megaboa.calls.beginning import in_a_thread
faulthandler.dump_traceback_later(300, exit=True)
JobScheduler.exit_gracefully = in_a_thread(JobScheduler.exit_gracefully)
scheduler = JobScheduler.__new__(JobScheduler)
scheduler._lock, scheduler._open_jobs, scheduler._user_kill = threading.Lock(), threading.Semaphore(0), None
signal.signal(signal.SIGTERM, scheduler.exit_gracefully)
with scheduler._lock:  # as in schedule(), in _proceed() and in job_selector()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0)
scheduler._open_jobs.acquire()
print(scheduler._user_kill)
"""


def test_sigterm_while_snakemake_selects_jobs_does_not_make_it_wait_for_itself():
    done = subprocess.run([sys.executable, "-c", SIGTERM_WHILE_IT_SELECTS_JOBS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "graceful\n"), done.stderr
