"""megaboa.workflow: what ends a call before anything is submitted, and what it says at its end."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from snakemake.resources import Resources

from megaboa.files import write_json
from megaboa.plan import places
from megaboa.run import bad_nodes
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.slurm import partitions
from megaboa.scheduler.slurm.partitions import Association, Partition
from megaboa.workflow import (
    conclude,
    concluding,
    given_values,
    profile_resources,
    reason,
    require_cluster,
    use_this_machine,
)


def test_what_a_profile_says_by_name():
    raw = SimpleNamespace(raw="lab")
    assert profile_resources({"slurm_account": raw, "runtime": 120}) == {"slurm_account": "lab", "runtime": "120"}
    assert profile_resources(None) == profile_resources({}) == {}


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """Of two partitions with GPUs and one without; the site's file is yet to be written."""
    found = (Partition("all", 2, ("4 a100",), "1:00"), Partition("h100", 1, ("8 h100",), "2:00"), Partition("cpu", 9))
    monkeypatch.setattr(partitions, "ask", lambda known_account: partitions.Cluster((Association("0123"),), found))
    monkeypatch.setattr(places, "PROFILES", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "slurm").mkdir()
    for name in (*partitions.ACCOUNT_VARIABLES, partitions.PARTITION_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "slurm" / "site.yaml"


def of_a_profile(**values):
    words = [f"{name}={value}" for name, value in values.items()]
    return Resources.parse(words, allow_expressions=True, defaults="full")


def in_a_rule(resources, name):
    arguments = {"wildcards": {}, "input": [], "attempt": 1, "threads": 1, "rulename": "train", "async_run": None}
    return resources[name].evaluate(**arguments).value


def test_a_workflow_around_this_one_has_its_own_site(cluster):
    cluster.write_text("slurm_account: clone\n")
    assert places.said() == {"slurm_account": "clone"}
    Path("profiles", "slurm").mkdir(parents=True)
    assert places.said() == {}
    Path("profiles", "slurm", "site.yaml").write_text("slurm_account: mine\n")
    assert places.said() == {"slurm_account": "mine"}


def test_what_the_profile_leaves_open_is_found_and_goes_to_all_rules(cluster, monkeypatch):
    """Words that Snakemake would take for Python's, or for numbers, stay names."""
    monkeypatch.setenv("SBATCH_PARTITION", "all")
    given = of_a_profile(
        slurm_account="auto", slurm_partition="auto", gpu_partition="auto", gpu_option="auto", runtime=120
    )
    found = {"slurm_account": "0123", "slurm_partition": "cpu", "gpu_partition": "all", "gpu_option": "gpus-per-node"}
    assert profile_resources(given).items() >= found.items()
    assert {name: in_a_rule(given, name) for name in found} == found
    in_a_job = Resources.parse(given.args, allow_expressions=True)
    assert {name: in_a_rule(in_a_job, name) for name in found} == found
    assert profile_resources(in_a_job).items() >= found.items()
    assert profile_resources(of_a_profile(slurm_account="mine"))["slurm_account"] == "mine", "what is said, is taken"


def test_a_choice_that_slurm_leaves_ends_the_call_with_the_lines_to_paste(cluster):
    with pytest.raises(SystemExit) as ended:
        profile_resources(of_a_profile(slurm_account="auto", gpu_partition="auto"))
    said = str(ended.value)
    assert "site.yaml" in said and "SBATCH_PARTITION" in said and "megaboa site" in said
    assert "slurm_account:" not in said
    first = said.splitlines()[1].strip()
    assert first == 'gpu_partition: "all"  # 2 nodes of 4 a100, at most 1:00'
    cluster.write_text(f"{first}\n")
    assert profile_resources(of_a_profile(slurm_account="auto", gpu_partition="auto"))["gpu_partition"] == "all"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gpu_partition: [", "can't be read"),
        ("- gpu_partition", "takes a line for each of slurm_account"),
        ("gpu: x", "takes a line for each of slurm_account"),
        ("gpu_partition: 0123", "gpu_partition: 83 is not a name: put it in quotes"),
        ("gpu_partition: [a, b]", "is not a name"),
    ],
)
def test_a_broken_file_of_the_site_is_named(cluster, text, why):
    cluster.write_text(text)
    with pytest.raises(SystemExit, match=rf"site\.yaml.*{why}"):
        profile_resources(of_a_profile(gpu_partition="auto"))


