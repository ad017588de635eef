"""megaboa.scheduler.slurm.queue with programs of our own in place of SLURM's."""

import time

import pytest
from fake_runs import FakeExperiment
from ordinary_user import as_ordinary_user

from megaboa.files import append_line, write_json
from megaboa.paths import RunFolder
from megaboa.scheduler.answers import QueuedJob
from megaboa.scheduler.slurm import queries, queue

# As sbatch keeps what the executor plugin submits.
SCRIPT = """\
#!/bin/sh
# This script was created by sbatch --wrap.

/x/python -m snakemake --snakefile '/x/Snakefile' --target-jobs '{rule}:run={run}' --allowed-rules {rule} \
--cores 'all' --attempt 1 --force-use-threads  --wait-for-files '/x/.snakemake/tmp.p1q' \
'results/{experiment}/runs/{run}/run.json' \
'results/{experiment}/preflight.json' --force --target-files-omit-workdir-adjustment --mode 'remote'
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    queue._listed.clear()
    queries.batch_script.cache_clear()
    write_json(tmp_path / "results/tiny/runs/dp2/launch.json", {"recovery": {"exclude_hours": 24}})
    return RunFolder((tmp_path / "results/tiny/runs/dp2").relative_to(tmp_path))


@pytest.fixture
def jobs(tmp_path, fake_command):
    """Put jobs into the queue."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    fake_command("scontrol", f'[ "$1 $2 $4" = "write batch_script -" ] && cat {scripts}/$3')
    fake_command("squeue", f"[ ! -e {tmp_path}/queue ] || cat {tmp_path}/queue")

    def submit(job, rule="train", run="dp2", experiment="tiny", workdir=tmp_path):
        (scripts / job).write_text(SCRIPT.format(rule=rule, run=run, experiment=experiment))
        append_line(tmp_path / "queue", f"{job}|RUNNING|None|n1|N/A|N/A|(null)|{workdir}")

    return submit


def test_without_slurm_there_is_nothing_to_say(folder, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert queue.dependency("train", folder) == []


def test_a_first_job_waits_for_nobody(folder, jobs):
    assert queue.dependency("train", folder) == []


def test_a_new_job_waits_for_those_of_the_same_run(folder, jobs):
    jobs("17")
    jobs("18")
    assert queue.dependency("train", folder) == ["--dependency=afterany:17:18"]


@pytest.mark.parametrize(
    "other",
    [
        {"run": "dp22"},
        {"rule": "summarize"},  # reads what training writes
        {"rule": "capture"},
        {"experiment": "other"},
        {"workdir": "/somewhere/else"},
    ],
)
def test_jobs_of_others_are_not_waited_for(folder, jobs, other):
    jobs("17", **other)
    assert queue.dependency("train", folder) == []


def test_a_job_with_many_inputs_has_them_in_a_file(folder, jobs, tmp_path):
    jobs("17")
    script = tmp_path / "scripts" / "17"
    script.write_text(script.read_text().split("--wait-for-files")[0] + "--wait-for-files-file '/x/3.txt' --force\n")
    assert queue.jobs_of("train", folder) == ["17"]
    assert queue.jobs_of("capture", folder) == []


def test_captures_wait_for_captures(folder, jobs):
    jobs("17", rule="capture")
    assert queue.dependency("capture", folder) == ["--dependency=afterany:17"]


def test_a_queue_that_does_not_answer_stops_nobody(folder, unreachable_slurm, monkeypatch):
    monkeypatch.setattr(queue, "PAUSES", (0, 0))
    assert queue.dependency("train", folder) == []


def test_the_queue_is_asked_once_for_all_runs_and_a_script_once(folder, jobs, tmp_path, fake_command):
    jobs("17")
    scripts = tmp_path / "scripts"
    fake_command("squeue", f"echo squeue >>{tmp_path}/asked; cat {tmp_path}/queue")
    fake_command("scontrol", f"echo scontrol >>{tmp_path}/asked; cat {scripts}/$3")
    for run in ("dp1", "dp2", "dp4"):
        queue.jobs_of("train", RunFolder(folder.path.with_name(run)))
    asked = (tmp_path / "asked").read_text().split()
    assert asked.count("squeue") <= 2 and asked.count("scontrol") == 1


def test_silence_is_waited_for_once_and_said_in_one_line_for_each_run(
    folder, fake_command, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(queue, "PAUSES", (0, 0))
    fake_command(
        "squeue", f"echo asked >> {tmp_path}/asked; echo 'error: no controller\nerror: none at all' >&2; exit 1"
    )
    assert [queue.dependency("train", folder) for _ in range(3)] == [[], [], []]
    assert len((tmp_path / "asked").read_text().splitlines()) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and all("no controller: if an older job of it is alive" in line for line in said)


def test_a_script_of_another_rule_or_none_trains_nothing():
    script = SCRIPT.format(rule="train", run="big", experiment="other")
    assert queue.run_in_script(script, "train", "other") == "big"
    assert queue.run_in_script(script.replace("train:run", "capture:run"), "train", "other") is None
    assert queue.run_in_script("", "train", "other") is None
    assert (
        queue.run_in_script("x --target-jobs 'train:run=big' --wait-for-files-file '/x/y.txt'", "train", "other")
        == "big"
    )


def test_squeues_answer_is_read():
    text = (
        "12|PENDING|Priority||2026-11-20T12:00:00|N/A|rule_train_wildcards_a|/home/u/x\n"
        "13|RUNNING|None|n[1-2]|2026-11-20T10:00:00|2026-11-20T14:00:00|(null)|/home/u/x|y\nslurm: noise\n"
    )
    first, second = queue.parse_jobs(text)
    assert (first.id, first.state, first.reason, first.ends) == ("12", "PENDING", "Priority", None)
    assert first.waits and not second.waits
    assert first.starts == time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))
    assert (second.reason, second.nodes, second.comment, second.folder) == ("", "n[1-2]", "", "/home/u/x|y")
    assert second.ends - second.starts == 4 * 3600


