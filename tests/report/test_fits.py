"""Fits: known constants come back from noisy data, and what can't be fitted is one sentence."""

import numpy as np
import pytest

from megaboa.config.models.outputs import Figure
from megaboa.report.fits import FLOP, Law, optimum, scaling_law

TRUE = Law(e=1.7, a=400.0, b=1800.0, alpha=0.34, beta=0.37)
SWEEP = Figure(name="best", kind="scatter", x="optimizer.lr", y="validation", fit="optimum")


def study(seed, sizes=5, budgets=5, noise=0.002):
    params = np.repeat(np.geomspace(1e7, 1e10, sizes), budgets)
    tokens = np.tile(np.geomspace(1e9, 1e12, budgets), sizes)
    errors = np.random.default_rng(seed).normal(0, noise, len(params))
    return params, tokens, TRUE.loss(params, tokens) * np.exp(errors)


def test_without_noise_the_law_comes_back():
    law = scaling_law(*study(0, noise=0.0)).law
    assert [law.e, law.alpha, law.beta] == pytest.approx([1.7, 0.34, 0.37], rel=1e-2)


def test_intervals_cover_the_constants_of_noisy_runs():
    """A bootstrap of 25 runs covers somewhat less than it says."""
    covered = []
    for seed in range(6):
        found = {one.name: one for one in scaling_law(*study(seed)).constants}
        wanted = {"E": TRUE.e, "alpha": TRUE.alpha, "beta": TRUE.beta, "compute-optimal exponent": TRUE.exponent}
        assert found["E"].value == pytest.approx(TRUE.e, abs=0.1)
        covered += [found[name].low <= value <= found[name].high for name, value in wanted.items()]
    assert np.mean(covered) >= 0.75


def test_one_diverged_run_moves_little():
    params, tokens, loss = study(1)
    loss[7] *= 2
    law = scaling_law(params, tokens, loss).law
    assert law.e == pytest.approx(1.7, abs=0.1) and law.exponent == pytest.approx(TRUE.exponent, abs=0.05)


def test_the_best_size_has_the_least_loss_of_its_compute():
    sizes = np.geomspace(1e8, 1e11, 20001)
    least = sizes[np.argmin(TRUE.loss(sizes, 1e21 / FLOP / sizes))]
    assert TRUE.best_params(1e21) == pytest.approx(least, rel=1e-3)


@pytest.mark.parametrize(
    ("sizes", "budgets", "why"),
    [
        (1, 5, "No law is fitted: these runs have 1 size of parameters, and it takes 3."),
        (5, 2, "No law is fitted: these runs have 2 budgets of tokens, and it takes 3."),
    ],
)
def test_too_few_sizes_or_budgets_are_one_sentence(sizes, budgets, why):
    found = scaling_law(*study(0, sizes, budgets))
    assert (found.why, found.law, found.constants) == (why, None, ())


def sweep(seed, best=3e-3, noise=0.005):
    rates = np.repeat(np.geomspace(best / 7, best * 9, 6), 2)
    loss = 3 + 0.1 * np.log(rates / best) ** 2
    return rates, loss + np.random.default_rng(seed).normal(0, noise, len(rates))


def test_the_optimum_of_a_sweep_and_how_often_its_interval_covers():
    assert optimum(*sweep(0, noise=0.0), SWEEP).constants[0].value == pytest.approx(3e-3, rel=1e-6)
    found = [optimum(*sweep(seed), SWEEP).constants[0] for seed in range(200)]
    assert 0.9 <= np.mean([one.low <= 3e-3 <= one.high for one in found]) <= 0.99


def test_an_optimum_at_the_edge_is_none():
    rates, loss = sweep(0)
    assert (
        "smallest of the sweep: the optimum may lie beyond"
        in optimum(rates[rates > 3e-3], loss[rates > 3e-3], SWEEP).why
    )
    assert "largest of the sweep" in optimum(rates[rates < 3e-3], loss[rates < 3e-3], SWEEP).why
    assert optimum(rates[:4], loss[:4], SWEEP).why == "No optimum is fitted: optimizer.lr has 2 values, and it takes 3."


def test_three_runs_have_an_optimum_without_an_interval():
    found = optimum(np.array([1e-3, 3e-3, 9e-3]), np.array([3.2, 3.0, 3.1]), SWEEP)
    assert found.constants[0].low is None and "not bounded by these runs" in found.sentence
