import time

import pytest
from fake_runs import START, end_event, start_event

from megaboa.causes import CAUSES
from megaboa.files import read_jsonl
from megaboa.records import (
    LEDGER,
    AttemptEnd,
    AttemptStart,
    Called,
    Distrusted,
    Left,
    Unhealthy,
    events,
)
from megaboa.run import ledger
from megaboa.store_paths import RunStore


def test_attempts_are_numbered_and_a_killed_one_counts(tmp_path):
    path = tmp_path / "attempts.jsonl"
    assert ledger.next_attempt(RunStore(tmp_path)) == 1
    ledger.append(path, AttemptStart(attempt=1, world_size=2, pid=811))
    assert ledger.next_attempt(RunStore(tmp_path)) == 2  # whether or not it has ended
    end = AttemptEnd(attempt=1, outcome="failed", iteration=10, detail="rank 1 was killed by SIGKILL")
    ledger.append(path, end)
    ledger.append(path, AttemptStart(attempt=2, resumed_from=10, world_size=2))
    start, end, again = read_jsonl(path)
    assert start["event"] == "start" and start["pid"] == 811 and start["world_size"] == 2
    assert end["outcome"] == "failed" and end["iteration"] == 10 and end["detail"].startswith("rank 1")
    assert again["resumed_from"] == 10 and again["time"] >= start["time"]


def test_a_start_names_its_job_its_nodes_and_what_it_leaves_out(tmp_path):
    path = tmp_path / "attempts.jsonl"
    lives = {"job": "17", "restarts": 2, "nodes": ("n1", "n2")}
    ledger.append(path, AttemptStart(attempt=1, world_size=4, **lives, skipped=((40, 45),)))
    (start,) = read_jsonl(path)
    assert (start["job"], start["restarts"], start["nodes"]) == ("17", 2, ["n1", "n2"])
    assert start["skipped"] == [[40, 45]] and start["image"] is None


def test_an_end_names_its_cause_and_what_is_done(tmp_path):
    path = tmp_path / "attempts.jsonl"
    more = {"cause": "gpu_failure", "action": "requeue", "bad_nodes": ["n2"], "first_step": 11, "last_step": 17}
    ledger.append(
        path, AttemptEnd(attempt=1, outcome="failed", iteration=10, detail="gpu failure: ECC", rank=3, **more)
    )
    (end,) = read_jsonl(path)
    assert {name: end[name] for name in more} == more and end["rank"] == 3


def test_what_happens_between_attempts_has_no_number(tmp_path):
    path = tmp_path / "attempts.jsonl"
    ledger.append(path, AttemptStart(attempt=4))
    ledger.append(path, Distrusted(iteration=20, detail="changed"))
    assert ledger.next_attempt(RunStore(tmp_path)) == 5
    assert read_jsonl(path)[1]["event"] == "distrust" and read_jsonl(path)[1]["time"] <= time.time()


def test_a_ledger_that_has_lost_lines_takes_no_folders_number_again(tmp_path):
    store = RunStore(tmp_path)
    for number in (1, 2, 11):
        store.attempt(number).path.mkdir(parents=True)
    assert ledger.next_attempt(store) == 12
    ledger.append(store.ledger, AttemptStart(attempt=1))
    assert ledger.next_attempt(store) == 12
    ledger.append(store.ledger, AttemptStart(attempt=14))
    assert ledger.next_attempt(store) == 15


# Pure functions of the entries

CALL = Called()


def start(attempt, resumed_from=0):
    return AttemptStart(attempt=attempt, resumed_from=resumed_from, time=0.0)


def end(cause="crash", iteration=0, last_step=None, attempt=1, outcome="failed", **more):
    given = {"cause": cause, "outcome": outcome, "iteration": iteration, "last_step": last_step, "time": 0.0, **more}
    return AttemptEnd(attempt=attempt, **given)


def test_an_attempt_is_open_until_its_end_is_written():
    assert ledger.open_attempt([]) is None
    assert ledger.open_attempt([CALL, start(1)]) == start(1)
    assert ledger.open_attempt([start(1), end(attempt=1)]) is None
    assert ledger.open_attempt([start(1), end(attempt=1), CALL, start(2, 10)]) == start(2, 10)