def test_lives_of_a_job_that_was_put_back():
    text = (
        "17|2026-11-20T10:00:00|2026-11-20T10:05:00|2026-11-20T11:00:00\n"
        "17|2026-11-20T11:00:00|2026-11-20T11:30:00|Unknown\n"
        "18|2026-11-20T11:00:00|Unknown|Unknown\n"
        "\n"
    )
    first, second = queue.parse_lives(text, now=2e9)
    assert (first.job, first.start - first.submit, first.end - first.start) == ("17", 300.0, 3300.0)
    assert second.end == 2e9


def test_a_run_without_a_job_needs_no_accounts():
    assert queue.read_lives([]) is None


def test_a_job_that_slurm_holds_after_too_many_requeues_waits_and_says_what_to_do():
    """As squeue has it: its user can't release it."""
    (held,) = queue.parse_jobs("3|REQUEUE_HOLD|JobHoldMaxRequeue||N/A|N/A|rule_train_wildcards_second|/home/me")
    assert held.waits and held.stuck and not held.only_ends
    assert held.reason == "JobHoldMaxRequeue: held after too many requeues: scancel 3, then call again"


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("launch failed requeued held", "a host refused to start it: scontrol release 3"),
        ("job requeued in held state", "by scontrol requeuehold: scontrol release 3"),
        ("job_requeued_in_held_state", "by scontrol requeuehold: scontrol release 3"),
        ("job requeued in special exit state", "scontrol release 3"),
        ("JobHeldUser", "by scontrol hold: scontrol release 3"),
        ("JobHeldAdmin", "an administrator holds it: ask for scontrol release 3"),
    ],
)
def test_a_held_job_says_how_it_is_released(reason, told):
    (held,) = queue.parse_jobs(f"3|PENDING|{reason}||N/A|N/A|rule_train_wildcards_second|/home/me")
    assert held.waits and held.stuck
    assert held.reason == f"{reason.replace('_', ' ')}: {told}"


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("PartitionNodeLimit", "lower resources.nodes"),
        ("PartitionTimeLimit", "lower resources.runtime"),
        ("PartitionConfig", "lower what is above it"),
        ("MaxMemPerLimit", "lower resources.mem_mb_per_rank"),
        ("BadConstraints", "correct resources.constraint if it is set, or ask for less on a node"),
    ],
)
def test_a_job_that_never_starts_says_what_to_change(reason, remedy):
    (job,) = queue.parse_jobs(f"3|PENDING|{reason}||N/A|N/A|rule_train_wildcards_second|/home/me")
    assert job.stuck and job.reason.startswith(f"{reason}: ")
    assert job.reason.endswith(f": {remedy}, or take another partition; then scancel 3, and call again")


@pytest.mark.parametrize("reason", ["Priority", "Resources", "None", "Nodes_required:_are_down"])
def test_a_job_that_starts_by_itself_is_not_stuck(reason):
    (job,) = queue.parse_jobs(f"3|PENDING|{reason}||N/A|N/A|rule_train_wildcards_second|/home/me")
    assert not job.stuck


def test_an_experiment_that_may_not_be_read_hides_no_job(tmp_path):
    mine = FakeExperiment(tmp_path, "mine")
    mine.plan_run("big")
    FakeExperiment(tmp_path, "theirs").plan_run("big")
    job = QueuedJob("12", "RUNNING", comment="rule_train_wildcards_big")
    (theirs := tmp_path / "results" / "theirs" / "runs").chmod(0)
    try:
        with as_ordinary_user(tmp_path):
            script = SCRIPT.format(rule="train", run="big", experiment="mine")
            assert queue.run_of(job, "train", mine.results, lambda job: script) == "big"
    finally:
        theirs.chmod(0o755)
