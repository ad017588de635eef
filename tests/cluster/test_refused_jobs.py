"""Jobs that SLURM refuses, never starts, or ends early; job arrays; a controller that doesn't answer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from faults import NAME, WAIT, Faults
from lab import Lab
from site_clone import ENVIRONMENT, SiteClone

from megaboa.scheduler.slurm import queries

pytestmark = pytest.mark.slow
LONG = "training.train_iters: 2000"
RUNS = {
    "memory": LONG,
    "many": f"{LONG}, resources.nodes: 4",
    "cores": f"{LONG}, resources.cpus_per_rank: 9",
    "gigabytes": f"{LONG}, resources.mem_mb_per_rank: 50000",
    "partition": f"{LONG}, resources.partition: nope",
    "hour": f"{LONG}, resources.partition: short, resources.runtime: 1h",
    "feature": f"{LONG}, resources.constraint: nope",
    "words": f"""{LONG}, resources.slurm_extra: '--begin=now+1hour --network="$(touch shell); a|b" --nice=7'""",
    "second": LONG,
    "fine": LONG,
}
NEVER = ("many", "cores", "gigabytes")


@pytest.fixture(scope="module")
def faults(make_lab: Callable[..., Lab]) -> Iterator[Faults]:
    lab = make_lab(nodes=3, memory_mb=16000)
    found = Faults(lab, SiteClone(lab), RUNS, hosts="")
    found.clone.before_training(found.config)
    yield found
    found.end_call()


def target(run):
    return f"results/{NAME}/runs/{run}/train.json"


def test_the_plan_warns_of_what_the_cluster_grants_no_job(faults):
    shown = faults.clone.snakemake("-n", *map(target, RUNS), "--configfile", faults.config)
    warnings = [line for line in shown.splitlines() if line.startswith("warning: resources.")]
    assert warnings == [
        "warning: resources.nodes is 4, and partition gpu has 3 nodes: lower it, or take another partition "
        "(resources.partition) (run many)",
        "warning: resources.cpus_per_rank times gpus_per_node is 9, and no node of partition gpu has more than 4 "
        "processors: lower it, or take another partition (resources.partition) (run cores)",
        "warning: resources.mem_mb_per_rank times gpus_per_node is 50000, and no node of partition gpu has more than "
        "16000 MB: lower it, or take another partition (resources.partition) (run gigabytes)",
        "warning: resources.partition is nope, and SLURM has cpu, gpu, low, lowcancel, short: take one of these, or "
        "correct it in the profile (run partition)",
        "warning: resources.runtime is 1h, and partition short allows 2m, unless a QOS says otherwise: "
        "set it to 2m, as a run continues in further jobs, or take another partition (resources.partition) (run hour)",
    ]
    assert "jobs to do" in shown


@pytest.mark.parametrize("run", NEVER)
def test_a_call_submits_nothing_that_no_node_has(faults, run):
    said = faults.clone.snakemake(target(run), "--configfile", faults.config, code=1)
    assert f"(run {run}); what comes before training can be made already" in said and "submitted" not in said


def test_a_partition_that_is_not_there_is_left_to_slurm_as_a_plugin_may_replace_its_name(faults):
    said = faults.clone.snakemake(target("partition"), "--configfile", faults.config, code=1)
    assert "warning: resources.partition is nope" in said and "sbatch" in said


def test_a_run_that_is_too_large_keeps_no_other_from_being_trained(faults):
    call = faults.start("many", "fine")
    faults.wait_for_steps("fine", 1)
    assert "the other runs are trained" in faults.clone.output()
    shown = " ".join(faults.clone.megaboa("status", f"{NAME}/many").split())
    assert "lets a job have: lower resources.nodes, or take another partition; then scancel" in shown
    faults.lab.run(["scancel", *faults.lab.run(["squeue", "--noheader", "--format=%A"]).stdout.split()])
    faults.stop("fine", call)


def test_options_of_sbatch_arrive_whole_and_nothing_in_them_is_executed(faults):
    call = faults.start("words")
    waiting = ["squeue", "--noheader", "--states=PENDING", "--format=%A"]
    faults.lab.wait(lambda: faults.lab.run(waiting).stdout.split(), WAIT, "a job")
    (job,) = faults.lab.run(waiting).stdout.split()
    shown = faults.lab.run(["scontrol", "show", "job", job]).stdout
    assert "Network=$(touch shell); a|b\n" in shown and "Nice=7" in shown
    assert not (faults.clone.path / "shell").exists()
    faults.lab.run(["scancel", job])
    faults.snakemake_ends(call, code=1, timeout=300)


def test_job_arrays_of_jobs_that_start_ranks_are_refused(faults):
    for rules in ("train", "all"):
        words = [f"--slurm-array-jobs={rules}", target("memory"), target("second"), "--configfile", faults.config]
        said = faults.clone.snakemake(*words, code=1)
        assert f"slurm-array-jobs is '{rules}', and jobs of train start ranks" in said and "submitted" not in said
    assert not faults.lab.run(["squeue", "--noheader"]).stdout


def test_a_jobs_record_is_its_own_in_an_array_too(faults, monkeypatch):
    words = ["sbatch", "--parsable", "--array=1-3", "--ntasks=1", "--mem=100", "--wrap=sleep 300"]
    array = faults.lab.run(words).stdout.strip()
    listed = ["squeue", "--noheader", "--states=RUNNING", f"--jobs={array}", "--format=%A"]
    faults.lab.wait(lambda: len(faults.lab.run(listed).stdout.split()) == 3, 60, "three tasks")
    jobs = faults.lab.run(listed).stdout.split()
    shown = faults.lab.run(["scontrol", "-o", "show", "job", array]).stdout
    assert len(shown.strip().splitlines()) == 3 and array in jobs

    def on_the_lab(command, seconds=None):
        return faults.lab.run(command).stdout

    monkeypatch.setattr(queries, "query", on_the_lab)
    assert [queries.show_job(job).id for job in jobs] == jobs
    (one,) = faults.lab.run([*listed[:3], f"--jobs={array}_1", "--format=%A"]).stdout.split()
    faults.lab.run(["scancel", f"{array}_1"])
    ended = ["squeue", "--noheader", "--states=all", f"--jobs={array}", "--format=%A %T"]
    faults.lab.wait(lambda: f"{one} CANCELLED" in faults.lab.run(ended).stdout, 60, "the end of a task")
    assert {job: queries.is_alive(job) for job in jobs} == {job: job != one for job in jobs}
    faults.lab.run(["scancel", array])


def test_the_doctor_says_why_a_run_has_not_begun(faults):
    """One whose job is refused, and one whose job waits for ever; then nothing is left of it but Snakemake's words."""
    call = faults.start("feature", "hour")
    waiting = ["squeue", "--noheader", "--states=PENDING", "--format=%A %r"]
    faults.lab.wait(lambda: "PartitionTimeLimit" in faults.lab.run(waiting).stdout, WAIT, "a job that never starts")
    job = faults.lab.run(waiting).stdout.split()[0]
    doctor = faults.clone.megaboa("doctor", NAME)
    assert f"hour: has not begun: its SLURM job {job} waits (PartitionTimeLimit: a longer wall time than" in doctor
    refused = doctor.split("feature: ")[1]
    assert refused.startswith("has not begun: its job could not be submitted\n  | SLURM sbatch failed.")
    assert "Invalid feature specification" in refused and "  logs: .snakemake/log/" in refused
    assert "second: has not begun\n" in doctor
    shown = " ".join(faults.clone.megaboa("status", f"{NAME}/hour").split())
    assert "allows: lower resources.runtime, or take another partition; then scancel" in shown
    faults.lab.run(["scancel", job])
    faults.snakemake_ends(call, code=1, timeout=300)
    (line, said, *_) = faults.clone.megaboa("doctor", f"{NAME}/hour").splitlines()
    assert line == "hour: has not begun: its job ended before it started"
    assert said.startswith(f"  | SLURM-job '{job}' failed, SLURM status is: 'CANCELLED'")


