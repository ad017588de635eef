"""Why a run has not begun, from the queue and from the logs of Snakemake's calls, in its own words."""

from pathlib import Path

import pytest
from fake_runs import FakeExperiment

from megaboa.doctor import examine, unstarted
from megaboa.files import write_text
from megaboa.paths import RunFolder
from megaboa.scheduler.answers import QueuedJob

RULE = """\
[Mon Nov 30 06:15:21 2026]
rule train:
    input: results/tiny/preflight.json, results/tiny/runs/{run}/run.json
    output: results/tiny/runs/{run}/train.json
    log: results/tiny/logs/runs/{run}.log
"""
ERROR = """\
[Mon Nov 30 06:16:24 2026]
Error in rule train:
    message: {message}For further error details see the cluster/cloud log and the log files of the involved rule(s).
    jobid: 7
    input: results/tiny/preflight.json, results/tiny/runs/{run}/run.json
    output: results/tiny/runs/{run}/train.json
    log: results/tiny/logs/runs/{run}.log{own} (check log file(s) for error details)
    shell:
        python workflow/scripts/megaboa pretrain results/tiny/runs/{run}/run.json
        (command exited with non-zero exit code)
"""
REFUSED = """\
SLURM sbatch failed. The error message was 'sbatch: error: invalid partition specified: nope
sbatch: error: Batch job submission failed: Invalid partition name specified'.
    sbatch call:
        sbatch --parsable --job-name 1 --wrap="python -m snakemake"
"""
ACCOUNT = "Job submission failed with exception: The given account nope appears to be invalid. Available accounts:\nlab"
FAILED = "SLURM-job '65' failed, SLURM status is: 'FAILED'. Detailed failure reason unavailable."
KILLED = """\
    wildcards: run=small
slurmstepd-n1: error: StepId=65.batch exceeded memory limit (399241216 > 314572800), being killed
slurmstepd-n1: error: *** JOB 65 ON n1 CANCELLED AT 2026-11-30T06:43:51 ***
"""


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment = FakeExperiment(tmp_path)
    for run in ("small", "other"):
        experiment.plan_run(run)
    return experiment


def call(time, *texts):
    write_text(unstarted.CALLS / f"2026-11-30T{time}.1.snakemake.log", "".join(texts))


def of(experiment, run, *jobs):
    return examine.run(RunFolder(experiment.results / "runs" / run), None, jobs)


@pytest.mark.parametrize("message", [REFUSED, ACCOUNT], ids=["sbatch", "account"])
def test_a_job_that_was_refused(experiment, message):
    call(
        "061521", RULE.format(run="small"), ERROR.format(run="small", message=message, own=""), RULE.format(run="other")
    )
    assert of(experiment, "small") == [
        "small: has not begun: its job could not be submitted",
        *(f"  | {line}" for line in message.splitlines()[:2]),
        "  logs: .snakemake/log/2026-11-30T061521.1.snakemake.log",
    ]
    assert of(experiment, "other") == ["other: has not begun"], "the error is another run's"


def test_a_job_that_was_killed_before_its_run_began(experiment):
    own = experiment.root / "logs/slurm/rule_train/small/65.log"
    write_text(own, KILLED)
    call("061521", RULE.format(run="small"), ERROR.format(run="small", message=FAILED, own=f", {own}"))
    lines = of(experiment, "small")
    assert lines[:2] == ["small: has not begun: its job ended before the run could begin: host memory", f"  | {FAILED}"]
    assert "exceeded memory limit (399241216 > 314572800)" in lines[2]
    assert lines[3] == "  logs: logs/slurm/rule_train/small/65.log"
    assert lines[4].startswith("  try: raise resources.mem_mb_per_rank")
    own.write_text("nothing that is known\n")
    assert of(experiment, "small")[0] == "small: has not begun: its job ended before the run could begin"
    own.unlink()
    assert of(experiment, "small")[0] == "small: has not begun: its job ended before it started"


def test_the_last_call_for_the_run_counts(experiment):
    call("061521", RULE.format(run="small"), ERROR.format(run="small", message=REFUSED, own=""))
    call("071521", RULE.format(run="other"))
    assert len(of(experiment, "small")) == 4, "a later call for something else changes nothing"
    call("081521", RULE.format(run="small"))
    assert of(experiment, "small") == ["small: has not begun"]


def test_a_log_is_read_once_for_all_runs_and_only_if_a_run_needs_it(experiment, monkeypatch):
    call("061521", RULE.format(run="small"))
    call("071521", RULE.format(run="other"), ERROR.format(run="other", message=REFUSED, own=""))
    call("081521", RULE.format(run="small"), ERROR.format(run="small", message=REFUSED, own=""))
    reads, listings = [], []
    read, calls = unstarted.Calls._read, unstarted.Calls(experiment.results)
    monkeypatch.setattr(unstarted.Calls, "_read", lambda self, path: (reads.append(path.name), read(self, path)))
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, *words: (listings.append(path), glob(path, *words))[1])
    for run, times in (("small", ["08"]), ("other", ["08", "07"]), ("small", ["08", "07"])):
        assert len(examine.run(RunFolder(experiment.results / "runs" / run), None, (), calls)) == 4
        assert [name[11:13] for name in reads] == times
    assert len(listings) == 1


def test_another_experiment_with_a_run_of_the_same_name_is_not_meant(experiment):
    error = ERROR.format(run="small", message=REFUSED, own="").replace("results/tiny", "results/tinny")
    call("061521", error)
    assert of(experiment, "small") == ["small: has not begun"]


def test_a_job_that_waits_is_named_with_its_reason(experiment):
    call("061521", RULE.format(run="small"), ERROR.format(run="small", message=REFUSED, own=""))
    waiting = QueuedJob("38", "PENDING", waits=True, reason="PartitionNodeLimit: too many")
    said = "small: has not begun: its SLURM job 38 waits (PartitionNodeLimit: too many)"
    assert of(experiment, "small", waiting) == [said]
    begun = QueuedJob("39", "RUNNING", nodes="n7")
    assert of(experiment, "small", waiting, begun) == ["small: has not begun: its SLURM job 39 has just started on n7"]
    over = QueuedJob("39", "COMPLETING", only_ends=True)
    assert of(experiment, "small", over)[0] == "small: has not begun: its job could not be submitted"
