"""Attempts, steps that were done again, and ranks that say the same."""

import pytest
from log_texts import START, step_line, summary_of

from megaboa.observe.logs.log_summary import Curve


def steps_of(*texts):
    summary = summary_of(*texts)
    return summary["attempts"], summary["steps"]["printed"], summary["steps"]["replayed"], summary["steps"]["copies"]


def run(first, last, **values):
    return "".join(step_line(step, **values) for step in range(first, last + 1))


def test_one_attempt():
    assert steps_of(START + run(1, 20)) == (1, 20, 0, 0)


def test_steps_that_were_done_again_are_counted_once():
    summary = summary_of(START + run(1, 13, loss=9.0, seconds=5.0) + START + run(11, 20, loss=7.0, seconds=0.5))
    assert (summary["attempts"], summary["steps"]["printed"], summary["steps"]["replayed"]) == (2, 20, 3)
    assert summary["loss"]["last"] == 7.0
    # Of both attempts the first three steps don't count.
    assert summary["step_seconds"]["n"] == 7 + 7


def test_a_log_from_which_all_but_the_steps_was_filtered():
    assert steps_of(run(1, 13) + run(11, 20)) == (2, 20, 3, 0)


def test_an_attempt_that_goes_on_where_the_last_one_ended():
    assert steps_of(START + run(1, 10) + START + run(11, 20)) == (2, 20, 0, 0)


def test_the_last_step_done_again_is_replayed_where_a_start_says_so():
    assert steps_of(START + run(1, 10) + START + run(10, 12)) == (2, 12, 1, 0)


def test_steps_printed_every_tenth_time_are_undone_too():
    printed = "".join(step_line(step) for step in (10, 20, 30))
    again = "".join(step_line(step) for step in (15, 25, 35))
    assert steps_of(printed + again) == (2, 4, 2, 0)


def test_attempts_in_files_of_their_own():
    assert steps_of(START + run(1, 10), START + run(6, 20)) == (2, 20, 5, 0)


@pytest.mark.parametrize("label", ["[rank{}]:", "{}: ", ""])
def test_every_rank_prints_its_own_line(label):
    """As torchtitan does, in the order in which they come."""
    text = ""
    for rank in range(4):
        text += label.format(rank) + "[titan] Training starts at step 1\n"
    for step in range(1, 11):
        for rank in (2, 0, 3, 1) if step % 2 else (1, 2, 3, 0):
            line = f"step: {step:2}  loss: {9 - step / 10:8.5f}  memory: {rank + 1}.50GiB(1.00%)  tps: 10  mfu: 5.00%"
            text += label.format(rank) + f"[titan] 2026-02-24 19:46:17,508 - root - INFO - {line}\n"
    summary = summary_of(text)
    assert (summary["attempts"], summary["steps"]["printed"], summary["steps"]["copies"]) == (1, 10, 30)
    assert (summary["loss"]["first"], summary["loss"]["last"]) == (8.9, 8.0)
    assert summary["steps"]["replayed"] == 0


def test_after_a_restart_another_rank_may_be_the_last():
    first = "".join("7: " + step_line(step) for step in range(1, 11))
    second = "".join("3: " + step_line(step) for step in range(6, 21))
    text = f"0: {START}{first}0: {START}{second}"
    assert steps_of(text) == (2, 20, 5, 0)


def test_a_log_without_steps():
    curve = Curve()
    assert curve.steps().empty and curve.speeds().empty and curve.dialects == []
    assert summary_of("nothing\n")["steps"] is None