def test_a_job_that_slurm_ends_for_its_memory_is_not_taken_for_cancelled(faults):
    call, start = faults.start_and_wait("memory", 2)
    faults.lab.out_of_memory(start["job"])
    end = faults.stop("memory", call)
    assert (end["cause"], end["outcome"], end["action"]) == ("out_of_memory", "failed", "stop"), end
    doctor = faults.clone.megaboa("doctor", f"{NAME}/memory")
    assert "host memory" in doctor and "try: raise resources.mem_mb_per_rank" in doctor and "somebody" not in doctor


def test_a_stopped_controller_is_asked_once_and_that_is_said_early(faults):
    """It doesn't refuse the connection, as it is not ended: its commands wait, each about 20 s."""
    controller = faults.lab._daemons["slurmctld"]
    os.kill(controller.pid, signal.SIGSTOP)
    try:
        for words in (["status", NAME], ["doctor", NAME]):
            begun = time.monotonic()
            done = faults.lab.run(faults.clone.command(*words), cwd=faults.clone.path, env=ENVIRONMENT, timeout=150)
            assert time.monotonic() - begun < 50, words
            assert done.stderr.count("SLURM has not answered for 3 s (squeue); waiting for it") == 1, done.stderr
        begun = time.monotonic()
        shown = faults.clone.snakemake("-n", target("second"), "--configfile", faults.config, timeout=300)
        assert time.monotonic() - begun < 80
        assert shown.count("SLURM has not answered for 3 s") <= 2 and "jobs to do" in shown
    finally:
        os.kill(controller.pid, signal.SIGCONT)
        faults.lab.wait(lambda: "gpu" in faults.lab.run(["sinfo"]).stdout, 60, "the controller")
