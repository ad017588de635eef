"""Arithmetic of intervals, compared with sets of integers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megaboa.observe.traces import intervals

TIMES = st.integers(0, 60)
ROWS = st.lists(st.tuples(TIMES, TIMES), max_size=15)


def rows(pairs):
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def moments(pairs):
    return {time for begin, end in pairs for time in range(begin, end)}


def of(found):
    return moments(found.tolist())


@given(ROWS)
def test_a_union_covers_each_moment_once(pairs):
    found = intervals.union(rows(pairs))
    assert of(found) == moments(pairs)
    assert intervals.length(found) == len(moments(pairs))
    assert (found[:, 1] > found[:, 0]).all() and (found[1:, 0] > found[:-1, 1]).all()


@given(ROWS, ROWS)
def test_intersection_and_difference_are_those_of_sets(left, right):
    one, other = intervals.union(rows(left)), intervals.union(rows(right))
    assert of(intervals.intersect(one, other)) == moments(left) & moments(right)
    assert of(intervals.subtract(one, other)) == moments(left) - moments(right)


@given(ROWS, TIMES, TIMES)
def test_gaps_and_a_union_fill_a_window(pairs, begin, end):
    found = intervals.gaps(intervals.union(rows(pairs)), begin, end)
    assert of(found) == set(range(begin, end)) - moments(pairs)


@given(ROWS, st.lists(st.tuples(TIMES, TIMES).map(sorted), max_size=8))
def test_what_a_window_holds(pairs, windows):
    found = intervals.within(intervals.union(rows(pairs)), rows(windows))
    assert found.tolist() == [len(moments(pairs) & set(range(begin, end))) for begin, end in windows]


@given(ROWS, st.lists(TIMES, max_size=8))
def test_which_moments_are_covered(pairs, times):
    found = intervals.holds(intervals.union(rows(pairs)), np.array(times, dtype=np.int64))
    assert found.tolist() == [time in moments(pairs) for time in times]


def test_nothing_is_nothing():
    assert intervals.length(intervals.union(intervals.NONE)) == 0
    assert intervals.subtract(intervals.NONE, intervals.NONE).shape == (0, 2)
    assert intervals.within(intervals.NONE, rows([(0, 5)])).tolist() == [0]
