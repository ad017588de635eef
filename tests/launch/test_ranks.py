import signal

import pytest

from megaboa.launch.ranks import STACKS_SIGNAL, Ended


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (Ended(), "every rank ended with 0"),
        (Ended(3, 1), "rank 3 ended with exit code 1"),
        (Ended(3, 1, "n2"), "rank 3 on n2 ended with exit code 1"),
        (Ended(0, -9), "rank 0 was killed by SIGKILL"),
        (Ended(0, -250), "rank 0 was killed by signal 250"),
        (Ended(None, 137), "the launcher ended with exit code 137"),
        (Ended(None, -15), "the launcher was killed by SIGTERM"),
    ],
)
def test_an_end_says_who_and_how(ended, said):
    assert str(ended) == said


def test_only_0_is_well_and_only_a_signal_kills():
    assert Ended().ok and not Ended().killed
    assert not Ended(0, 1).ok and not Ended(0, 1).killed
    assert not Ended(0, -6).ok and Ended(0, -6).killed


def test_stacks_are_not_asked_for_by_a_signal_that_asks_for_something_else():
    assert STACKS_SIGNAL not in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
