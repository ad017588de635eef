"""How far a run has come, read from its store while anything may be happening to it."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from fake_runs import START, FakeExperiment, end_event, start_event, step_event, write_attempt, write_attempts

from megaboa.files import write_json
from megaboa.records import TrainEnd
from megaboa.run.progress import (
    Progress,
    describe,
    format_age,
    format_duration,
    read_progress,
    read_tail,
    usual_seconds_per_step,
)
from megaboa.store_paths import RunStore


@pytest.fixture
def store(tmp_path):
    return FakeExperiment(tmp_path).plan_run("dp2", steps=30)


def steps(first, last, seconds=0.125):
    return [step_event(step, START + step * seconds, loss=6.0 - step / 100) for step in range(first, last + 1)]


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_run_without_attempts_waits(store):
    assert read_progress(store) == Progress("dp2", "waiting", total=30)


def test_a_running_run_has_step_loss_speed_and_time_left(store):
    write_attempts(store, [start_event(1)])
    write_attempt(store, 1, [{"event": "train_start", "time": START, "step": 0}, *steps(1, 14)])
    progress = read_progress(store, run="dp2", now=START + 14 * 0.125 + 3)
    assert (progress.state, progress.step, progress.total, progress.attempt) == ("running", 14, 30, 1)
    assert progress.loss == 5.86
    assert progress.steps_per_second == pytest.approx(8.0)
    assert progress.tokens_per_second == pytest.approx(8 * 1024)
    assert progress.eta_seconds == pytest.approx(2.0)
    assert progress.age_seconds == pytest.approx(3.0)
    assert describe(progress) == "14/30  loss 5.860  8.0 steps/s  ETA 0:02"


def test_a_torn_last_line_is_not_read(store):
    write_attempts(store, [start_event(1)])
    write_attempt(store, 1, steps(1, 5), torn='{"event": "step", "step": 6, "ti')
    assert read_progress(store).step == 5


def test_a_new_attempt_counts_from_the_checkpoint_that_it_resumes(store):
    write_attempts(store, [start_event(1), end_event(1, 10, outcome="failed"), start_event(2, resumed_from=10)])
    write_attempt(store, 1, steps(1, 17))
    progress = read_progress(store)
    assert (progress.state, progress.step, progress.attempt, progress.loss) == ("running", 10, 2, None)


def test_an_attempt_whose_process_is_gone_is_interrupted(store):
    pid = dead_pid()
    write_attempts(store, [start_event(1, pid=pid)])
    write_attempt(store, 1, steps(1, 3))
    progress = read_progress(store)
    assert (progress.state, progress.detail) == ("interrupted", f"process {pid} is gone")
    assert progress.eta_seconds is None


def test_an_attempt_on_another_host_is_taken_as_running(store):
    write_attempts(store, [start_event(1, pid=dead_pid(), host="node17")])
    assert (read_progress(store).state, read_progress(store).host) == ("running", "node17")


@pytest.mark.parametrize(
    ("outcome", "state", "detail"),
    [
        ("completed", "done", None),
        ("failed", "failed", "rank 1: exit code 1"),
        ("interrupted", "interrupted", "SIGTERM"),
    ],
)
def test_an_ended_attempt_has_the_state_of_its_end(store, outcome, state, detail):
    write_attempts(store, [start_event(1), end_event(1, 30, outcome=outcome, detail=detail)])
    write_attempt(store, 1, steps(1, 30))
    progress = read_progress(store)
    assert (progress.state, progress.detail, progress.step) == (state, detail, 30)


def call_event(job=None, time=START):
    return {"event": "call", "job": job, "time": time}


def slurm_start(attempt, **values):
    return start_event(attempt, **{"host": "n1", "job": "12", "restarts": 0, "nodes": ["n1", "n2"], **values})


NODE_FAILURE = {"outcome": "failed", "cause": "node_failure", "action": "requeue", "bad_nodes": ["n2"], "detail": "n2"}


def test_a_run_that_put_its_job_back_into_the_queue_is_queued(store):
    write_attempts(store, [call_event("12"), slurm_start(1), end_event(1, 10, **NODE_FAILURE)])
    progress = read_progress(store)
    assert (progress.state, progress.job, progress.nodes, progress.goes_on) == ("queued", "12", ("n1", "n2"), True)
    assert (progress.event, progress.event_time) == ("queued again: node failure of n2", START + 60)


def test_ranks_that_will_be_started_again_run_as_long_as_their_supervisor_lives(store):
    end = end_event(1, 10, outcome="failed", cause="crash", action="resume", detail="crash: no idea")
    write_attempts(store, [start_event(1), end])
    assert read_progress(store).state == "running"
    write_attempts(store, [start_event(1, pid=dead_pid()), end])
    assert (read_progress(store).state, read_progress(store).detail) == ("failed", "crash: no idea")


def test_a_call_in_a_job_runs_before_its_ranks_do(store):
    write_attempts(store, [call_event("12")])
    assert (read_progress(store).state, read_progress(store).job) == ("running", "12")
    stopped = end_event(1, 10, outcome="failed", cause="nan", action="stop", detail="nan: step 3")
    write_attempts(store, [call_event("12"), slurm_start(1), stopped, call_event("13")])
    assert (read_progress(store).state, read_progress(store).job) == ("running", "13")
    write_attempts(store, [call_event(), start_event(1), stopped, call_event()])
    assert read_progress(store).state == "failed"


def test_entries_without_an_attempt_are_no_trouble(store):
    further = [
        {"event": "skip", "steps": [12, 14], "time": START},
        {"event": "distrust", "iteration": 20, "detail": "torn", "aside": "x", "time": START},
        {"event": "unhealthy", "bad_nodes": ["n2"], "detail": "n2: no answer", "time": START},
        {"event": "of the future", "time": START},
    ]
    for entry in further:
        write_attempts(store, [call_event("12"), entry, slurm_start(1), entry])
        assert (read_progress(store).state, read_progress(store).attempt) == ("running", 1)


def test_the_usual_speed_is_that_of_the_newest_attempt_that_has_one(store):
    write_attempt(store, 1, steps(1, 9, seconds=2.0))
    write_attempt(store, 2, steps(9, 12, seconds=0.5))
    write_attempt(store, 3, [{"event": "train_start", "time": START, "step": 12}])
    assert usual_seconds_per_step(RunStore(store)) == pytest.approx(0.5)


def test_a_recipes_number_of_steps_is_what_its_ranks_found(store):
    write_json(store / "identity.json", {"run": {"training": {}}})
    write_attempts(store, [start_event(1)])
    assert read_progress(store).total is None
    write_json(store / "found.json", {"train_iters": 12})
    assert read_progress(store).total == 12


def test_only_the_tail_is_read_and_its_first_half_line_is_left_out(tmp_path):
    path = tmp_path / "steps.jsonl"
    lines = [json.dumps({"event": "end", "step": step, "time": 0.0}) for step in range(1000)]
    path.write_text("\n".join(lines) + "\n")
    expected = [TrainEnd(step=step, time=0.0) for step in range(1000)]
    for size in range(1, 300):
        tail = read_tail(path, size)
        whole = sum(1 for count in range(1, 10) if sum(len(line) + 1 for line in lines[-count:]) <= size)
        assert tail == expected[len(expected) - whole :]
    assert read_tail(path, 10**6) == expected


def test_a_nan_loss_is_said(store):
    write_attempts(store, [start_event(1)])
    write_attempt(store, 1, [step_event(1, START + 1, loss=float("nan"))])
    assert "loss nan" in describe(read_progress(store))


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.2, "0:02"), (725, "12:05"), (11_220, "3:07:00"), (184_020, "2d 03:07"), (0, "0:00")]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(12.4, "12 s"), (185, "3 min"), (7300, "2 h"), (200_000, "2 d")])
def test_ages(seconds, text):
    assert format_age(seconds) == text


def test_the_supervisor_can_import_it_without_any_installed_package():
    script = textwrap.dedent("""
        import sys
        import megaboa.run.progress
        foreign = {name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"megaboa", "__main__"}
        sys.exit(str(foreign) if foreign else 0)
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-S", "-c", script], env=environment, check=True)
