"""Compares two groups of runs in one quantity: the ratio with an interval, and whether the runs suffice to decide.

A run is one observation, as its steps depend on each other and don't sample what another run would do. If each side has
only one run, the interval comes from blocks of its steps and says nothing about other runs.
docs/decisions/0044-comparisons.md has the assumptions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

LEVEL = 0.975  # quantile for intervals of 95%
POWER = 0.8  # the share of comparisons that would be decided with the recommended number of runs
# Assumed standard deviation of runs of one setting, for the number of runs needed if single runs say nothing about it.
# It decides no verdict.
UNKNOWN_SPREAD = 0.01
MOST_RUNS = 100  # largest number of runs that is recommended
MOST_BLOCKS, SMALLEST_BLOCK, FEWEST_BLOCKS = 10, 5, 4


@functools.cache
def student(share: float, freedom: int) -> float:
    """The quantile of Student's t for whole degrees of freedom."""
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_below(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def _student_below(t: float, freedom: int) -> float:
    """The distribution function of Student's t: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    cosine = math.sqrt(freedom / (freedom + t * t))
    sine = t / math.sqrt(freedom + t * t)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for number in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (number - 1) / number
    inside = 2 / math.pi * (math.atan2(t, math.sqrt(freedom)) + sine * total) if odd else sine * total
    return 0.5 + inside / 2


@dataclass(frozen=True)
class Blocks:
    """The relative standard error of one run's median, estimated from the medians of blocks of its steps."""

    error: float
    count: int


def blocks_of(values: Sequence[float]) -> Blocks | None:
    """Blocks of the steps that count for the speed, in their order; None for too few steps.

    If neighbouring blocks are correlated, the error is increased accordingly.
    """
    count = min(MOST_BLOCKS, len(values) // SMALLEST_BLOCK)
    if count < FEWEST_BLOCKS:
        return None
    medians = np.log([np.median(block) for block in np.array_split(np.asarray(values, dtype=float), count)])
    around = medians - medians.mean()
    variance = float((around**2).sum() / (count - 1))
    alike = float((around[1:] * around[:-1]).sum() / (around**2).sum()) if variance else 0.0
    # Few blocks underestimate their correlation by about 1 / count.
    alike = min(max(0.0, alike + 1 / count), 0.9)
    return Blocks(math.sqrt(variance / count * (1 + alike) / (1 - alike)), count)


@dataclass(frozen=True)
class Sample:
    """Values of a positive quantity, one for each run of a setting.

    `blocks`: those of a single run, if known. `exact`: a number without uncertainty, such as a published one.
    """

    values: tuple[float, ...]
    blocks: Blocks | None = None
    exact: bool = False

    @property
    def middle(self) -> float:
        """The geometric mean, because ratios are compared."""
        return math.exp(sum(map(math.log, self.values)) / len(self.values))

    @property
    def runs(self) -> int:
        return 0 if self.exact else len(self.values)


@dataclass(frozen=True)
class Ratio:
    """The ratio of ours to theirs. `low` and `high` are None if nothing is known about them.

    `by`: the source of the interval. `spread`: the relative standard deviation of runs of one setting; None if unknown.
    """

    value: float
    low: float | None
    high: float | None
    by: str  # runs, stated, blocks, nothing
    spread: float | None
    ours: int
    theirs: int

    @property
    def decides(self) -> bool:
        return self.by in ("runs", "stated")


def ratio(ours: Sample, theirs: Sample, spread: float | None = None) -> Ratio:
    """The ratio with its interval. `spread`: the user's standard deviation of runs of a setting, used if no runs show
    it."""
    logs = [np.log(one.values) for one in (ours, theirs)]
    apart = float(logs[0].mean() - logs[1].mean())
    freedom = sum(one.runs - 1 for one in (ours, theirs) if one.runs)
    made = functools.partial(_ratio, apart, ours=ours.runs, theirs=theirs.runs)
    if freedom:
        found = math.sqrt(sum(float(((one - one.mean()) ** 2).sum()) for one in logs) / freedom)
        return made(student(LEVEL, freedom) * _error(found, ours.runs, theirs.runs), "runs", found)
    known = [one.blocks for one in (ours, theirs) if one.runs]
    within = math.sqrt(sum(one.error**2 for one in known)) if all(known) else None
    if spread is not None:  # the error is at least that of the runs' own medians
        error = max(_error(spread, ours.runs, theirs.runs), within or 0.0)
        return made(NormalDist().inv_cdf(LEVEL) * error, "stated", spread)
    if within is not None:
        return made(student(LEVEL, min(one.count for one in known) - 1) * within, "blocks", None)
    return made(None, "nothing", None)


def paired(ours: Sequence[float], theirs: Sequence[float], spread: float | None = None) -> Ratio:
    """The ratio for paired runs, such as of equal seeds, for which only the pairs' ratios vary by chance."""
    ratios = Sample(tuple(one / other for one, other in zip(ours, theirs, strict=True)))
    found = ratio(ratios, Sample((1.0,), exact=True), spread)
    return Ratio(found.value, found.low, found.high, found.by, found.spread, len(ours), len(theirs))


def _ratio(apart: float, half: float | None, by: str, spread: float | None, *, ours: int, theirs: int) -> Ratio:
    low, high = (None, None) if half is None else (math.exp(apart - half), math.exp(apart + half))
    return Ratio(math.exp(apart), low, high, by, spread, ours, theirs)


def _error(spread: float, *runs: int) -> float:
    """The standard error of the difference of two means. A side without runs is exact."""
    return spread * math.sqrt(sum(1 / number for number in runs if number))


def judged(found: Ratio, margin: float, less_is_better: bool = True) -> bool | None:
    """Whether ours is at most `margin` worse; None if the runs can't decide."""
    if not found.decides:
        return None
    best, worst = (found.low, found.high) if less_is_better else (1 / found.high, 1 / found.low)
    return True if worst <= 1 + margin else False if best > 1 + margin else None


@dataclass(frozen=True)
class Needed:
    """The number of runs on each inexact side that would decide, if ratio and spread are as found.

    `runs`: None if no practical number suffices, because the difference is too near to the limit.
    """

    runs: int | None
    spread: float
    assumed: bool  # the spread was not measured


def needed(found: Ratio, margin: float, less_is_better: bool = True) -> Needed:
    """The number of runs for a decision with a probability of POWER: it makes the standard error small enough, compared
    with the distance from the limit."""
    worse = math.log(found.value) * (1 if less_is_better else -1)
    away, assumed = abs(worse - math.log1p(margin)), found.spread is None
    spread = UNKNOWN_SPREAD if assumed else found.spread
    sides = 2 if found.ours and found.theirs else 1
    for runs in range(2, MOST_RUNS + 1):
        freedom = sides * (runs - 1)
        if (student(LEVEL, freedom) + student(POWER, freedom)) * _error(spread, *[runs] * sides) <= away:
            return Needed(runs, spread, assumed)
    return Needed(None, spread, assumed)
