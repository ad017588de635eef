import pytest

from megaboa.records import LossSpike, Step
from megaboa.run.oversight import find_spike

SETTINGS = LossSpike(factor=2.0, window=10, patience=3, limit=3)


def steps(losses, first=1):
    return [Step(step=number, loss=loss) for number, loss in enumerate(losses, start=first)]


CALM = [3.0, 3.1, 2.9, 3.0, 3.2, 2.8, 3.0, 3.1, 2.9, 3.0]


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([*CALM, 7.0, 8.0, 9.0], (11, 13)),
        ([*CALM, 7.0, float("inf"), 9.0], (11, 13)),
        ([*CALM, 7.0, 8.0], None),  # not yet
        ([*CALM, 7.0, 3.0, 9.0], None),  # one calm step between
        ([*CALM, 7.0, 8.0, 9.0, 3.0], (11, 13)),  # over before somebody looked
        ([*CALM, 7.0, 8.0, 9.0, 3.0, *CALM, 9.0, 9.0, 9.0], (11, 13)),  # the first of two
        ([*CALM, 7.0, 8.0, 9.0, 9.0], (11, 14)),
        ([*CALM, 6.0, 6.0, 6.0], None),  # twice the median is no spike, more is
        ([*CALM, 6.01, 6.01, 6.01], (11, 13)),
        ([*CALM, 7.0, float("nan"), 9.0], None),  # has a cause of its own
        ([*CALM[1:], 7.0, 8.0, 9.0], None),  # too few steps to compare with
        ([], None),
    ],
)
def test_a_spike_is_several_high_losses_in_a_row(losses, found):
    assert find_spike(steps(losses), SETTINGS) == found


def test_only_the_window_before_it_is_compared():
    assert find_spike(steps([100.0] * 50 + CALM + [7.0, 8.0, 9.0]), SETTINGS) == (61, 63)
    assert find_spike(steps([1.04**step for step in range(50)]), SETTINGS) is None  # seven times as high, but slowly


def test_steps_without_a_loss_are_left_out():
    events = steps([*CALM, 7.0, 8.0, 9.0])
    events.insert(11, Step(step=99))
    assert find_spike(events, SETTINGS) == (11, 13)


def test_steps_keep_their_numbers_after_a_resumption():
    assert find_spike(steps([*CALM, 7.0, 8.0, 9.0], first=501), SETTINGS) == (511, 513)
