"""megaboa.run.recovery: what is done after every cause."""

from dataclasses import replace
from typing import get_args

import pytest

from megaboa import records
from megaboa.causes import ACTIONS, CAUSES, FREE, NODE_CAUSES, REPEATABLE, Cause
from megaboa.config.models.resources import Recovery
from megaboa.records import AttemptEnd, AttemptStart, Called, LeftOut, LossSpike, parse
from megaboa.run.ledger import links_without_save
from megaboa.run.recovery import LONGEST_PAUSE, MARGIN_SECONDS, Decision, decide, lead_seconds

DEFAULT_ACTIONS = {cause: end.action for cause, end in CAUSES.items()}
SPIKES = LossSpike(factor=2.0, window=50, patience=5, limit=3)
SETTINGS = replace(parse(records.Recovery, Recovery().model_dump(mode="json"), "a test"), loss_spike=SPIKES)


def end(cause="crash", iteration=0, last_step=None):
    return AttemptEnd(attempt=1, cause=cause, outcome="failed", iteration=iteration, last_step=last_step, time=0.0)


def after(cause, before=(), can_requeue=True, last_step=None, **settings):
    return decide([*before, end(cause, last_step=last_step)], cause, replace(SETTINGS, **settings), can_requeue)


def test_every_cause_has_a_default():
    assert set(DEFAULT_ACTIONS) == set(get_args(Cause)) and set(DEFAULT_ACTIONS.values()) <= set(ACTIONS)
    assert set(DEFAULT_ACTIONS) >= FREE | REPEATABLE | NODE_CAUSES


@pytest.mark.parametrize(("cause", "action"), DEFAULT_ACTIONS.items())
def test_the_default_action(cause, action):
    decision = after(cause)
    assert decision.action == action and not decision.poisoned
    assert cause.replace("_", " ") in decision.why


@pytest.mark.parametrize("cause", DEFAULT_ACTIONS)
@pytest.mark.parametrize("action", ACTIONS)
def test_the_settings_can_say_otherwise(cause, action):
    assert after(cause, actions={cause: action}).action == action
    other = "crash" if cause != "crash" else "hang"
    assert after(cause, actions={other: action}).action == DEFAULT_ACTIONS[cause]


@pytest.mark.parametrize("cause", sorted(cause for cause, action in DEFAULT_ACTIONS.items() if action == "requeue"))
def test_where_a_job_cannot_be_requeued_the_run_stops_and_says_so(cause):
    decision = after(cause, can_requeue=False)
    assert decision.action == "stop" and "call again" in decision.why


def test_the_budget_is_used_up_by_failures_in_a_row():
    assert after("transient", [end("transient")] * 4).action == "resume"
    decision = after("transient", [end("transient")] * 5)
    assert (
        decision.action == "stop" and "6 failures in a row" in decision.why and "recovery.budget is 5" in decision.why
    )
    assert after("gpu_failure", [end("transient")] * 5).action == "stop"
    assert after("crash", budget=0).action == "stop"


def test_progress_and_a_call_give_a_new_budget():
    assert after("transient", [end("transient")] * 5 + [Called()]).action == "resume"
    entries = [end("transient")] * 5 + [end("transient", iteration=10)]
    assert decide(entries, "transient", SETTINGS, True).action == "resume"


@pytest.mark.parametrize("cause", sorted(FREE - {"time_limit"}))
def test_what_is_nobodys_failure_is_free(cause):
    decision = after(cause, [end(cause)] * 50, budget=0)
    assert decision == Decision(DEFAULT_ACTIONS[cause], cause.replace("_", " "), pause=0.0)


def test_a_chain_goes_on_while_its_jobs_make_progress_and_stops_when_they_do_not():
    going = [end("time_limit", iteration=10 * number) for number in range(1, 40)]
    starts = [AttemptStart(attempt=1)]
    assert decide([*starts, *going], "time_limit", SETTINGS, True).action == "requeue"
    idle = [AttemptStart(attempt=1, resumed_from=390), *[end("time_limit", iteration=390)] * 3]
    decision = decide(idle, "time_limit", SETTINGS, True)
    assert decision.action == "stop" and "resources.runtime" in decision.why
    assert decide(idle[:-1], "time_limit", SETTINGS, True).action == "requeue"


