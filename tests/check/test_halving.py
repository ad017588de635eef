"""The search of `snakemake tune`, with simulated clocks: true step times are known, and seeds are printed."""

import math
import random

import pytest

from megaboa.check import halving
from megaboa.records import Trial

TOLERANCE, CONFIDENCE = 0.03, 0.95


def trial(setting, number, *steps, state="measured"):
    return Trial(setting=setting, identity="x", round=number, state=state, steps=steps)


def clock(truth, noise, drift, seed, bursts=0.0):
    """Trials of settings with these true step times: each has its noise, and each round a speed of its own.

    `bursts`: the share of trials that take two to six times as long, from their first step to their last."""
    generator = random.Random(seed)
    speeds: dict[int, float] = {}

    def measured(setting, number):
        speed = speeds.setdefault(number, math.exp(generator.gauss(0, drift)))
        mean = truth[setting] * speed * math.exp(generator.gauss(0, noise))
        mean *= generator.uniform(2, 6) if generator.random() < bursts else 1.0
        return trial(setting, number, *(mean * math.exp(abs(generator.gauss(0, noise / 2))) for _ in range(8)))

    return measured


def search(truth, measure, limit=600):
    trials = []
    while len(trials) < limit:
        verdict = halving.decide(list(truth), trials, TOLERANCE, CONFIDENCE)
        if not verdict.batch:
            break
        trials += [measure(name, verdict.round) for name in verdict.batch]  # the verdict after each is the same
    return verdict, trials


@pytest.mark.parametrize(("noise", "drift"), [(0.01, 0.02), (0.05, 0.2)])
def test_the_winner_is_as_good_as_is_stated(noise, drift):
    """Of 12 searches among 24 settings at least the stated share ends within the tolerance."""
    right, tried = 0, 0
    for seed in range(100, 112):
        verdict, trials, regret = searched(seed, noise, drift)
        assert not verdict.batch, f"seed {seed}: not known after {len(trials)} trials"
        right, tried = right + (regret <= TOLERANCE), tried + len(trials)
        print(f"noise {noise}, seed {seed}: regret {regret:.3f}, {len(trials)} trials, sure {verdict.confidence:.3f}")
    assert right >= 11, f"{right} of 12"
    assert tried / 12 < 4 * 24, "trying each four times would tell as much"


def test_where_the_time_is_up_it_does_not_say_more_than_it_knows():
    """A clock that is 15% off can't tell 3% in 60 trials: the stated confidence is no higher than the share of hits."""
    stated, hits, lost = [], [], []
    for seed in range(100, 112):
        verdict, trials, regret = searched(seed, 0.15, 0.3, limit=60)
        stated.append(verdict.confidence)
        hits.append(regret <= TOLERANCE)
        lost.append(regret)
        print(f"seed {seed}: regret {regret:.3f}, {len(trials)} trials, sure {verdict.confidence:.3f}")
    assert sum(stated) / 12 <= sum(hits) / 12 + 0.1
    assert sorted(lost)[6] <= 0.06, "half of the searches lose less than 6%"


def test_bursts_of_other_work_do_not_make_it_surer_than_it_is():
    stated, hits = [], []
    for seed in range(100, 112):
        verdict, trials, regret = searched(seed, 0.03, 0.1, limit=80, bursts=0.05)
        stated.append(verdict.confidence)
        hits.append(regret <= TOLERANCE)
        print(f"seed {seed}: regret {regret:.3f}, {len(trials)} trials, sure {verdict.confidence:.3f}")
    assert sum(stated) / 12 <= sum(hits) / 12 + 0.1


def searched(seed, noise, drift, limit=300, bursts=0.0):
    generator = random.Random(seed)
    truth = {f"s{number}": math.exp(abs(generator.gauss(0, 0.4))) for number in range(24)}
    verdict, trials = search(truth, clock(truth, noise, drift, seed, bursts), limit)
    return verdict, trials, truth[verdict.estimate.leader] / min(truth.values()) - 1


def test_with_a_steady_clock_hardly_anything_is_tried_twice():
    truth = {f"s{number}": 1.1**number for number in range(24)}
    verdict, trials = search(truth, clock(truth, 0.002, 0.0, 1))
    assert verdict.estimate.leader == "s0"
    assert len(trials) <= 24 + 7


def test_a_slow_step_in_every_trial_does_not_keep_it_from_being_sure():
    """Such as one that captures a graph: it says nothing about the trial's other steps."""
    truth = {f"s{number}": 1.1**number for number in range(10)}
    measure = clock(truth, 0.004, 0.0, 3)

    def with_a_slow_step(setting, number):
        found = measure(setting, number)
        return trial(setting, number, 5 * found.steps[0], *found.steps[1:])

    verdict, trials = search(truth, with_a_slow_step)
    assert not verdict.batch and verdict.estimate.leader == "s0"
    assert verdict.estimate.noise < 0.02 and len(trials) <= 10 + 5


