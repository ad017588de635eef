"""Where a run's time went: every second once, and under the right name."""

from dataclasses import replace
from pathlib import Path

import pytest
from fake_runs import end_event, start_event, step_event
from hypothesis import given, settings
from hypothesis import strategies as st

from megaboa import records
from megaboa.files import read_json
from megaboa.observe.goodput import KINDS, STARTUP, goodput, startup
from megaboa.observe.steps import step_rows
from megaboa.records import LEDGER, STEPS, Called
from megaboa.scheduler.answers import Life


def call(time, job=None):
    return {"event": "call", "time": time, "job": job, "restarts": 0}


def steps(attempt, first, last, begin, seconds=1.0, gap=0.0):
    """Steps one after the other, with a pause before each."""
    return [
        {**step_event(step, begin + (step - first + 1) * (seconds + gap), seconds=seconds), "attempt": attempt}
        for step in range(first, last + 1)
    ]


def event(kind, attempt, time, **values):
    return {"event": kind, "attempt": attempt, "time": time, "step": 0, **values}


def ledger_of(entries, events, lives=None):
    events = records.events(STEPS, events)
    found = goodput(records.events(LEDGER, entries), events, step_rows(events), lives)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_seconds)
    return found


def seconds_of(*arguments):
    return {kind: round(value, 6) for kind, value in ledger_of(*arguments).seconds.items() if value}


def test_one_attempt():
    events = [
        event("phase", 1, 1010.0, phase="configured"),
        event("phase", 1, 1030.0, phase="built"),
        event("train_start", 1, 1040.0),
        *steps(1, 1, 1, 1040.0, seconds=11.0),  # ten seconds more than the others
        *steps(1, 2, 20, 1051.0, gap=0.25),
        event("eval", 1, 1080.0, seconds=5.0, losses={}),
        event("save", 1, 1087.0, seconds=7.0),
        event("end", 1, 1088.0),
    ]
    found = ledger_of([call(1000.0), start_event(1, 1001.0), end_event(1, 20, 1090.0)], events)
    assert {kind: value for kind, value in found.seconds.items() if value} == {
        "startup": 40.0,
        "compile": 10.0,
        "productive": 20.0,
        "evaluation": 5.0,
        "checkpoint": 7.0,
        "idle": pytest.approx(19 * 0.25 + (1080 - 5 - 1074.75) + 1 + 2),
    }
    assert (found.wall_seconds, found.goodput) == (90.0, pytest.approx(20 / 90))
    assert found.attempts[0].phases == {"configured": 9.0, "built": 29.0, "train_start": 39.0}


def test_rank_hours_of_files_of_earlier_versions_are_kept_and_no_longer_written():
    path = Path(__file__).parents[1] / "fixtures/version-0/results/tiny/runs/dp2/metrics/goodput.json"
    older = records.read(records.Goodput, path)
    assert older.more == {"rank_hours": read_json(path)["rank_hours"]} and older.allocated_seconds > 0
    entries = [start_event(1, 1000.0), end_event(1, 1, 1010.0)]
    now = goodput(records.events(LEDGER, entries), [], [])
    assert records.plain(now).keys() == records.plain(older).keys() - {"rank_hours"}


def test_what_a_later_attempt_did_again_is_lost():
    events = [*steps(1, 1, 13, 1000.0), *steps(2, 11, 20, 1030.0)]
    entries = [
        start_event(1, 1000.0),
        end_event(1, 10, 1020.0, outcome="failed", cause="crash", action="resume"),
        start_event(2, 1030.0, resumed_from=10),
        end_event(2, 20, 1040.0),
    ]
    # Seven seconds until the crash was seen, ten until ranks started again.
    assert seconds_of(entries, events) == {"productive": 20.0, "lost": 3.0, "idle": 17.0}
    attempts = ledger_of(entries, events).attempts
    assert [(one.outcome, one.cause, one.seconds["lost"]) for one in attempts] == [
        ("failed", "crash", 3.0),
        ("completed", None, 0.0),
    ]


def test_a_job_that_was_put_back_waits_in_the_queue():
    events = [*steps(1, 1, 10, 1000.0), *steps(2, 11, 20, 1100.0)]
    entries = [
        start_event(1, 1000.0, job="7"),
        end_event(1, 10, 1010.0, outcome="interrupted", cause="preempted", action="requeue"),
        start_event(2, 1100.0, job="7"),
        end_event(2, 20, 1110.0),
    ]
    found = ledger_of(entries, events)
    assert (found.seconds["queue"], found.accounting, found.goodput) == (90.0, "ledger", 1.0)
    lives = [Life("7", 900.0, 950.0, 1012.0), Life("7", 1012.0, 1080.0, 1111.0)]
    found = ledger_of(entries, events, lives)
    assert found.accounting == "sacct" and found.wall_seconds == 210.0
    assert {kind: value for kind, value in found.seconds.items() if value} == {
        "queue": 50.0 + 68.0,
        "startup": 50.0 + 20.0,
        "productive": 20.0,
        "idle": 2.0,  # until the nodes were taken away
    }
    assert found.allocated_seconds == 92.0


