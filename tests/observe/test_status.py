"""The table of an experiment's runs, and the script that prints it."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_runs import START, FakeExperiment, end_event, start_event, step_event, write_attempt
from ordinary_user import as_ordinary_user
from rich.console import Console

from megaboa.doctor import examine
from megaboa.files import append_line, write_json
from megaboa.observe.queue import Queue, trained_by
from megaboa.observe.status import as_record, event, experiment_progress, interrupted, missing, progress_table
from megaboa.paths import RunFolder
from megaboa.records import Pace, line, write
from megaboa.run import checkpoints
from megaboa.run.identity import identity_of, store_of
from megaboa.scheduler.answers import QueuedJob
from megaboa.scheduler.slurm import queries
from megaboa.store_paths import RunStore

MEGABOA = Path(__file__).parents[2] / "workflow" / "scripts" / "megaboa"


@pytest.fixture
def experiment(tmp_path):
    """A run that is done, one that runs, one that failed and one that waits; in this order in the plan."""
    experiment = FakeExperiment(tmp_path)
    experiment.completed_run("done1")
    store = experiment.plan_run("busy")
    write_attempt(store, 1, [step_event(step, START + step) for step in range(1, 13)])
    experiment.begin("busy", store, [start_event(1)])
    store = experiment.plan_run("bad")
    experiment.begin("bad", store, [start_event(1), end_event(1, 0, outcome="failed", detail="rank 0: exit code 1")])
    experiment.plan_run("later")
    return experiment


def states(experiment):
    return {run.run: run.state for run in experiment_progress(experiment.results)}


def test_runs_come_in_the_order_of_the_plan_with_their_states(experiment):
    expected = [("done1", "done"), ("busy", "running"), ("bad", "failed"), ("later", "waiting")]
    assert list(states(experiment).items()) == expected


def test_a_run_that_was_configured_anew_waits_whatever_its_old_attempts_did(experiment):
    experiment.plan_run("done1", steps=50)
    assert states(experiment)["done1"] == "waiting"


def test_a_run_that_was_killed_after_its_last_checkpoint_is_done_once_it_has_its_manifest(experiment):
    store = experiment.plan_run("killed")
    experiment.begin("killed", store, [start_event(1, pid=2**22 + 1)])
    assert states(experiment)["killed"] == "interrupted"
    experiment.finish("killed", store, 30)
    assert states(experiment)["killed"] == "done"


def test_the_table_shows_every_run_and_counts_them(experiment):
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(progress_table("tiny", experiment_progress(experiment.results)))
    text = console.export_text()
    assert "12/30" in text
    assert "rank 0: exit code 1" in text
    assert "1 running, 1 done, 1 failed, 1 waiting" in text


def test_a_rank_that_stands_out_at_the_last_saves_is_shown_while_it_trains(experiment):
    def slow():
        return {run.run: run.slow for run in experiment_progress(experiment.results) if run.slow}

    store = experiment.plan_run("busy")
    paces = RunStore(store).attempt(1).paces
    experiment.begin("busy", store, [start_event(1, job="17", nodes=["n1", "n2"])])
    for times in (1.3, 1.2, 1.4):
        assert not slow()
        append_line(paces, line(Pace(step=10, seconds=(0.02, 0.02 * times))))
    assert slow() == {"busy": "rank 1 on n2 calculates 1.20 times as long as the others"}
    (busy,) = [run for run in experiment_progress(experiment.results) if run.slow]
    assert busy.slow in event(busy, START)
    append_line(paces, line(Pace(step=20, seconds=(0.02, 0.02))))
    assert not slow()


def test_checkpoints_are_counted_and_weighed(experiment):
    store = RunStore(experiment.plan_run("busy"))
    for iteration in (10, 20):
        folder = checkpoints.folder(store.checkpoints, iteration)
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(bytes(3_000_000))
        (folder / checkpoints.LAST_WRITTEN).write_bytes(bytes(1000))
    checkpoints.mark_complete(store.checkpoints)
    checkpoints.folder(store.checkpoints, 30).mkdir()
    found = {run.run: run for run in experiment_progress(experiment.results)}
    record = as_record(found["busy"])
    assert (record["checkpoints"], record["checkpoint_bytes"]) == (2, 6_002_000)
    console = Console(record=True, width=160, file=io.StringIO())
    console.print(progress_table("tiny", list(found.values())))
    assert "2 x 3 MB" in console.export_text()


def test_where_interrupted_runs_stopped_and_what_the_same_call_does(tmp_path):
    experiment = FakeExperiment(tmp_path)
    experiment.plan_run("later")
    for run, saved in {"saved": 12, "before": 10, "never": None}.items():
        store = experiment.plan_run(run)
        write_attempt(store, 1, [step_event(step, START + step) for step in range(1, 13)])
        end = end_event(1, saved or 0, outcome="interrupted", cause="cancelled", action="stop", detail="SIGINT")
        experiment.begin(run, store, [start_event(1), end])
        write_json(experiment.results / "runs" / run / "launch.json", {"store": str(tmp_path / "store")})
        if saved:
            write_json(checkpoints.folder(RunStore(store).checkpoints, saved) / checkpoints.MARKER, {"files": {}})
    store = experiment.plan_run("saves")
    write_attempt(store, 1, [step_event(12, START)])
    experiment.begin("saves", store, [start_event(1)])
    write_json(experiment.results / "runs" / "saves" / "launch.json", {"store": str(tmp_path / "store")})
    assert interrupted(missing(experiment.results)) == [
        "saved stopped at step 12 of 30, saved; the same call resumes it",
        "before stopped at step 12 of 30, saved at step 10; the same call resumes it from there",
        "never stopped at step 12 of 30, nothing was saved; the same call starts it again from step 0",
        "saves has not ended yet, at step 12 of 30: `megaboa status tiny/saves` shows it",
    ]


@pytest.mark.parametrize(
    ("continues", "said"),
    [
        (False, ". Undo the change to resume it, continue from there with the change (continue_from: itself), or rest"),
        (True, ", with which the next call continues from there"),
    ],
)
def test_a_run_that_is_refused_for_other_content_is_not_said_to_resume(tmp_path, continues, said):
    experiment = FakeExperiment(tmp_path)
    experiment.plan_run("run")
    write_json(experiment.results / "models" / "dense" / "source.json", {"digest": "0123"})
    launch = {"store": str(tmp_path / "store"), "continues": continues}
    write_json(experiment.results / "runs" / "run" / "launch.json", launch)
    store = store_of(folder := RunFolder(experiment.results / "runs" / "run"), identity_of(folder))
    write(store.identity, identity_of(folder))
    write_attempt(store.path, 1, [step_event(step, START + step) for step in range(1, 13)])
    end = end_event(1, 12, outcome="interrupted", cause="cancelled", action="stop", detail="SIGINT")
    experiment.begin("run", store.path, [start_event(1), end])
    write_json(checkpoints.folder(store.checkpoints, 12) / checkpoints.MARKER, {"files": {}})
    assert interrupted(missing(experiment.results)) == ["run stopped at step 12 of 30, saved; the same call resumes it"]
    write_json(experiment.results / "models" / "dense" / "source.json", {"digest": "4567"})
    (line,) = interrupted(missing(experiment.results))
    assert line.startswith(
        "run stopped at step 12 of 30, saved at step 12; what it reads has other content since" + said
    )
    found = examine.run(folder, None)
    assert any("with the same command it is refused: what it reads has other" in line for line in found), found


def test_a_damaged_file_of_a_run_is_shown_with_it_and_hides_no_other(tmp_path):
    experiment = FakeExperiment(tmp_path)
    for run in ("damaged", "fine"):
        experiment.begin(run, experiment.plan_run(run), [start_event(1), end_event(1, 30)])
    damaged = experiment.results / "runs" / "damaged" / "run.json"
    damaged.write_text("")
    found = experiment_progress(experiment.results)
    assert [run.state for run in found] == ["failed", "done"]
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(progress_table("tiny", found))
    assert f"{damaged.name} is not valid JSON" in " ".join(console.export_text().split())
    assert [run.state for run in missing(experiment.results)] == ["FAIL", "NOT_RUN"]


def test_a_run_that_may_not_be_read_is_shown_with_the_remedy_and_hides_no_other(tmp_path):
    experiment = FakeExperiment(tmp_path)
    for run in ("secret", "closed", "fine"):
        experiment.begin(run, experiment.plan_run(run), [start_event(1), end_event(1, 30)])
    secret, closed = (experiment.results / "runs" / name for name in ("secret/run.json", "closed"))
    secret.chmod(0)
    closed.chmod(0)
    try:
        with as_ordinary_user(tmp_path):
            found, standings = experiment_progress(experiment.results), missing(experiment.results)
    finally:
        secret.chmod(0o644)
        closed.chmod(0o755)
    assert [run.state for run in found] == ["unknown", "unknown", "done"]
    remedy = "Permission denied: give this user the right to it, and call again"
    assert all(run.detail.startswith(f"{path}: {remedy}") for run, path in zip(found, (secret, closed), strict=False))
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(progress_table("tiny", found))
    assert "give this user the right" in (text := console.export_text()) and "1 done, 2 unknown" in text
    assert [run.state for run in standings] == ["NOT_RUN", "NOT_RUN", "NOT_RUN"]
    assert interrupted(standings) == [f"{run.run} can't be looked at: {run.detail}" for run in found[:2]]


def test_of_a_run_whose_store_is_gone_that_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment = FakeExperiment(tmp_path)
    write_json(experiment.results / "models" / "dense" / "source.json", {"digest": "0123"})
    for run in ("half", "whole"):
        experiment.plan_run(run)
        write_json(experiment.results / "runs" / run / "launch.json", {"store": "store"})
        own = store_of(folder := RunFolder(experiment.results / "runs" / run), identity_of(folder)).path
        write(RunStore(tmp_path / own).identity, identity_of(folder))
        experiment.begin(run, tmp_path / own, [start_event(1), end_event(1, 30)])
    experiment.finish("whole", tmp_path / own, 30)
    assert [run.state for run in experiment_progress(experiment.results)] == ["done", "done"]
    (tmp_path / "store").rename(tmp_path / "moved")
    half, whole = experiment_progress(experiment.results)
    assert (half.state, whole.state) == ("lost", "lost")
    assert half.detail.startswith("has begun, and store/runs/tiny/half/")
    assert half.detail.endswith(" is gone: put it back, or train it again (--config restart=half)")
    assert whole.detail.startswith("has been trained, and store/runs/tiny/whole/")
    assert examine.run(RunFolder(experiment.results / "runs" / "half"), None) == [f"half: {half.detail}"]
    assert missing(experiment.results)[0].why == half.detail


def test_markup_in_a_name_is_not_obeyed(tmp_path):
    experiment = FakeExperiment(tmp_path)
    store = experiment.plan_run("[red]x")
    experiment.begin("[red]x", store, [start_event(1), end_event(1, 0, outcome="failed", detail="[bold]")])
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(progress_table("tiny", experiment_progress(experiment.results)))
    assert "[red]x" in (text := console.export_text())
    assert "[bold]" in text


NOW = START + 3600
FAILED = {"outcome": "failed", "cause": "nan", "action": "stop", "detail": "nan: step 3"}
TIME_LIMIT = {"outcome": "interrupted", "cause": "time_limit", "action": "requeue", "detail": "290 s are left"}


def begin_in_slurm(experiment, run, *ends, job="12", steps=30):
    """A run that SLURM job 12 trains: 10 steps so far, two seconds each."""
    store = experiment.plan_run(run, steps=steps)
    write_json(experiment.results / "runs" / run / "launch.json", {"runtime": "10m"})
    write_attempt(store, 1, [step_event(step, START + 2 * step) for step in range(1, 11)])
    call = {"event": "call", "job": job, "time": START}
    experiment.begin(run, store, [call, start_event(1, job=job, host="n1", nodes=["n1", "n2"]), *ends])


def in_queue(id, state, **values):
    return QueuedJob(id, state, waits=state == "PENDING", only_ends=state == "COMPLETING", **values)


def job_of(run, id="12", state="RUNNING", **values):
    return in_queue(id, state, comment=f"rule_train_wildcards_{run}", **values)


def run_with(experiment, *jobs, known=True, asked=NOW):
    """The run `big` as it is seen with these jobs in the queue."""
    jobs = [QueuedJob(**{**vars(job), "folder": job.folder or str(experiment.root)}) for job in jobs]
    found = experiment_progress(experiment.results, now=NOW, queue=Queue(asked, known, tuple(jobs)))
    return next(run for run in found if run.run == "big")


@pytest.fixture
def empty(tmp_path):
    return FakeExperiment(tmp_path)


def test_a_run_whose_job_waits_is_queued(empty):
    begin_in_slurm(empty, "big", end_event(1, 10, **TIME_LIMIT))
    run = run_with(empty, job_of("big", state="PENDING", reason="Priority", starts=NOW + 7300))
    assert (run.state, run.job, run.job_state, run.job_reason) == ("queued", "12", "PENDING", "Priority")
    assert event(run, NOW) == "(Priority, starts in 2 h) queued again: time limit, 59 min ago"


def test_a_killed_supervisors_run_is_queued_if_slurm_put_its_job_back(empty):
    begin_in_slurm(empty, "big")
    assert run_with(empty, job_of("big", state="PENDING", reason="BeginTime")).state == "queued"


def test_a_run_whose_job_runs_is_running(empty):
    begin_in_slurm(empty, "big")
    run = run_with(empty, job_of("big", nodes="n[1-2]", ends=NOW + 300))
    assert (run.state, run.nodes, run.job_ends) == ("running", ("n1", "n2"), NOW + 300)


def test_a_run_whose_job_is_gone_is_lost_unless_its_supervisor_said_that_it_stops(empty):
    begin_in_slurm(empty, "big")
    run = run_with(empty)
    assert (run.state, run.detail) == ("lost", "SLURM job 12 is gone: call again")
    begin_in_slurm(empty, "big", end_event(1, 10, **TIME_LIMIT))
    assert run_with(empty).state == "lost"
    begin_in_slurm(empty, "big", end_event(1, 10, **FAILED))
    assert run_with(empty).state == "failed"
    assert run_with(empty, job_of("big")).state == "failed", "the rest of its job"


@pytest.mark.parametrize(
    ("claim", "whose"),
    [({"user": "anna"}, "SLURM job 12 of user anna"), ({"cluster": "alpha"}, "SLURM job 12 on cluster alpha")],
)
def test_a_job_that_our_queue_can_not_know_is_not_lost(empty, monkeypatch, claim, whose):
    """Our queue says nothing of jobs of other users and clusters; a job of this number here may be another."""
    monkeypatch.setattr(queries, "cluster", lambda: "beta")
    begin_in_slurm(empty, "big")
    store = (empty.results / "runs" / "big" / "attempts.jsonl").resolve().parent
    write_json(
        store / "claims" / "000001.json", {"host": "n1", "pid": 1, "job": "12", "restarts": 0, "time": 0} | claim
    )
    unrelated = [in_queue("12", "PENDING", folder="/elsewhere")] if "cluster" in claim else []
    run = run_with(empty, *unrelated)
    assert (run.state, run.scheduler_silent) == ("running", True)
    assert f"trained by {whose} (process 1 on host n1)" in event(run, NOW)


def test_a_run_whose_job_gave_up_unrecorded_has_stopped(empty):
    """For example on a full disk, where its last line could not be written."""
    begin_in_slurm(empty, "big")
    folder = empty.results / "runs" / "big"
    write_json(folder / "launch.json", {"runtime": "10m", "store": str(empty.root / "store")})
    said = "big has not ended yet, at step 10 of 30: `megaboa status tiny/big` shows it"
    running = job_of("big", folder=str(empty.root))
    assert interrupted(missing(empty.results, Queue(NOW, True, (running,)))) == [said]
    assert interrupted(missing(empty.results, Queue(NOW, False))) == [said], "nothing is concluded from silence"
    assert interrupted(missing(empty.results, Queue(NOW, True))) == [
        "big stopped at step 10 of 30, nothing was saved; the same call starts it again from step 0"
    ]


def test_what_was_written_after_slurm_was_asked_is_newer(empty):
    begin_in_slurm(empty, "big")
    assert run_with(empty, asked=START - 1).state == "running"
    begin_in_slurm(empty, "big", end_event(1, 10, **TIME_LIMIT))
    assert run_with(empty, job_of("big"), asked=START + 50).state == "queued"


def test_where_slurm_can_not_be_asked_the_ledger_stands_and_that_is_said(empty):
    begin_in_slurm(empty, "big")
    run = run_with(empty, known=False)
    assert (run.state, run.scheduler_silent) == ("running", True)
    assert "unknown to SLURM at the moment" in event(run, NOW)
    begin_in_slurm(empty, "big", end_event(1, 10, **FAILED))
    assert (run := run_with(empty, known=False)).scheduler_silent is False and run.state == "failed"


def test_a_run_that_has_not_begun_is_queued_with_the_job_that_was_submitted(empty):
    empty.plan_run("big")
    assert run_with(empty).state == "waiting"
    run = run_with(empty, job_of("big", state="PENDING", reason="AssocGrpGRES"))
    assert (run.state, run.job, event(run, NOW)) == ("queued", "12", "(AssocGrpGRES)")
    run = run_with(empty, job_of("big", nodes="n7"))
    assert (run.state, run.nodes, event(run, NOW)) == ("running", ("n7",), "its job starts")


@pytest.mark.parametrize("width", [80, 200])
def test_a_job_that_never_starts_is_shown_with_its_whole_remedy(empty, width):
    empty.plan_run("big")
    console = Console(record=True, width=width, file=io.StringIO())
    remedy = "PartitionNodeLimit: more nodes than the partition lets a job have: lower resources.nodes"
    run = run_with(empty, job_of("big", state="PENDING", reason=remedy, stuck=True))
    console.print(progress_table("tiny", [run], NOW))
    assert f"({remedy})" in " ".join(console.export_text().split())


def test_a_reason_with_a_colon_needs_nobody(empty):
    """The queue says whether a job is stuck; its reason is only shown."""
    empty.plan_run("big")
    console = Console(record=True, width=80, file=io.StringIO())
    reason = "Nodes required: for the job are reserved for jobs in higher priority partitions, or down"
    run = run_with(empty, job_of("big", state="PENDING", reason=reason))
    console.print(progress_table("tiny", [run], NOW))
    assert reason not in " ".join(console.export_text().split())


def test_a_failed_run_that_was_submitted_again_is_queued(empty):
    begin_in_slurm(empty, "big", end_event(1, 10, **FAILED))
    run = run_with(empty, job_of("big"), job_of("big", id="13", state="PENDING", reason="Dependency"))
    assert (run.state, run.job) == ("queued", "13")


def test_a_living_job_goes_before_one_that_waits_for_it(empty):
    begin_in_slurm(empty, "big")
    run = run_with(empty, job_of("big", id="13", state="PENDING"), job_of("big"))
    assert (run.state, run.job) == ("running", "12")


def test_jobs_of_other_folders_rules_and_runs_do_not_count(empty):
    empty.plan_run("big")
    others = [
        job_of("big", folder="/elsewhere"),
        in_queue("13", "RUNNING", comment="rule_capture_wildcards_big"),
        in_queue("14", "RUNNING", comment="rule_preflight"),
        job_of("bigger"),
    ]
    assert run_with(empty, *others).state == "waiting"


SCRIPT_OF_JOB = """#!/bin/sh
/x/bin/python -m snakemake --snakefile '/x/Snakefile' --target-jobs 'train:run=big' --allowed-rules train \
 --wait-for-files '/x/.snakemake/tmp.1' 'results/other/models/m/source.json' 'results/other/runs/big/run.json' --force