def test_the_pause_doubles_and_is_bounded():
    pauses = [after("transient", [end("transient")] * count, budget=99).pause for count in range(9)]
    assert pauses == [0, 20, 40, 80, 160, 320, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    assert after("transient", [end("transient")] * 3000, budget=9999).pause == LONGEST_PAUSE
    assert after("transient", [end("transient")] * 3, backoff_seconds=0).pause == 0


def test_nobody_waits_before_leaving():
    assert after("gpu_failure", [end("transient")] * 2).pause == 0
    assert after("nan").pause == 0


def failed_twice(cause):
    started = [AttemptStart(attempt=1)]
    return [*started, end(cause, last_step=17)]


@pytest.mark.parametrize("cause", sorted(REPEATABLE))
def test_the_same_step_failing_twice_is_no_accident(cause):
    decision = after(cause, failed_twice("crash"), last_step=17)
    assert decision.action == "stop" and decision.poisoned and "step 18 failed twice" in decision.why
    assert not after(cause, failed_twice("crash"), last_step=18).poisoned


def test_who_asks_for_it_tries_the_same_step_again():
    decision = after("crash", failed_twice("crash"), last_step=17, actions={"crash": "resume"})
    assert decision.action == "resume" and not decision.poisoned


def test_a_poisoned_step_has_an_action_of_its_own():
    assert after("crash", failed_twice("crash"), last_step=17, actions={"poisoned": "requeue"}).action == "requeue"
    decision = after("crash", failed_twice("crash"), last_step=17, actions={"poisoned": "resume"})
    assert decision.action == "resume" and not decision.poisoned


def test_what_comes_later_for_another_cause_is_not_poisoned():
    twice = [*failed_twice("crash"), end("crash", last_step=17)]
    assert after("node_failure", twice, actions={"crash": "resume"}).action == "requeue"
    assert after("transient", twice, actions={"crash": "resume"}).action == "resume"


def test_lost_connections_at_the_same_step_are_an_accident():
    assert after("transient", failed_twice("transient"), last_step=17).action == "resume"


def test_so_many_loss_spikes_are_left_out_and_no_more():
    skip = LeftOut(steps=(40, 45))
    assert after("loss_spike", [skip] * 2).action == "resume"
    decision = after("loss_spike", [skip] * 3)
    assert decision.action == "stop" and "recovery.loss_spike.limit" in decision.why
    assert after("crash", [skip] * 3).action == "resume"


@pytest.mark.parametrize(
    ("save", "step", "wall_time", "lead"),
    [
        (None, None, 4 * 3600, 300),  # a tenth of the wall time, at most five minutes
        (None, 1.0, 1200, 120),
        (None, None, 120, MARGIN_SECONDS),
        (None, None, 40, 20),  # at most half of the wall time
        (60, 2.0, 4 * 3600, 90 + 4 + MARGIN_SECONDS),
        (60, None, 4 * 3600, 90 + MARGIN_SECONDS),
        (0.0, 0.0, 4 * 3600, MARGIN_SECONDS),
        (5000, 1.0, 3600, 1800),
    ],
)
def test_ranks_are_asked_to_save_early_enough(save, step, wall_time, lead):
    assert lead_seconds(save, step, wall_time) == lead


def test_in_the_background_an_earlier_save_may_have_to_end_first():
    assert lead_seconds(100.0, 1.0, 14_400.0, background=True) - lead_seconds(100.0, 1.0, 14_400.0) == 100.0


@pytest.mark.parametrize(("unsaved", "lead"), [(0, 300.0), (1, 600.0), (2, 1200.0), (20, 7200.0), (10_000, 7200.0)])
def test_a_link_that_ended_without_its_save_doubles_the_lead(unsaved, lead):
    assert lead_seconds(None, None, 14_400.0, unsaved=unsaved) == lead


def test_the_user_knows_better_than_what_was_measured():
    assert lead_seconds(100.0, 1.0, 14_400.0, asked=900.0) == 900.0
    assert lead_seconds(None, None, 14_400.0, asked=900.0, unsaved=1) == 1800.0
    assert lead_seconds(None, None, 1000.0, asked=900.0) == 500.0


@pytest.mark.parametrize(
    ("ends", "count"),
    [
        ([], 0),
        ([end("time_limit", iteration=20, last_step=20)], 0),
        ([end("time_limit", iteration=10, last_step=20)], 1),
        ([end("time_limit", iteration=10, last_step=20), end("node_failure", 10, 15), end("time_limit", 20, 30)], 2),
        ([end("time_limit", iteration=10, last_step=20), end("time_limit", iteration=30, last_step=30)], 0),
        ([end("time_limit")], 0),  # it had not come to a step
    ],
)
def test_links_without_the_save_of_their_last_step(ends, count):
    assert links_without_save(ends) == count


def test_a_spare_of_the_job_saves_the_queue():
    settings = replace(SETTINGS, actions={})
    for cause in {*NODE_CAUSES, "hang"}:
        decision = decide([end(cause)] * 3, cause, settings, True, replaceable=True)
        assert (decision.action, decision.pause) == ("resume", 0.0)
        assert decide([end(cause)] * 3, cause, settings, False, replaceable=True).action == "resume"
    assert decide([end("gpu_failure")] * 7, "gpu_failure", settings, True, replaceable=True).action == "stop"
