"""A run in numbers, and the gates that make it INVALID."""

import json
import math

import made
import pytest
from fake_runs import START, start_event, step_event

from megaboa import records
from megaboa.observe.steps import step_rows
from megaboa.observe.summary import summarize
from megaboa.records import LEDGER, STEPS, Evaluated, Load, Parent, plain


def events_of(steps, attempt=1, **values):
    return records.events(STEPS, ({**step_event(step, START + step, **values), "attempt": attempt} for step in steps))


def summary_of(events, train_iters, world_size=1, attempts=None):
    train = made.trained(train_iters=train_iters, world_size=world_size)
    starts = records.events(LEDGER, attempts or [start_event(1, world_size=world_size)])
    return plain(summarize("dp1", train, starts, events, step_rows(events)))


def test_the_numbers_are_exact():
    events = []
    for step in range(1, 24):
        # Three slow steps, then 20 of 10, 20, ..., 200 ms.
        seconds = 5.0 if step <= 3 else (step - 3) / 100
        events += events_of([step], seconds=seconds, loss=10.0 - step / 4, tokens=1000, grad_norm=float(step))
    summary = summary_of(events, train_iters=23, world_size=2)
    assert summary["state"] == "PASS"
    assert summary["reasons"] == []
    assert (summary["steps"], summary["tokens"], summary["warmup_steps_dropped"]) == (23, 23_000, 3)
    assert summary["step_seconds"] == {
        "median": pytest.approx(0.105),
        "p5": pytest.approx(0.0195),
        "p95": pytest.approx(0.1905),
        "n": 20,
    }
    assert summary["window"] == [4, 23]
    assert summary["tokens_per_second"]["median"] == pytest.approx((1000 / 0.10 + 1000 / 0.11) / 2)
    assert summary["tokens_per_second_per_rank"] == summary["tokens_per_second"]["median"] / 2
    assert summary["loss"] == {
        "first": 9.75,
        "last": 4.25,
        "min": 4.25,
        "min_step": 23,
        "tail_mean": 4.5,
        "tail_steps": 3,
    }
    assert summary["grad_norm"] == {"last": 23.0, "max": 23.0}


def test_a_run_with_a_parent_has_the_steps_after_it():
    parent = Parent(experiment="old", run="base", iteration=10, load=Load(optimizer=True, rng=True))
    train = made.trained(train_iters=20, parent=parent)
    starts = records.events(LEDGER, [start_event(1, resumed_from=10, parent="old/base@10")])
    events = events_of(range(11, 21))
    summary = plain(summarize("dp1", train, starts, events, step_rows(events)))
    assert (summary["state"], summary["steps"], summary["parent"]["run"]) == ("PASS", 10, "base")
    summary = plain(summarize("dp1", train, starts, events[1:], step_rows(events[1:])))
    assert summary["reasons"] == ["9 of 10 steps recorded; missing: step 11"]


def test_steps_that_were_done_again_are_counted_once_and_told():
    events = events_of(range(1, 14), seconds=9.0, loss=99.0) + events_of(range(11, 21), attempt=2, seconds=0.5)
    summary = summary_of(events, 20, attempts=[start_event(1), start_event(2, resumed_from=10)])
    assert (summary["attempts"], summary["lost_steps"], summary["steps"]) == (2, 3, 20)
    assert summary["tokens"] == 20 * 1024
    # Every attempt has its own slow first steps.
    assert summary["warmup_steps_dropped"] == 6
    assert summary["step_seconds"]["n"] == 14


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_loss_that_is_no_number_makes_the_run_invalid(value):
    events = events_of([1, 2, 3]) + events_of([4], loss=value)
    summary = summary_of(events, 4)
    assert summary["state"] == "INVALID"
    assert summary["reasons"] == ["no finite loss at step 4"]
    assert summary["loss"]["last"] is None
    assert summary["loss"]["tail_mean"] is None
    json.dumps(summary, allow_nan=False)
    assert summary["not_finite"] == ({} if value is None else {"loss.last": str(value), "loss.tail_mean": str(value)})


def test_a_step_that_loss_scaling_skipped_is_no_error():
    summary = summary_of(events_of([1], loss=math.inf, skipped=True) + events_of([2, 3]), 3)
    assert (summary["state"], summary["skipped_steps"]) == ("PASS", 1)


def test_too_few_steps_make_the_run_invalid():
    summary = summary_of(events_of([1, 2, 4]), 20)
    assert summary["state"] == "INVALID"
    assert summary["reasons"] == ["3 of 20 steps recorded; missing: steps 3, 5, 6, 7, 8 and 12 more"]


def test_a_run_without_any_step_is_invalid_and_has_no_numbers():
    summary = summary_of([], 2)
    assert summary["state"] == "INVALID"
    assert summary["loss"] is summary["step_seconds"] is summary["tokens_per_second"] is None


def test_another_number_of_ranks_makes_the_run_invalid():
    summary = summary_of(events_of([1]), 1, world_size=4, attempts=[start_event(1, world_size=2)])
    assert summary["reasons"] == ["ran with 2 ranks instead of 4"]


def test_of_an_evaluation_that_was_repeated_the_last_counts():
    evaluations = [
        Evaluated(step=step, time=START, losses={"lm loss": loss}, attempt=1)
        for step, loss in [(20, 4.0), (10, 5.0), (20, 3.5)]
    ]
    summary = summary_of([*events_of([1]), *evaluations], 1)
    assert summary["validation"] == [{"step": 10, "losses": {"lm loss": 5.0}}, {"step": 20, "losses": {"lm loss": 3.5}}]
