import math
import random

import pytest
from save_interval import DAY, best_interval, effective_time, interval_in_steps, mean_time_between_failures

HOUR = 3600.0
SAVES_AND_MTBFS = [(6.3, 14 * HOUR), (150.0, 14 * HOUR), (150.0, 100 * DAY), (1800.0, HOUR), (0.01, 300 * DAY)]


def simulated(interval, save, restart, mtbf, saves, seed=0):
    """Effective time of a run that fails at random times, also during saves and restarts."""
    chance = random.Random(seed)
    elapsed, failure = 0.0, chance.expovariate(1 / mtbf)
    for _ in range(saves):
        end = elapsed + interval + save
        while failure < end:
            elapsed = failure
            failure = elapsed + chance.expovariate(1 / mtbf)
            while failure < elapsed + restart:
                elapsed = failure
                failure = elapsed + chance.expovariate(1 / mtbf)
            elapsed += restart
            end = elapsed + interval + save
        elapsed = end
    return saves * interval / elapsed


@pytest.mark.parametrize("interval", [600, 3600, 6 * HOUR])
@pytest.mark.parametrize(("save", "mtbf"), [(10, 6 * HOUR), (150, 14 * HOUR), (150, 2 * HOUR)])
def test_the_formula_agrees_with_a_simulation(interval, save, mtbf):
    expected = effective_time(interval, save, 780, mtbf)
    assert simulated(interval, save, 780, mtbf, saves=30_000) == pytest.approx(expected, rel=0.02)


def test_without_failures_only_the_saves_cost():
    assert effective_time(900, 100, 600, math.inf) == pytest.approx(0.9)
    assert effective_time(900, 100, 600, 1e15) == pytest.approx(0.9)
    assert effective_time(math.inf, 100, 600, math.inf) == 1


def test_never_saving_never_ends_where_nodes_fail():
    assert effective_time(math.inf, 100, 600, HOUR) == 0
    assert effective_time(1e6 * HOUR, 100, 600, HOUR) == 0


def test_every_cost_costs():
    base = effective_time(1800, 60, 600, 10 * HOUR)
    assert 0 < base < 1
    assert effective_time(1800, 120, 600, 10 * HOUR) < base
    assert effective_time(1800, 60, 1200, 10 * HOUR) < base
    assert effective_time(1800, 60, 600, 5 * HOUR) < base


@pytest.mark.parametrize(("save", "mtbf"), SAVES_AND_MTBFS)
@pytest.mark.parametrize("restart", [0.0, 780.0])
def test_no_other_interval_is_better(save, mtbf, restart):
    best = best_interval(save, mtbf)
    tried = [best * 10 ** (k / 200) for k in range(-400, 401)]
    assert max(tried, key=lambda interval: effective_time(interval, save, restart, mtbf)) == pytest.approx(best)


def test_the_optimum_is_youngs_where_saves_are_short():
    assert best_interval(1, 100 * DAY) == pytest.approx(math.sqrt(2 * 100 * DAY), rel=1e-3)


def test_the_optimum_is_dalys_where_they_are_not():
    save, mtbf = 600.0, 6 * HOUR
    ratio = save / (2 * mtbf)
    daly = math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save
    assert best_interval(save, mtbf) == pytest.approx(daly, rel=1e-3)


def test_the_optimum_grows_with_both():
    assert best_interval(10, HOUR) < best_interval(20, HOUR) < best_interval(20, 2 * HOUR)
    assert best_interval(1e6, HOUR) == pytest.approx(HOUR)  # one try per failure is the most that can be asked for


def test_free_saves_and_nodes_that_never_fail():
    assert best_interval(0, HOUR) == 0
    assert best_interval(10, math.inf) == math.inf


def test_a_runs_failures_are_those_of_its_nodes():
    assert mean_time_between_failures(1, 0.0065) == pytest.approx(DAY / 0.0065)
    # arXiv 2410.21680 gives 1.8 hours for 16,384 GPUs at this rate.
    assert mean_time_between_failures(2048, 0.0065) == pytest.approx(1.8 * HOUR, rel=0.01)
    assert mean_time_between_failures(8, 0) == math.inf


def test_steps():
    assert interval_in_steps(1000, 7.3, 10_000) == 137
    assert interval_in_steps(0, 7.3, 10_000) == 1
    assert interval_in_steps(math.inf, 7.3, 10_000) == 10_000