@pytest.mark.parametrize(
    ("entries", "count"),
    [
        ([], 0),
        ([CALL], 0),
        ([end()], 1),
        ([end(), end("killed"), end("hang")], 3),
        ([end(), end(iteration=10)], 1),  # progress: this failure is the first since
        ([end(), end(iteration=10), end(iteration=10)], 2),
        ([end(iteration=10), end(iteration=10), end(iteration=20)], 1),
        ([end(iteration=20), end(iteration=10)], 2),  # an older checkpoint is no progress
        ([end(), end(), CALL], 0),
        ([end(), end(), CALL, end()], 1),
        ([end(), end("node_failure"), end("preempted"), end("time_limit"), end("requeued"), end("lost"), end()], 2),
        ([end(), end("node_failure", iteration=10)], 0),  # nobody's failure, but progress
        ([end(), end("stopped", outcome="interrupted")], 1),
        ([end("gpu_failure")], 1),
        ([end(), Distrusted(iteration=10), end()], 2),
    ],
)
def test_failures_in_a_row(entries, count):
    assert ledger.failures_in_a_row(entries) == count


@pytest.mark.parametrize(
    ("entries", "step"),
    [
        ([], None),
        ([start(1), end(last_step=17)], None),
        ([start(1), end(last_step=17), start(2), end(last_step=17, attempt=2)], 18),
        ([start(1), end("crash", last_step=17), start(2), end("hang", last_step=17, attempt=2)], 18),
        ([start(1), end(last_step=17), start(2), end(last_step=18, attempt=2)], None),
        ([start(1), end(last_step=17), CALL, start(2), end(last_step=17, attempt=2)], None),
        ([start(1), end(last_step=17), start(2), end("transient", last_step=17, attempt=2)], None),
        ([start(1), end("out_of_memory", last_step=17), start(2), end(last_step=17, attempt=2)], None),
        # free ends lie between
        (
            [start(1), end(last_step=17), start(2), end("preempted", 0, 9, 2), start(3), end(last_step=17, attempt=3)],
            18,
        ),
        # at the first step after a checkpoint no step is done at the second time
        ([start(1), end(last_step=10), start(2, 10), end(last_step=None, attempt=2)], 11),
        ([start(1), end(last_step=12), start(2, 10), end(last_step=None, attempt=2)], None),
        # before any step it is no step's fault
        ([start(1), end(), start(2), end(attempt=2)], None),
        ([start(1, 10), end(), start(2, 10), end(attempt=2)], None),
        ([start(1), end(last_step=10), start(2), end(attempt=2)], None),
    ],
)
def test_the_step_that_fails_again(entries, step):
    assert ledger.fails_again_at(entries) == step


def test_a_node_on_which_ranks_froze_once_is_not_avoided_and_twice_is():
    entries = [end("hang", bad_nodes=["n2"], time=1000.0), end("hang", bad_nodes=["n2", "n3"], time=2000.0)]
    assert ledger.avoided_nodes(entries[:1], now=3000.0, hours=1) == {}
    assert ledger.avoided_nodes(entries, now=3000.0, hours=1) == {"n2": 2000.0}
    dead = end("node_failure", bad_nodes=["n2"], time=2500.0)
    assert ledger.avoided_nodes([entries[0], dead], now=3000.0, hours=1) == {"n2": 2500.0}


def test_two_hangs_at_one_step_on_one_node_are_not_the_steps_fault():
    hangs = [end("hang", last_step=17, attempt=number, bad_nodes=["n2"]) for number in (1, 2)]
    assert ledger.fails_again_at([start(1), hangs[0], start(2), hangs[1]]) is None
    assert ledger.fails_again_at([start(1), hangs[0], start(2), end("hang", last_step=17, attempt=2)]) == 18


def test_nodes_that_failed_are_avoided_for_some_hours():
    entries = [
        start(1),
        end("node_failure", bad_nodes=["n2"], time=1000.0),
        end("gpu_failure", bad_nodes=["n3", "n4"], time=3000.0),
        end("crash", bad_nodes=["n5"], time=3000.0),
        end("node_failure", time=3000.0),
        CALL,
    ]
    assert ledger.avoided_nodes(entries, now=3600.0, hours=1) == {"n2": 1000.0, "n3": 3000.0, "n4": 3000.0}
    assert ledger.avoided_nodes(entries, now=4600.0, hours=1) == {"n3": 3000.0, "n4": 3000.0}
    assert ledger.avoided_nodes(entries, now=3600.0, hours=0) == {}