"""


def test_a_batch_script_tells_the_experiment_where_two_have_a_run_of_one_name(empty, monkeypatch):
    empty.plan_run("big")
    other = FakeExperiment(empty.root, "other")
    other.plan_run("big")
    asked = []

    def script(job):
        asked.append(job)
        return SCRIPT_OF_JOB

    monkeypatch.setattr(queries, "batch_script", script)
    jobs = (job_of("big", folder=str(empty.root)), in_queue("14", "RUNNING", comment="ours", folder=str(empty.root)))
    queue = Queue(NOW, True, jobs)
    assert trained_by(queue, empty.results) == {}
    assert trained_by(queue, other.results) == {"big": list(jobs)}
    assert asked == ["12", "14"] * 2
    other.plan_run("small")
    trained_by(Queue(NOW, True, (job_of("small", folder=str(empty.root)),)), other.results)
    assert len(asked) == 4, "its comment is enough"


@pytest.mark.parametrize(
    ("state", "values", "jobs"),
    [
        # 200 steps are left, 2 s each; of the 600 s of a job 60 s are for its last save.
        ("PENDING", {}, 1),
        ("RUNNING", {"ends": NOW + 500}, 0),
        ("RUNNING", {"ends": NOW + 100}, 1),
        ("RUNNING", {}, None),
    ],
)
def test_how_many_further_jobs_a_run_needs_at_its_speed(empty, state, values, jobs):
    begin_in_slurm(empty, "big", steps=210)
    assert run_with(empty, job_of("big", state=state, **values)).jobs_left == jobs


def test_a_run_that_is_done_needs_no_jobs_and_its_last_event_is_that(empty):
    begin_in_slurm(empty, "big")
    empty.finish("big", Path(os.path.realpath(empty.results / "runs" / "big" / "attempts.jsonl")).parent, 30)
    run = run_with(empty)
    assert (run.state, run.event, run.jobs_left) == ("done", "finished", None)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_table_has_a_line_for_each_run_on_a_terminal_of_any_width(empty, width):
    for number in range(3):
        begin_in_slurm(empty, f"lr{number}", steps=123_456, job=f"8{number}234")
    reason = "poisoned: " + "a long story, " * 12
    begin_in_slurm(empty, "big", end_event(1, 10, **{**FAILED, "detail": reason}))
    jobs = tuple(job_of(f"lr{number}", id=f"8{number}234", ends=NOW + 300) for number in range(3))
    runs = experiment_progress(empty.results, now=NOW, queue=Queue(NOW, True, jobs))
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(progress_table("tiny", runs, now=NOW))
    lines = console.export_text().splitlines()
    assert all(len(line) <= width for line in lines)
    assert [line.split()[0] for line in lines[1:5]] == ["run", "lr0", "lr1", "lr2"]
    assert lines[2].split()[1:5] == [
        "running",
        "10/123456",
        lines[2].split()[3],
        *(["0.5"] if width == 160 else ["512"]),
    ]
    assert "80234" in lines[2]
    assert " ".join(" ".join(lines[5:]).split()).count("a long story,") >= 12, "told in full"


def test_a_table_in_a_pipe_has_every_name_in_full(empty):
    name, reason = f"lr{'0' * 90}-seed1", "poisoned: " + "a long story, " * 30
    begin_in_slurm(empty, name, end_event(1, 10, **{**FAILED, "detail": reason}))
    done = run_script(empty, COLUMNS="80")
    lines = [line for line in done.stdout.splitlines() if name in line]
    assert len(lines) == 1 and lines[0].startswith(f"{name}  failed ") and reason.strip() in lines[0], done


def run_script(experiment, *arguments, **environment):
    command = [sys.executable, MEGABOA, "status", "--results", experiment.results.parent, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def squeue(folder, text):
    """A program of this name for PATH, and the file where it counts its calls."""
    program, calls = folder / "bin" / "squeue", folder / "calls"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho >> {calls}\n{text}\n")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}, calls


def test_the_script_prints_json_for_machines(experiment):
    done = run_script(experiment, "tiny", "--json")
    runs = {run["run"]: run for run in json.loads(done.stdout)["tiny"]}
    assert (runs["busy"]["step"], runs["busy"]["total"], runs["busy"]["eta_seconds"]) == (12, 30, 18.0)


def test_the_script_says_when_there_is_no_such_experiment(experiment):
    done = run_script(experiment, "tinny")
    assert done.returncode == 1
    assert "no experiment or run `tinny`" in done.stderr


def test_a_run_may_be_named_alone(experiment):
    for name in ("tiny/busy", experiment.results / "runs" / "busy"):
        found = json.loads(run_script(experiment, name, "--json").stdout)
        assert [run["run"] for run in found["tiny"]] == ["busy"]
    done = run_script(experiment, "tiny/bussy")
    assert done.returncode == 1 and "no experiment or run `tiny/bussy`" in done.stderr


def test_waiting_runs_whose_data_failed_point_to_the_doctor(experiment):
    write_json(experiment.results / "specs" / "corpora" / "text.json", {})
    log = experiment.results / "logs" / "data" / "text" / "sources.log"
    log.parent.mkdir(parents=True)
    log.write_text("reads\n")
    assert "megaboa doctor" not in run_script(experiment, "tiny").stdout
    log.write_text("error: corpora.text.source: no such file\n")
    assert "has failed: `megaboa doctor tiny` says why" in run_script(experiment, "tiny").stdout
    assert "megaboa doctor" not in run_script(experiment, "tiny/busy").stdout, "it doesn't wait"


def test_squeue_is_called_once_for_all_experiments(empty):
    empty.plan_run("big")
    other = FakeExperiment(empty.root, "other")
    begin_in_slurm(other, "old", job="11")
    job = f"12|PENDING|Priority||N/A|N/A|rule_train_wildcards_big|{empty.root}"
    environment, calls = squeue(empty.root, f"echo '{job}'")
    found = json.loads(run_script(empty, "--json", **environment).stdout)
    assert [(run["state"], run["job"], run["job_reason"]) for run in found["tiny"]] == [("queued", "12", "Priority")]
    assert [(run["state"], run["nodes"]) for run in found["other"]] == [("lost", ["n1", "n2"])]
    assert calls.read_text() == "\n\n", "once for the table, and once for the nodes that waiting jobs avoid"


def test_a_squeue_that_fails_is_said(empty):
    begin_in_slurm(empty, "big")
    environment, _ = squeue(empty.root, "echo 'Unable to contact slurm controller' >&2; exit 1")
    (run,) = json.loads(run_script(empty, "--json", **environment).stdout)["tiny"]
    assert (run["state"], run["scheduler_silent"]) == ("running", True)
    assert "SLURM could not be asked" in run_script(empty, **environment).stdout


def test_a_nan_is_null_in_json(empty):
    store = empty.plan_run("big")
    write_attempt(store, 1, [step_event(1, START + 1, loss=float("nan"))])
    empty.begin("big", store, [start_event(1)])
    (run,) = json.loads(run_script(empty, "--json").stdout, parse_constant=pytest.fail)["tiny"]
    assert (run["loss"], run["step"]) == (None, 1)
