"""A run that was really trained, and killed once: its JSON lines, its console and its event files say the same."""

import os
import signal

import pytest

from megaboa.files import read_jsonl
from megaboa.observe.logs.log_summary import LogSummary
from megaboa.observe.logs.reader import read_events
from megaboa.observe.logs.tensorboard import event_files, read_event_file
from megaboa.records import plain

pytestmark = pytest.mark.slow

STEPS, SAVE_INTERVAL, KILLED_AT = 40, 10, 15
MORE = "recovery: {backoff_seconds: 0}\nresources: {peak_tflops: 0.1}\n"


@pytest.fixture(scope="module")
def store(workspace):
    """Two pipeline stages: the first prints `Step Time`, the last the rest. Killed between two checkpoints."""
    runs = {"pp2": "{resources.gpus_per_node: 2, parallel.pp: 2}"}
    config = workspace.experiment("watched", runs, STEPS, SAVE_INTERVAL, MORE)
    process = workspace.start("metrics", "--configfile", config)
    os.kill(workspace.wait_for_step("watched", "pp2", KILLED_AT)[1], signal.SIGKILL)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    return workspace.store("watched", "pp2")


def metrics(workspace, name):
    return workspace.json("watched", "runs", "pp2", "metrics", name)


def attempts(store):
    return sorted((store / "attempts").glob("[0-9]*"))


def written(attempt):
    return {event["step"]: event for event in read_jsonl(attempt / "steps.jsonl") if event["event"] == "step"}


def test_the_console_agrees_with_the_json_lines(workspace, store):
    console = LogSummary()
    for attempt in attempts(store):
        for rank in (0, 1):
            with (attempt / f"rank-{rank}.log").open("rb") as stream:
                console.read(read_events(stream, console.count), str(rank))
    printed = console.curve.steps()
    assert len(attempts(store)) == 2
    for number, attempt in enumerate(attempts(store), 1):
        own = printed[printed["attempt"] == number].set_index("step")
        events = written(attempt)
        # The one that was killed may have written a step down that it didn't come to print.
        assert set(own.index) <= set(events) and len(events) - len(own) <= 1
        for step, row in own.iterrows():
            assert row["loss"] == pytest.approx(events[step]["loss"], rel=1e-6)
            assert row["grad_norm"] == pytest.approx(events[step]["grad_norm"], abs=5.1e-4)
            assert row["batch"] * 64 == events[step]["tokens"]
            # The console's time is from log line to log line, ours without saves and evaluations between.
            assert row["seconds"] > 0.99 * events[step]["seconds"] - 1e-3
            if step - 1 in own.index:  # the console prints the learning rate of the step that comes
                assert own.loc[step - 1, "lr"] == pytest.approx(events[step]["lr"], rel=1e-5)
    summary, ours = plain(console.summarize()), metrics(workspace, "summary.json")
    assert (summary["attempts"], summary["steps"]["printed"]) == (2, STEPS)
    assert abs(summary["steps"]["replayed"] - ours["lost_steps"]) <= 1 and ours["lost_steps"] > 0
    for name in ("first", "last", "min"):
        assert summary["loss"][name] == pytest.approx(ours["loss"][name], rel=1e-6)
    assert summary["loss"]["min_step"] == ours["loss"]["min_step"]
    assert summary["steps"]["total"] == STEPS and summary["nan_iterations"] == ours["nan_steps"] == 0


def test_the_event_files_agree_too(store):
    files = LogSummary()
    for attempt in attempts(store):
        for file in event_files(attempt):
            files.read(read_event_file(file))
    table = files.curve.steps()
    final = table[~table["replayed"]].set_index("step")
    events = {step: event for attempt in attempts(store) for step, event in written(attempt).items()}
    # The writer of the attempt that was killed had not flushed its last steps.
    assert set(final.index) <= set(events) and STEPS in final.index
    for step, row in final.iterrows():
        assert row["loss"] == pytest.approx(events[step]["loss"], rel=1e-6)


def test_read_log_on_both_ranks(workspace, store):
    logs = [str(path) for path in sorted((store / "attempts").glob("*/rank-*.log"))]
    said = workspace.megaboa("read-log", *logs)
    assert '"replayed"' in said and '"ranks": [\n  "0",\n  "1"\n ]' in said


def test_every_second_of_the_run_is_accounted_for(workspace, store):
    found = metrics(workspace, "goodput.json")
    ledger = read_jsonl(store / "attempts.jsonl")
    wall = max(entry["time"] for entry in ledger) - min(entry["time"] for entry in ledger)
    assert found["wall_seconds"] == pytest.approx(wall, rel=0.01)
    assert sum(found["seconds"].values()) == pytest.approx(wall, rel=0.01)
    seconds = found["seconds"]
    assert all(seconds[kind] > 0 for kind in ("startup", "productive", "checkpoint", "lost", "idle"))
    assert seconds["queue"] == seconds["away"] == 0 and 0 < found["goodput"] < 1
    first, second = attempts(store)
    undone = sum(event["seconds"] for step, event in written(first).items() if step in written(second))
    assert seconds["lost"] == pytest.approx(undone, rel=0.01)
    phases = found["attempts"][0]["phases"]
    order = ("started", "imported", "configured", "connected", "model", "built", "train_start")
    reached = [phases[name] for name in order]
    assert reached == sorted(reached) and reached[0] > 0
    for attempt in found["attempts"]:
        parts = attempt["startup"]
        assert {"environment", "checkpoint", "launch", "import", "load", "data", "first_step"} <= parts.keys()
        inside = attempt["phases"]["train_start"] + parts["first_step"] + parts["environment"] + parts["checkpoint"]
        assert sum(parts.values()) == pytest.approx(inside, abs=0.1)


def test_the_run_has_its_tflops_and_its_mfu(workspace, store):
    summary = metrics(workspace, "summary.json")
    tflops = summary["tflops_per_rank"]["median"]
    assert summary["mfu"] == {
        "median": pytest.approx(tflops / 0.1),
        "peak_tflops": 0.1,
        "peak_from": "resources.peak_tflops",
        "gpu": None,
    }
    # Bridge's own count of the same step, from its line `Step Time`, is of all between two lines.
    assert 0 < tflops < 1 and summary["state"] == "PASS" and summary["reasons"] == []
