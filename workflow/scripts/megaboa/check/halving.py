"""Which of many settings is the fastest, according to trials with a noisy clock: what to try next, and when to stop.

This is a pure function of the trials so far, so an interrupted search resumes where it was.

Round 1 tries every setting once, and round 2 at least the fastest quarter again. Each later round tries the leader and,
of the settings that may still be faster, the most likely half. For every other setting there is a chance that it is
faster than the leader by more than the tolerance; the search ends when the sum of these chances is below 1 -
confidence. Settings that a round doesn't try stay in this sum, so that a setting is only excluded by measurements. One
that wasn't measured yet counts with a chance of 1, because nothing is known about it. If a setting's only trial met a
busy machine, the scatter of its steps shows that.

A trial's value is the logarithm of its step time, modelled as the setting's value, plus the round's (a machine that is
slower for a while is slower for all), plus noise. Of several trials the median counts, because about one in twenty
meets a burst of other work and takes several times as long. Such trials are part of the noise, so a machine that has
them needs more trials. The noise is estimated from settings that were tried more than once, and at first from the
scatter of the steps within trials.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megaboa.records import Trial

FLOOR = 0.01  # assumed minimum noise of a trial, until settings have been repeated
FIRST_FREEDOM = 3  # number of repetitions that the scatter within trials is worth
FAILURES = 2  # after which a setting is given up; out of memory once is enough, as it would happen again
LEAST = 2  # settings tried in a round besides the leader, if that many may be faster
REPEATED = 4  # one in this many, the fastest settings, is tried twice: otherwise the noise between trials isn't known
QUARTILE = 0.25  # of a trial's steps: other work on the machine only makes steps slower
QUARTILES = 1.349  # standard deviations between the quartiles of a normal distribution
PASSES = 10
MEDIAN = 1.25  # standard error of a median, relative to that of a mean
NORMAL = 200  # degrees of freedom above which Student's t is treated as normal


@dataclass(frozen=True)
class Estimate:
    """Step times by setting, as if all had been tried in the same rounds."""

    logs: dict[str, float]
    counts: dict[str, int]
    scatter: dict[str, float]  # of the steps in the setting's steadiest trial
    noise: float  # standard deviation of one trial
    freedom: float

    @property
    def leader(self) -> str:
        return min(self.logs, key=lambda name: (self.logs[name], name))

    def behind(self, name: str) -> float:
        """Logarithm of a setting's step time, minus the leader's."""
        return self.logs[name] - self.logs[self.leader]

    def error(self, name: str) -> float:
        """Standard error of `behind`."""
        return math.hypot(*(self._own_error(one) for one in (name, self.leader)))

    def _own_error(self, name: str) -> float:
        """Standard error of a setting's value, which is larger if even its steadiest trial was disturbed."""
        count = self.counts[name]
        return max(self.noise, self.scatter[name]) * (MEDIAN if count > 2 else 1.0) / math.sqrt(count)

    def chance(self, name: str, tolerance: float) -> float:
        """Chance that a setting is faster than the leader by more than the tolerance."""
        if name == self.leader:
            return 0.0
        return upper_tail((self.behind(name) + math.log1p(tolerance)) / self.error(name), self.freedom)


@dataclass(frozen=True)
class Verdict:
    """`batch`: the settings to try now, in this order; empty if the search is over."""

    round: int
    batch: tuple[str, ...]
    estimate: Estimate | None  # None if nothing was measured yet, or nothing works
    confidence: float


def decide(settings: Sequence[str], trials: Sequence[Trial], tolerance: float, confidence: float) -> Verdict:
    """The next step of a search among `settings`; trials of other settings are ignored."""
    known = [trial for trial in trials if trial.setting in settings]
    current = max((trial.round for trial in known), default=1)
    found = _after(settings, known, current, tolerance, confidence)
    return found if found.batch else _after(settings, known, current + 1, tolerance, confidence)


def _after(
    settings: Sequence[str], known: Sequence[Trial], current: int, tolerance: float, confidence: float
) -> Verdict:
    """What is left to do in a round."""
    before = [trial for trial in known if trial.round < current]
    batch = list(settings) if current == 1 else _next(settings, before, tolerance, confidence)
    random.Random(current).shuffle(batch)  # so that no setting always comes first
    out = given_up(known)
    done = {trial.setting for trial in known if trial.round == current and trial.steps}
    found = estimate(known)
    is_open = found is None or any(name not in found.logs and name not in out for name in settings)
    sure = 0.0 if is_open else 1 - sum(found.chance(name, tolerance) for name in found.logs)
    return Verdict(current, tuple(name for name in batch if name not in done | out), found, max(sure, 0.0))


