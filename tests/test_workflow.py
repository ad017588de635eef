"""megaboa.workflow: what ends a call before anything is submitted."""

import fcntl
import os
import threading
from types import SimpleNamespace

import pytest

from megaboa.run import exclusions
from megaboa.workflow import (
    PLACEHOLDER,
    claim_experiment,
    given_values,
    look_after_waiting_jobs,
    profile_resources,
    reason,
    release_experiment,
    require_cluster,
    use_this_machine,
)


def test_what_a_profile_says_by_name():
    raw = SimpleNamespace(raw="lab")
    assert profile_resources({"slurm_account": raw, "runtime": 120}) == {"slurm_account": "lab", "runtime": "120"}
    assert profile_resources(None) == profile_resources({}) == {}


def test_names_that_were_not_filled_in_end_the_call_with_a_remedy():
    given = {"slurm_account": PLACEHOLDER, "slurm_partition": "cpu", "gpu_partition": SimpleNamespace(raw=PLACEHOLDER)}
    with pytest.raises(SystemExit) as ended:
        profile_resources(given)
    said = str(ended.value)
    assert "slurm_account and gpu_partition say CHANGE_ME" in said and "sinfo" in said and "slurm_partition" not in said


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


def test_what_only_reads_lets_others_work(tmp_path):
    assert claim_experiment(tmp_path)
    release_experiment()
    with (tmp_path / ".lock").open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
            monkeypatch.setattr(exclusions, "REVISE_SECONDS", 3600.0)
            enough.set()

    monkeypatch.setattr(exclusions, "REVISE_SECONDS", 0.01)
    monkeypatch.setattr(exclusions, "revise", revise)
    look_after_waiting_jobs(tmp_path / "results" / "my")
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
