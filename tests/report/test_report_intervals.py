"""Intervals, verdicts and the number of runs that would tell: on noise whose truth is known, and on measured steps."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megaboa.report.intervals import Blocks, Ratio, Sample, blocks_of, judged, needed, paired, ratio, student

# CPU seconds of 60 steps of one transformer layer, twelve processes with their own seeds, measured on two shared cores.
MEASURED = json.loads((Path(__file__).parents[1] / "fixtures" / "step-times.json").read_text(encoding="utf-8"))
LIMIT = 0.02


def sample(values):
    return Sample(tuple(float(value) for value in values))


def noise(rng, runs, spread, ratio=1.0):
    return sample(ratio * np.exp(rng.normal(0, spread, runs)))


@pytest.mark.parametrize(
    ("share", "freedom", "value"),
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 7, 2.365), (0.975, 30, 2.042), (0.8, 1, 1.376), (0.8, 8, 0.889)],
)
def test_students_t_is_that_of_the_tables(share, freedom, value):
    assert student(share, freedom) == pytest.approx(value, abs=6e-4)


def test_an_interval_over_runs_holds_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    found = [ratio(noise(rng, 3, 0.01, 1.05), noise(rng, 2, 0.01)) for _ in range(1000)]
    assert 0.93 < np.mean([one.low <= 1.05 <= one.high for one in found]) < 0.97


def test_a_planted_slowdown_of_three_per_cent_is_found_and_honest_noise_is_not_flagged():
    rng = np.random.default_rng(2)
    slower = [judged(ratio(noise(rng, 8, 0.005, 1.03), noise(rng, 8, 0.005)), LIMIT) for _ in range(200)]
    honest = [judged(ratio(noise(rng, 8, 0.005), noise(rng, 8, 0.005)), LIMIT) for _ in range(200)]
    assert slower.count(False) > 180 and True not in slower
    assert honest.count(True) > 195 and False not in honest


def test_of_measured_runs_honest_ones_are_not_flagged_and_what_is_large_enough_is_found():
    """Two groups of six of the twelve, drawn 200 times. They differ by 4%: as many can't tell 3%, and say so."""
    medians = np.array([np.median(run) for run in MEASURED["seconds"]])

    def verdicts(planted):
        rng = np.random.default_rng(3)
        drawn = [rng.permutation(medians) for _ in range(200)]
        return [judged(ratio(sample(one[:6] * planted), sample(one[6:])), LIMIT) for one in drawn]

    assert verdicts(1.0).count(False) <= 5
    assert verdicts(1.03).count(None) > 150 and verdicts(1.03).count(True) <= 5
    assert verdicts(1.15).count(False) > 180
    both = sample(medians)
    assert needed(ratio(both, both), LIMIT).runs > 50


def test_one_run_on_each_side_never_decides_however_far_they_are_apart():
    steps = MEASURED["seconds"][0]
    one, other = (Sample((float(np.median(run)),), blocks_of(run)) for run in (np.array(steps) * 1.5, steps))
    found = ratio(one, other)
    assert found.by == "blocks" and found.low > 1.2 and judged(found, LIMIT) is None
    wanted = needed(found, LIMIT)
    assert wanted.assumed and wanted.runs == 2
    assert needed(ratio(Sample((1.005,)), Sample((1.0,))), LIMIT).runs > 2


def test_a_stated_spread_decides_where_no_runs_show_it_and_only_there():
    assert judged(ratio(Sample((1.05,)), Sample((1.0,)), spread=0.005), LIMIT) is False
    assert judged(ratio(Sample((1.0,)), Sample((1.0,)), spread=0.005), LIMIT) is True
    assert judged(ratio(Sample((1.0,)), Sample((1.0,)), spread=0.05), LIMIT) is None
    noisy = Sample((1.0,), Blocks(0.05, 10))
    assert judged(ratio(noisy, noisy, spread=0.005), LIMIT) is None
    several = ratio(sample([1.0, 1.1, 0.9]), sample([1.0, 1.1, 0.9]), spread=1e-6)
    assert several.by == "runs" and judged(several, LIMIT) is None


@pytest.mark.parametrize(("true", "spread"), [(1.0, 0.01), (1.03, 0.005), (1.0, 0.02), (0.95, 0.03)])
def test_as_many_runs_as_are_said_to_be_needed_tell_in_four_of_five_cases(true, spread):
    rng = np.random.default_rng(4)
    runs = needed(Ratio(true, 0.5, 2.0, "runs", spread, 2, 2), LIMIT).runs
    verdicts = [judged(ratio(noise(rng, runs, spread, true), noise(rng, runs, spread)), LIMIT) for _ in range(500)]
    assert np.mean([verdict is (true <= 1 + LIMIT) for verdict in verdicts]) > 0.75
    fewer = [judged(ratio(noise(rng, 2, spread, true), noise(rng, 2, spread)), LIMIT) for _ in range(500)]
    assert fewer.count(None) > 250


def test_no_number_of_runs_tells_what_lies_at_the_limit():
    assert needed(Ratio(1.02, 0.9, 1.2, "runs", 0.01, 2, 2), LIMIT).runs is None


@pytest.mark.parametrize(("alike", "share"), [(0.0, 0.9), (0.5, 0.9), (0.9, 0.85)])
def test_blocks_of_steps_that_follow_each_other_hold_the_truth_where_single_steps_would_not(alike, share):
    rng = np.random.default_rng(5)
    inside, naive = [], []
    for _ in range(200):
        kicks, level, steps = rng.normal(size=400), 0.0, []
        for kick in kicks:
            level = alike * level + kick * math.sqrt(1 - alike**2)
            steps.append(math.exp(0.02 * level))
        steps = steps[200:]
        found, middle = blocks_of(steps), abs(math.log(np.median(steps)))
        inside.append(middle <= student(0.975, found.count - 1) * found.error)
        naive.append(middle <= 1.96 * 1.25 * np.std(np.log(steps)) / math.sqrt(len(steps)))
    assert np.mean(inside) >= share
    if alike == 0.9:
        assert np.mean(naive) < 0.6


def test_too_few_steps_have_no_blocks_and_then_no_interval():
    assert blocks_of([1.0] * 19) is None and blocks_of([1.0] * 20) == Blocks(0.0, 4)
    found = ratio(Sample((1.1,)), Sample((1.0,)))
    assert (found.by, found.low, judged(found, LIMIT)) == ("nothing", None, None)


def test_seeds_on_both_sides_are_compared_in_pairs():
    theirs = np.array([2.50, 2.61, 2.43])
    ours = theirs * [1.0100, 1.0102, 1.0101]
    assert judged(ratio(sample(ours), sample(theirs)), 0.005) is None
    found = paired(ours, theirs)
    assert judged(found, 0.005) is False and (found.ours, found.theirs) == (3, 3)


def test_more_is_better_of_a_throughput():
    assert judged(ratio(sample([0.9, 0.901]), sample([1.0, 1.001])), LIMIT, less_is_better=False) is False
    assert judged(ratio(sample([1.1, 1.101]), sample([1.0, 1.001])), LIMIT, less_is_better=False) is True


def test_a_published_number_is_taken_as_exact():
    exact = Sample((1.0,), exact=True)
    found = ratio(sample([1.001, 1.0, 0.999]), exact)
    assert (found.ours, found.theirs, judged(found, LIMIT)) == (3, 0, True)
    assert judged(ratio(Sample((1.0,), Blocks(0.001, 10)), exact), LIMIT) is None
