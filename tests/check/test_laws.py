"""Laws of kernels' times, from points."""

import pytest

from megaboa.check.laws import fitted
from megaboa.records import Law, Point


def points(law, cases):
    return [
        Point(name=str(case), work=case[0], values=case[1], groups=case[2], seconds=law.seconds(*case))
        for case in cases
    ]


CASES = [(1e9, 1e6, 1), (1e12, 1e7, 1), (3e12, 9e8, 1), (5e11, 2e8, 1), (2e12, 3e7, 1)]


def test_the_law_that_made_the_points_is_found():
    law = Law(rate=7e14, latency=5e-6, moved=2e12)
    found = fitted(points(law, CASES))
    assert (found.rate, found.latency, found.moved) == pytest.approx((7e14, 5e-6, 2e12), rel=1e-6)
    assert found.error == pytest.approx(0, abs=1e-9) and len(found.points) == 5


def test_groups_cost_by_their_number():
    law = Law(rate=4e14, latency=5e-6, group=2e-6)
    cases = [(1e11 * (i + 1), 1e7, groups) for i, groups in enumerate((1, 8, 64, 16))]
    assert fitted(points(law, cases)).group == pytest.approx(2e-6, rel=1e-6)


def test_nothing_costs_less_than_nothing():
    """A smaller matrix that took longer must not make a negative latency."""
    found = fitted(
        [Point(name=str(i), work=work, seconds=t) for i, (work, t) in enumerate([(1e9, 1e-6), (1e12, 5e-3)])]
    )
    assert found.rate > 0 and found.latency >= 0