@pytest.mark.parametrize("text", ["", "# only words\n", "gpu_partition:\n", "gpu_partition: auto\n"])
def test_a_file_that_leaves_a_name_open_is_as_none(cluster, text):
    cluster.write_text(text)
    with pytest.raises(SystemExit, match="SLURM leaves you a choice"):
        profile_resources(of_a_profile(gpu_partition="auto"))


def test_where_slurm_cannot_be_asked_names_are_said_by_the_user(cluster, monkeypatch):
    def ask(known_account):
        raise UnreachableError("sinfo isn't there")

    monkeypatch.setattr(partitions, "ask", ask)
    with pytest.raises(SystemExit, match=r"gpu_partition can't be found.* \(sinfo isn't there"):
        profile_resources(of_a_profile(gpu_partition="auto"))
    cluster.write_text("{gpu_partition: mine}")
    found = profile_resources(of_a_profile(gpu_partition="auto", gpu_option="auto"))
    assert (found["gpu_partition"], found["gpu_option"]) == ("mine", "gpus-per-node")


def test_an_account_that_is_known_may_be_missing_from_the_accounting(cluster, monkeypatch):
    asked = []
    found = partitions.Cluster(None, (Partition("gpu", 1, ("8 h100",)),))
    monkeypatch.setattr(partitions, "ask", lambda known_account: asked.append(known_account) or found)
    profile_resources(of_a_profile(slurm_account="mine", gpu_partition="auto"))
    profile_resources(of_a_profile(gpu_partition="auto", slurm_account="auto"))
    monkeypatch.setenv("SLURM_ACCOUNT", "mine")
    profile_resources(of_a_profile(gpu_partition="auto", slurm_account="auto"))
    assert asked == [True, False, True]


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


def test_values_of_the_command_line_are_given_again():
    assert given_values({}) == []
    assert given_values({"experiment": "x", "training": {"train_iters": 5}}) == [
        *("--config", "experiment=x", 'training={"train_iters": 5}')
    ]


def test_while_snakemake_waits_for_its_jobs_it_looks_at_the_nodes_that_they_avoid(tmp_path, fake_command, monkeypatch):
    fake_command("squeue", "true")
    seen, enough = [], threading.Event()

    def revise(results):
        seen.append(results)
        if len(seen) > 2:
            monkeypatch.setattr(bad_nodes, "REVISE_SECONDS", 3600.0)
            enough.set()

    monkeypatch.setattr(bad_nodes, "REVISE_SECONDS", 0.01)
    monkeypatch.setattr(bad_nodes, "revise", revise)
    bad_nodes.revise_in_background(tmp_path / "results")
    assert enough.wait(60) and set(seen) == {tmp_path / "results"}


@pytest.mark.parametrize(
    ("cores", "jobs", "given", "expected"),
    [
        (None, None, {}, {"_cores": len(os.sched_getaffinity(0)), "gpu_machine": 1}),
        (2, None, {"_cores": 2}, {"_cores": 2, "gpu_machine": 1}),
        (None, None, {"gpu_machine": 4}, {"_cores": len(os.sched_getaffinity(0)), "gpu_machine": 4}),
        (None, 200, {"_cores": None}, {"_cores": None}),  # a cluster's
    ],
)
def test_a_call_without_cores_has_this_machine_and_runs_take_turns_on_its_gpus(cores, jobs, given, expected):
    settings, limits = SimpleNamespace(cores=cores, nodes=jobs), dict(given)
    use_this_machine(settings, limits)
    assert limits == expected and settings.cores == expected["_cores"]


NO_REASON = {
    **dict.fromkeys(("forced", "noio", "nooutput"), False),
    **{name: set() for name in ("missing_output", "incomplete_output", "updated_input", "updated_input_run")},
    "is_provenance_triggered": lambda: False,
}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"missing_output": {"x/train.json"}, "updated_input_run": {"x/data.json"}}, "not made yet"),
        ({"updated_input": {"x/run.json", "x/data.json"}, "updated_input_run": {"x/data.json"}}, "run.json changed"),
        ({"updated_input_run": {"x/data.json"}, "updated_input": {"x/data.json"}}, "after merge_corpus"),
        ({"is_provenance_triggered": lambda: True}, "its input files, parameters or command changed"),
        ({"forced": True, "missing_output": {"x"}}, "forced"),
        ({"noio": True}, "always runs"),
        ({"incomplete_output": {"x"}}, "was cut off"),
    ],
)
def test_why_a_job_runs_in_a_few_words(found, said):
    before = [SimpleNamespace(rule=SimpleNamespace(name=name)) for name in ("merge_corpus", "image")]
    dag = SimpleNamespace(
        reason=lambda job: SimpleNamespace(**{**NO_REASON, **found}),
        job_dependencies=lambda job: before,
        needrun=lambda job: job is before[0],
    )
    assert reason(dag, None) == said