def test_an_end_that_the_jobs_next_life_wrote_is_that_of_the_job():
    """A node died: its supervisor could write nothing."""
    events = [*steps(1, 1, 10, 1000.0), *steps(2, 11, 20, 1100.0)]
    entries = [
        start_event(1, 1000.0, job="7"),
        end_event(1, 10, 1099.0, outcome="failed", cause="node_failure", action="requeue"),
        start_event(2, 1100.0, job="7"),
        end_event(2, 20, 1110.0),
    ]
    lives = [Life("7", 1000.0, 1000.0, 1030.0), Life("7", 1030.0, 1095.0, 1111.0)]
    assert seconds_of(entries, events, lives) == {"productive": 20.0, "idle": 20.0, "queue": 65.0, "startup": 5.0}


def test_the_time_in_which_nobody_asked_for_the_run_is_no_ones_waste():
    events = [*steps(1, 1, 10, 1000.0), *steps(2, 11, 20, 5005.0)]
    entries = [
        start_event(1, 1000.0),
        end_event(1, 10, 1010.0, outcome="interrupted", cause="stopped", action="stop"),
        call(5000.0),
        start_event(2, 5001.0, resumed_from=10),
        end_event(2, 20, 5015.0),
    ]
    found = ledger_of(entries, events)
    assert (found.seconds["away"], found.seconds["startup"]) == (3990.0, 5.0)
    assert found.goodput == pytest.approx(20 / 25)


def test_an_attempt_whose_end_nobody_wrote_ends_with_its_last_event():
    entries = [start_event(1, 1000.0), call(2000.0), start_event(2, 2000.0), end_event(2, 20, 2010.0)]
    events = [*steps(1, 1, 10, 1000.0), *steps(2, 11, 20, 2000.0)]
    assert seconds_of(entries, events) == {"productive": 20.0, "away": 990.0}


def test_files_of_older_attempts_say_less():
    events = [*steps(1, 1, 10, 1000.0), event("eval", 1, 1015.0, losses={}), event("save", 1, 1020.0)]
    entries = [start_event(1, 1000.0), end_event(1, 10, 1020.0)]
    assert seconds_of(entries, events) == {"productive": 10.0, "evaluation": 5.0, "checkpoint": 5.0}


def test_an_attempt_that_never_trained_was_starting():
    assert seconds_of([start_event(1, 1000.0), end_event(1, 0, 1030.0, outcome="failed")], []) == {"startup": 30.0}


def test_no_attempt_has_no_ledger():
    assert goodput([Called(time=1000.0)], [], []) is None


def test_an_event_after_the_jobs_end_takes_no_time():
    """The rank's clock is ahead of the scheduler's."""
    entries, life = [start_event(1, 1000.0)], Life("7", 1000.0, 1000.0, 1006.0)
    assert seconds_of(entries, steps(1, 1, 8, 1000.0), [life]) == {"productive": 6.0}


moments = st.floats(0, 1000, allow_nan=False)


@given(
    st.lists(st.tuples(st.sampled_from(["step", "save", "eval", "phase", "end", "new"]), moments, moments)), st.data()
)
@settings(max_examples=300, deadline=None)
def test_every_second_belongs_to_one_kind(written, data):
    """Also where clocks of two nodes disagree."""
    attempt, entries, events = 1, [start_event(1, 0.0)], []
    for kind, time, length in written:
        if kind == "new":
            attempt += 1
            entries.append(start_event(attempt, time))
        else:
            events.append(event(kind, attempt, time, seconds=length, step=len(events), phase="x", losses={}))
    bounds = data.draw(st.none() | st.lists(st.tuples(moments, moments, moments).map(sorted)))
    lives = bounds and [Life("7", *three) for three in bounds]
    steps = [step_event(1, 0.0) | one for one in events if one["event"] == "step"]
    rows = [replace(row, tokens=1) for row in step_rows(records.events(STEPS, steps))]
    entries = sorted(records.events(LEDGER, entries), key=lambda entry: entry.time)
    found = goodput(entries, records.events(STEPS, events), rows, lives)
    assert set(found.seconds) == set(KINDS) and min(found.seconds.values()) >= 0
    if len(entries) == 1:
        assert sum(found.seconds.values()) == pytest.approx(found.wall_seconds)


def test_the_parts_of_a_start():
    begun = records.AttemptStart(attempt=1, time=1000.0, before={"environment": 0.5, "checkpoint": 2.0})
    told = records.events(
        STEPS,
        [
            event("phase", 1, 980.0, phase="keeper"),
            event("phase", 1, 1001.0, phase="started"),
            event("phase", 1, 1001.5, phase="imported"),
            event("phase", 1, 1002.0, phase="configured"),
            event("phase", 1, 1005.0, phase="connected"),
            event("phase", 1, 1006.0, phase="model"),
            event("phase", 1, 1010.0, phase="built"),
            event("train_start", 1, 1011.0),
            {**step_event(1, 1015.0, seconds=4.0), "attempt": 1},
        ],
    )
    parts = {"environment": 0.5, "checkpoint": 2.0, "keeper": 0.0, "launch": 1.0, "import": 0.5, "configure": 0.5}
    parts |= {"connect": 3.0, "model": 1.0, "load": 4.0, "data": 1.0, "first_step": 4.0}
    assert startup(begun, told) == parts
    assert tuple(parts) == tuple(name for name in STARTUP if name in parts)
    late = [records.Phase(phase="keeper", time=1000.8), *told[1:]]  # it was still importing when ranks were started
    assert startup(begun, late)["keeper"] == pytest.approx(0.8)
    assert startup(begun, late)["launch"] == pytest.approx(0.2)
    assert startup(begun, told[3:]) == {}, "files of older versions tell less"