def test_a_setting_whose_one_trial_met_a_busy_machine_comes_back():
    """The best is 1.7 times too slow in its first trial, but its steps say that something is wrong with it."""
    truth = {"best": 1.0, **{f"s{number}": 1.3 + number / 10 for number in range(12)}}
    measure = clock(truth, 0.03, 0.1, 4)
    busy = []

    def disturbed(setting, number):
        found = measure(setting, number)
        if setting == "best" and not busy:
            busy.append(number)
            slow = tuple(1.7 * seconds * (1 + 0.5 * (place % 2)) for place, seconds in enumerate(found.steps))
            return trial(setting, number, *slow)
        return found

    verdict, _ = search(truth, disturbed)
    assert verdict.estimate.leader == "best"


@pytest.mark.parametrize("seed", range(5))
def test_so_does_one_whose_first_step_alone_was_undisturbed(seed):
    truth = {"best": 1.0, **{f"s{number}": 1.3 + number / 10 for number in range(12)}}
    measure = clock(truth, 0.03, 0.1, seed)
    busy = []

    def disturbed(setting, number):
        found = measure(setting, number)
        if setting == "best" and not busy:
            busy.append(number)
            return trial(setting, number, found.steps[0], *(1.7 * seconds for seconds in found.steps[1:]))
        return found

    verdict, _ = search(truth, disturbed)
    assert verdict.estimate.leader == "best"


def test_it_resumes_where_it_was():
    """After every trial, what is tried next follows from the trials alone, in whatever order they are read."""
    truth = {f"s{number}": 1 + number / 20 for number in range(10)}
    verdict, trials = search(truth, clock(truth, 0.05, 0.1, 7))
    for done in range(len(trials)):
        known = trials[:done]
        random.Random(done).shuffle(known)
        again = halving.decide(list(truth), known, TOLERANCE, CONFIDENCE)
        assert (again.batch[0], again.round) == (trials[done].setting, trials[done].round)
    assert halving.decide(list(truth), trials, TOLERANCE, CONFIDENCE).estimate.leader == verdict.estimate.leader


def test_failures_are_given_up_and_crashes_are_tried_twice():
    settings = ["a", "b", "c"]
    trials = [trial("b", 1, state="out_of_memory"), trial("c", 1, state="failed")]
    verdict = halving.decide(settings, trials, TOLERANCE, CONFIDENCE)
    assert sorted(verdict.batch) == ["a", "c"]
    trials += [trial("c", 1, state="failed"), trial("a", 1, 1.0, 1.0, 1.01)]
    verdict = halving.decide(settings, trials, TOLERANCE, CONFIDENCE)
    assert not verdict.batch
    assert verdict.estimate.leader == "a"
    assert verdict.confidence == 1.0


def test_a_setting_that_was_not_measured_may_be_the_fastest():
    trials = [trial("a", 1, 1.0, 1.0, 1.01), trial("c", 1, state="failed")]
    assert halving.decide(["a", "b", "c"], trials, TOLERANCE, CONFIDENCE).confidence == 0.0
    trials.append(trial("b", 1, state="out_of_memory"))
    assert halving.decide(["a", "b", "c"], trials, TOLERANCE, CONFIDENCE).confidence == 0.0, "c crashed only once"
    trials.append(trial("c", 1, state="failed"))
    assert halving.decide(["a", "b", "c"], trials, TOLERANCE, CONFIDENCE).confidence == 1.0


def test_where_nothing_works_it_ends():
    trials = [trial(name, 1, state="out_of_memory") for name in "ab"]
    verdict = halving.decide(["a", "b"], trials, TOLERANCE, CONFIDENCE)
    assert not verdict.batch
    assert verdict.estimate is None


def test_trials_of_settings_that_are_no_more_are_left_aside():
    verdict = halving.decide(["a"], [trial("gone", 3, 1.0)], TOLERANCE, CONFIDENCE)
    assert verdict.batch == ("a",)
    assert verdict.round == 1


@pytest.mark.parametrize(
    ("t", "freedom", "expected"),
    [(0, 5, 0.5), (2.015, 5, 0.05), (1.645, 1e4, 0.05), (-2.015, 5, 0.95), (6.965, 2, 0.01)],
)
def test_students_t(t, freedom, expected):
    assert halving.upper_tail(t, freedom) == pytest.approx(expected, rel=2e-3)


def test_other_work_on_the_machine_counts_little():
    quiet, busy = trial("a", 1, 1.0, 1.01, 1.02, 1.0), trial("a", 1, 1.0, 1.01, 3.0, 2.5)
    assert halving.seconds_of(busy) == pytest.approx(halving.seconds_of(quiet), rel=0.02)
