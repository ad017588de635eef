"""megaboa.calls.beginning: what ends a call before anything is submitted, and SIGTERM."""

import contextlib
import os
import subprocess
import sys
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest

from megaboa.calls.beginning import (
    from_the_future,
    require_cluster,
    require_gpus,
    require_grants,
    require_rules_with_files,
)
from megaboa.config import load
from megaboa.plan import device
from megaboa.scheduler.answers import Excess


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


def test_a_call_ends_where_no_node_suffices_and_warns_where_somebody_may_lift_a_limit(capsys):
    nodes = Excess("resources.nodes", "4", "partition gpu has 3 nodes", "lower it")
    limit = Excess("resources.runtime", "60 minutes", "partition short allows 2 minutes", "shorten it", certain=False)
    require_grants(SimpleNamespace(excesses=lambda runs: {limit: runs}), ["a", "b"], keep_going=False)
    said = "resources.runtime is 60 minutes, and partition short allows 2 minutes: shorten it (runs a, b)"
    assert f"warning: {said}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^resources.nodes is 4, .* 3 nodes: lower it \(run a\); what comes before"):
        require_grants(SimpleNamespace(excesses=lambda runs: {limit: ["a"], nodes: ["a"]}), ["a"], keep_going=True)


def test_a_run_that_no_node_suffices_for_keeps_no_other_from_being_trained(capsys):
    nodes = Excess("resources.nodes", "4", "partition gpu has 3 nodes", "lower it")
    cores = Excess("resources.cpus_per_rank times gpus_per_node", "9", "no node has more than 8", "lower it")
    asked = SimpleNamespace(excesses=lambda runs: {nodes: ["a"], cores: ["b"]})
    require_grants(asked, ["a", "b", "c"], keep_going=True)
    said = capsys.readouterr().err
    assert "warning: resources.nodes is 4, and partition gpu has 3 nodes: lower it (run a)" in said
    assert said.endswith("or never starts them (`megaboa status` shows which wait); the other runs are trained\n")
    with pytest.raises(SystemExit, match=r"\(run b\); --keep-going trains the other runs; what comes before"):
        require_grants(asked, ["a", "b", "c"], keep_going=False)
    with pytest.raises(SystemExit, match=r"\(run b\); what comes before"):
        require_grants(asked, ["a", "b"], keep_going=True)


class Job:
    def __init__(self, *paths):
        self.input = list(map(str, paths))


@pytest.mark.parametrize(
    ("forced", "said"),
    [
        ({"forcerun": {"metrics"}}, "metrics is forced.* nothing would be made again: call with --forcerun summarize$"),
        ({"targets": {"metrics"}, "forcetargets": True}, "--forcerun summarize$"),
        ({"forcerun": {"all"}}, "--forceall"),
        ({"targets": {"metrics"}}, None),
        ({"forcerun": {"summarize", "results/tiny/plan.tsv"}, "targets": {"metrics"}}, None),
        ({"forcerun": {"deploy"}}, None),  # of a workflow around this one: it runs something
    ],
)
def test_a_stage_that_is_forced_names_the_rules_that_make_its_files(forced, said):
    """Snakemake makes nothing again then, and the call said PASS."""
    rules = [
        SimpleNamespace(name=name, output=output, norun=norun, snakefile=file)
        for name, output, norun, file in (
            ("all", [], True, "Snakefile"),
            ("metrics", [], True, "metrics.smk"),
            ("summarize", ["summary.json"], False, "metrics.smk"),
            ("deploy", [], False, "theirs.smk"),
        )
    ]
    settings = SimpleNamespace(**{"forcerun": set(), "targets": set(), "forcetargets": False, **forced})
    workflow = SimpleNamespace(dag_settings=settings, rules=rules)
    with pytest.raises(SystemExit, match=said) if said else contextlib.nullcontext():
        require_rules_with_files(workflow)


def test_files_of_the_future_are_named_before_snakemake_fails_what_is_made_from_them(tmp_path):
    """Only those that no job makes: the others are written again."""
    given, now, made, link, *many = (tmp_path / name for name in ("a b", "now", "made", "link", *"cdefgh"))
    for path in (given, now, made, *many):
        path.touch()
    for path in (given, made, *many):
        os.utime(path, (time.time() + 90_000,) * 2)
    link.symlink_to(given)
    job, before = Job(given, now, made, link, tmp_path / "missing"), Job(given)
    dag = SimpleNamespace(dependencies={job: {before: {str(made)}}, before: {}})
    (line,) = from_the_future(dag, [job, before])
    assert line.startswith(f"{given}: its time of modification, 2") and line.endswith(f": touch '{given}'")
    lines = from_the_future(SimpleNamespace(dependencies=defaultdict(dict)), [Job(*many)])
    assert len(lines) == 6 and lines[-1] == "and 1 more file"


SMALLEST = """models:
  dense: {config: {model_type: llama}, tokenizer: owner/name}
corpora:
  text: {source: python-stdlib}
training: {train_iters: 1000}
"""


@pytest.fixture
def no_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(device, "DRIVER", tmp_path / "no driver")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def test_ranks_for_gpus_do_not_start_on_a_machine_without_any(tmp_path, no_gpu):
    mine = tmp_path / "mine.yaml"
    mine.write_text(SMALLEST)  # the device is its default
    with pytest.raises(SystemExit) as ended:
        require_gpus(load([mine]), "local", starts_ranks=True)
    assert str(ended.value) == (
        f"{mine}: device: is cuda, and this machine has no GPU: set it to auto or cpu, or call "
        "`snakemake --profile slurm` on a cluster; `snakemake preflight` and "
        "`snakemake data` work here too"
    )
    mine.write_text(SMALLEST + "device: cuda\n")
    with pytest.raises(SystemExit, match=r"mine\.yaml:6: device: is cuda"):
        require_gpus(load([mine]), "local", starts_ranks=True)


def test_gpus_are_needed_where_ranks_start(tmp_path, no_gpu, monkeypatch):
    mine = tmp_path / "mine.yaml"
    mine.write_text(SMALLEST)
    require_gpus(load([mine], {"device": "cpu"}), "local", starts_ranks=True)
    require_gpus(load([mine]), "local", starts_ranks=False)
    require_gpus(load([mine]), "slurm", starts_ranks=True)
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # the job's nodes may have them
    require_gpus(load([mine]), "local", starts_ranks=True)


SIGTERM_WHILE_IT_SELECTS_JOBS = """
import _thread, faulthandler, os, signal, sys, threading, time
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
while _thread._count() > 1:  # faulthandler's is not counted
    time.sleep(0.01)
print(scheduler._user_kill)
"""


def test_sigterm_while_snakemake_selects_jobs_does_not_make_it_wait_for_itself():
    done = subprocess.run([sys.executable, "-c", SIGTERM_WHILE_IT_SELECTS_JOBS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "graceful\n"), done.stderr
    last = "running jobs continue until they end; `megaboa stop EXPERIMENT` lets its runs save and stop"
    assert done.stderr.splitlines()[-1] == last