def judged(results, *failed, state="PASS", **more):
    """What `megaboa report` has written."""
    counts = {"runs": {"PASS": 2}, "checks": {"PASS": 3, **({"FAIL": len(failed)} if failed else {})}}
    checks = {"state": "FAIL" if failed else state, "counts": counts, "failed": list(failed), **more}
    write_json(results / "report" / "checks.json", checks)


def fault(name, detail="too different"):
    return {"name": name, "detail": detail, "anchor": "x"}


def test_the_last_lines_are_the_verdict_and_where_the_report_is(tmp_path, capsys):
    judged(tmp_path)
    conclude(tmp_path)
    assert capsys.readouterr().err == f"PASS: all 3 checks; all 2 runs\nreport: {tmp_path}/report/index.html\n"


def test_a_failed_check_ends_the_call_and_is_its_last_word(tmp_path, capsys):
    judged(tmp_path, fault("b agrees with a"), fault("run c", ""))
    with pytest.raises(SystemExit) as ended:
        conclude(tmp_path)
    assert capsys.readouterr().err.startswith("FAIL: 2 FAIL, 3 PASS checks; all 2 runs\nreport: ")
    assert ended.value.code == "failed: b agrees with a (too different); run c"
    judged(tmp_path, *(fault(f"check {number}", "x" * 5000) for number in range(8)))
    with pytest.raises(SystemExit) as ended:
        conclude(tmp_path)
    assert ended.value.code.endswith("; and 3 more") and len(ended.value.code) < 1500


def test_runs_left_out_on_purpose_are_no_error(tmp_path):
    judged(tmp_path, state="INVALID")
    conclude(tmp_path)


def test_reports_made_before_end_calls_too(tmp_path):
    write_json(tmp_path / "report" / "checks.json", {"state": "FAIL", "counts": {}, "checks": []})
    with pytest.raises(SystemExit, match="failed: FAIL"):
        conclude(tmp_path)


@pytest.mark.parametrize(
    ("asked", "finished", "needed", "look", "ends"),
    [
        ("report", True, True, False, True),
        ("report", False, False, False, True),  # nothing is to be done
        ("report", False, True, False, False),  # left out by --until
        ("data", True, True, False, False),
        ("report", False, False, True, False),  # -n
    ],
)
def test_the_verdict_is_that_of_a_report_that_was_asked_for(tmp_path, asked, finished, needed, look, ends):
    judged(tmp_path, fault("b agrees with a"))
    tried, calls = [], []
    job = SimpleNamespace(rule=SimpleNamespace(name=asked), log_info=lambda: tried.append(asked))
    dag = SimpleNamespace(jobs=[job], finished=lambda job: finished, needrun=lambda job: needed)
    dag.needrun_jobs = lambda exclude_finished: [job, job]
    settings = SimpleNamespace(printshellcmds=False, verbose=False, debug_dag=False)
    workflow = SimpleNamespace(dryrun=look, touch=False, dag=dag, output_settings=settings)
    workflow.execute = lambda **options: calls.append(options)
    execute = concluding(workflow, tmp_path, "report")
    if ends:
        with pytest.raises(SystemExit):
            execute(executor_plugin=1)
    else:
        execute(executor_plugin=1)
    assert calls == [{"executor_plugin": 1}]
    assert tried == [asked] * look, "a dry run, quiet about jobs, tries one of each rule"


def test_a_modules_hooks_go_before_those_of_the_workflow_around_it(tmp_path):
    calls = []
    workflow = SimpleNamespace(dryrun=False, touch=False, dag=SimpleNamespace(jobs=[]))
    workflow.execute = lambda: workflow._onstart("the log")
    workflow._onstart = workflow._onerror = calls.append
    concluding(workflow, tmp_path, "report", lambda: calls.append("module"), lambda: calls.append("failed"))()
    assert calls == ["module", "the log"]
    workflow._onerror("an error's log")
    assert calls[2:] == ["failed", "an error's log"]


SIGTERM_WHILE_IT_SELECTS_JOBS = """
import faulthandler, os, signal, sys, threading, time
from snakemake.scheduling.job_scheduler import JobScheduler
from megaboa.workflow import in_a_thread
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