# Read for people


def call_event(job=None, time=START):
    return {"event": "call", "job": job, "time": time}


NODE_FAILURE = {"outcome": "failed", "cause": "node_failure", "action": "requeue", "bad_nodes": ["n2"], "detail": "n2"}
START_AGAIN = {"resumed_from": 40, "host": "n1"}
TIME_LIMIT = {"outcome": "interrupted", "cause": "time_limit", "action": "requeue", "detail": "290 s are left"}


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([call_event()], "called"),
        ([call_event(), start_event(1)], "started"),
        ([call_event(), start_event(1, resumed_from=40, parent="old/base@40")], "continues from old/base@40"),
        ([start_event(1), end_event(1, 40, **NODE_FAILURE)], "queued again: node failure of n2"),
        (
            [start_event(1), end_event(1, 40, **NODE_FAILURE), start_event(2, **START_AGAIN)],
            "resumed from 40 after node failure of n2",
        ),
        ([start_event(1), end_event(1, 40, **TIME_LIMIT)], "queued again: time limit"),
        ([start_event(1), start_event(2)], "started from the beginning after loss of the supervisor"),
        (
            [start_event(1), end_event(1, 40, **TIME_LIMIT), call_event(), start_event(2, **START_AGAIN)],
            "resumed from 40 by a new call",
        ),
        (
            [
                start_event(1),
                end_event(1, 60, outcome="failed", cause="loss_spike", action="resume", detail="loss spike: 41 to 44"),
                {"event": "skip", "steps": [41, 44], "time": START},
                {"event": "distrust", "iteration": 60, "time": START},
                start_event(2, **START_AGAIN),
            ],
            "resumed from 40 after loss spike; steps 41 to 44 are left out; checkpoint 60 was set aside",
        ),
        (
            [
                end_event(
                    1, 40, outcome="failed", cause="poisoned", action="stop", detail="poisoned: step 41 failed twice"
                )
            ],
            "stopped: poisoned: step 41 failed twice",
        ),
        (
            [end_event(1, 40, outcome="failed", cause="killed", action="resume", detail="killed: rank 3 on n2")],
            "starts again: killed: rank 3 on n2",
        ),
        ([end_event(1, 40, outcome="failed", detail="exit code 1")], "stopped: exit code 1"),
        *(
            ([end_event(1, 40, outcome="interrupted", cause=cause, action="stop", detail=f"{cause}: {why}")], said)
            for cause, why, said in (
                ("cancelled", "Ctrl-C (SIGINT)", "stopped: Ctrl-C (SIGINT)"),
                ("stopped", "by `megaboa stop`", "stopped: by `megaboa stop`"),
            )
        ),
        ([end_event(1, 40)], "finished"),
        ([{"event": "unhealthy", "detail": "n2: no GPU", "time": START}], "unhealthy: n2: no GPU"),
        ([start_event(1), {"event": "of the future", "time": START}], "started"),
    ],
)
def test_the_last_event_in_words(entries, text):
    assert ledger.last_event(events(LEDGER, entries)) == (text, entries[-1]["time"])


def test_nothing_has_happened_in_an_empty_ledger():
    assert ledger.last_event([]) is None


def test_every_cause_has_a_noun():
    assert all(end.noun for end in CAUSES.values())


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        (["n1"], "n1"),
        (["n3", "n1", "n2", "n7"], "n[1-3,7]"),
        (["n9", "n10"], "n[9-10]"),
        (["gpu-008", "gpu-009", "gpu-010", "login"], "login,gpu-[008-010]"),
        (["n[1-2]"], "n[1-2]"),
        ([], ""),
    ],
)
def test_nodes_are_written_as_slurm_writes_them(nodes, text):
    assert ledger.brief(nodes) == text


def test_nodes_that_the_health_check_refuses_use_up_the_budget():
    refused = Unhealthy(bad_nodes=("n1",))
    assert ledger.failures_in_a_row([refused] * 3) == 3
    assert ledger.failures_in_a_row([refused, refused, Called(), refused]) == 1


def test_nodes_left_are_counted_since_the_last_start():
    left = Left(nodes=("n1",))
    assert ledger.left_in_a_row([left, left]) == 2
    assert ledger.left_in_a_row([left, left, AttemptStart(attempt=1, world_size=2), left]) == 1