def _next(settings: Sequence[str], trials: Sequence[Trial], tolerance: float, confidence: float) -> list[str]:
    found, out = estimate(trials), given_up(trials)
    if found is None:
        return [name for name in settings if name not in out]
    untried = [name for name in settings if name not in found.logs and name not in out]
    chances = {name: found.chance(name, tolerance) for name in found.logs if name not in out}
    doubtful, left = [], sum(chances.values())
    for name in sorted(chances, key=lambda name: (-chances[name], name)):
        if left <= (1 - confidence) / (1 if not doubtful else 2):
            break
        doubtful.append(name)
        left -= chances[name]
    half = doubtful[: max(LEAST, math.ceil(len(doubtful) / 2))]
    if len(chances) > 1 and max(found.counts.values()) == 1:
        nearest = sorted(chances, key=lambda name: (found.logs[name], name))
        half = [*half, *(name for name in nearest[: max(LEAST, len(nearest) // REPEATED) + 1] if name not in half)]
    if not half:
        return untried
    return [*untried, found.leader, *(name for name in half if name != found.leader)]


def given_up(trials: Sequence[Trial]) -> set[str]:
    """Settings that ran out of memory or took too long, or failed repeatedly."""
    failed = [trial for trial in trials if not trial.steps]
    repeated = {one.setting for one in failed if sum(one.setting == other.setting for other in failed) >= FAILURES}
    return repeated | {trial.setting for trial in failed if trial.state in ("out_of_memory", "too_slow")}


def seconds_of(trial: Trial) -> float:
    """Step time of a measured trial."""
    ordered = sorted(trial.steps)
    place = QUARTILE * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def estimate(trials: Sequence[Trial]) -> Estimate | None:
    """Estimates from all trials; None if nothing was measured. Settings that were given up are left out."""
    out = given_up(trials)
    measured = [trial for trial in trials if trial.steps and trial.setting not in out]
    if not measured:
        return None
    values = [(trial.setting, trial.round, math.log(seconds_of(trial))) for trial in measured]
    by_name: dict[str, list[tuple[int, float]]] = {}
    by_round: dict[int, list[tuple[str, float]]] = {}
    for name, number, value in values:
        by_name.setdefault(name, []).append((number, value))
        by_round.setdefault(number, []).append((name, value))
    counts = {name: len(own) for name, own in by_name.items()}
    scatter: dict[str, float] = {}
    for one in measured:
        scatter[one.setting] = min(scatter.get(one.setting, math.inf), _scatter(one))
    logs, rounds = dict.fromkeys(by_name, 0.0), dict.fromkeys(by_round, 0.0)
    for _ in range(PASSES if len(rounds) > 1 else 1):  # median polish: medians of settings and of rounds, in turn
        logs = {
            name: statistics.median(value - rounds[number] for number, value in own) for name, own in by_name.items()
        }
        if len(rounds) > 1:
            rounds = {
                number: statistics.median(value - logs[name] for name, value in own) for number, own in by_round.items()
            }
    squares = sum((value - logs[name] - rounds[number]) ** 2 for name, number, value in values)
    freedom = max(len(values) - len(logs) - len(rounds) + 1, 0)
    first = statistics.fmean(_scatter(trial) ** 2 for trial in measured) + FLOOR**2
    noise = math.sqrt((FIRST_FREEDOM * first + squares) / (FIRST_FREEDOM + freedom))
    return Estimate(logs, counts, scatter, noise, FIRST_FREEDOM + freedom)


def _scatter(trial: Trial) -> float:
    """Relative standard deviation of a trial's steps, from their quartiles.

    A single slow step, such as one that captures a graph, doesn't change these. But a single fast one counts: it shows
    that the others were disturbed. Trials differ by less than that, but by more than means of steps would.
    """
    if len(trial.steps) < 2:
        return FLOOR
    logs = sorted(map(math.log, trial.steps))
    low, _, high = statistics.quantiles(logs, method="inclusive")
    return max(high - low, low - logs[0]) / QUARTILES


def upper_tail(t: float, freedom: float) -> float:
    """The probability that Student's t exceeds `t`."""
    if t < 0:
        return 1 - upper_tail(-t, freedom)
    if freedom > NORMAL:
        return math.erfc(t / math.sqrt(2)) / 2
    # With t = sqrt(freedom) tan(angle), the density is a power of a cosine. Simpson's rule from the angle to the right
    # end.
    begin, pieces = math.atan(t / math.sqrt(freedom)), 64
    width = (math.pi / 2 - begin) / pieces
    heights = [max(math.cos(begin + number * width), 0.0) ** (freedom - 1) for number in range(pieces + 1)]
    area = width / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))
    return area * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
