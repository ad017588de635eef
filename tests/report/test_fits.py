"""Fits: known constants come back from noisy data, and what can't be fitted is one sentence."""

import warnings

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


SIZES = np.array([1e6, 3e6, 1e7, 3e7, 1e8])


def losses(params, tokens, alpha, beta, noise, seed=5):
    """Losses by a law in whose middle both terms are 1, of other runs than `study`."""
    law = Law(1.7, np.exp(alpha * np.log(params).mean()), np.exp(beta * np.log(tokens).mean()), alpha, beta)
    return law, law.loss(params, tokens) * np.exp(np.random.default_rng(seed).normal(0, noise, len(params)))


def repeated(params, tokens, times):
    return np.repeat(params, times), np.repeat(tokens, times)


@pytest.mark.parametrize(("alpha", "beta", "noise"), [(0.4, 0.2, 5e-4), (0.4, 0.4, 0.0)])
@pytest.mark.parametrize(
    ("params", "tokens", "why"),
    [
        (SIZES, 20 * SIZES, "tokens are proportional to parameters in all runs (20 per parameter)"),
        (*repeated(SIZES, 20 * SIZES, 3), "tokens are proportional to parameters in all runs (20 per parameter)"),
        # steps are whole, so that a multiple is never exact
        (SIZES, np.ceil(20 * SIZES / 2**17) * 2**17, "tokens are proportional to parameters in all runs"),
        (SIZES, 1e16 / SIZES, "tokens follow from parameters in all runs (D grows as N^-1)"),
        (*repeated(SIZES, 1e5 * SIZES**0.5, 3), "tokens follow from parameters in all runs (D grows as N^0.5)"),
        (
            np.append(SIZES, 1e7),
            np.append(20 * SIZES, 8e8),
            "tokens are proportional to parameters in all combinations but one",
        ),
        (SIZES[:3], np.array([1e8, 1e9, 5e9]), "these runs have 3 combinations of size and budget"),
        (*repeated(SIZES[:4], np.array([1e8, 1e9, 5e9, 1e8]), 3), "these runs have 4 combinations of size and budget"),
    ],
)
def test_no_law_is_fitted_where_the_runs_determine_none(params, tokens, why, alpha, beta, noise):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = scaling_law(params, tokens, losses(params, tokens, alpha, beta, noise)[1])
    assert found.why.startswith(f"No law is fitted: {why}") and found.law is None
    assert found.why.endswith("; vary training.train_tokens within a size.")


def test_other_designs_are_fitted():
    three = np.repeat(SIZES, 3)
    designs = [
        (three, np.tile([5, 20, 80], 5) * three),
        (np.repeat(SIZES[:3], 6), np.tile([5, 20], 9) * np.repeat(SIZES[:3], 6)),
        (np.tile(SIZES, 3), np.repeat([1e15, 1e16, 1e17], 5) / np.tile(SIZES, 3)),
        (np.append(three, [1e7, 1e7]), np.append(20 * three, [5e7, 8e8])),
    ]
    covered = []
    for params, tokens in designs:
        exact = scaling_law(params, tokens, losses(params, tokens, 0.5, 0.2, 0.0)[1]).law
        assert [exact.e, exact.alpha, exact.beta] == pytest.approx([1.7, 0.5, 0.2], rel=1e-2)
        law, noisy = losses(params, tokens, 0.5, 0.2, 5e-4)
        found = {one.name: one for one in scaling_law(params, tokens, noisy).constants}
        wanted = {"E": 1.7, "alpha": 0.5, "beta": 0.2, "compute-optimal exponent": law.exponent}
        assert all(found[name].low <= found[name].value <= found[name].high for name in wanted)
        covered += [found[name].low <= value <= found[name].high for name, value in wanted.items()]
    assert np.mean(covered) >= 0.75


def test_five_runs_have_a_law_without_intervals():
    params, tokens = np.array([1e6, 1e6, 1e6, 1e7, 1e8]), np.array([1e8, 1e9, 1e10, 1e8, 1e8])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = scaling_law(params, tokens, losses(params, tokens, 0.34, 0.28, 0.0)[1])
    assert [one.value for one in found.constants[3:5]] == pytest.approx([0.34, 0.28], rel=1e-2)
    assert all(one.low is None for one in found.constants)


def test_a_constant_at_the_bounds_of_the_search_is_not_determined():
    """The loss of these runs doesn't depend on the size."""
    params, tokens, _ = study(0)
    found = scaling_law(params, tokens, 1.7 + 1800 / tokens**0.37)
    values = {one.name: one.value for one in found.constants}
    assert values["A"] is None and values["compute-optimal exponent"] is None and not found.has_best_size
    assert values["beta"] == pytest.approx(0.37, rel=1e-2)
    assert "A is not determined by these runs" in found.sentence
    assert found.sentence.endswith("The compute-optimal exponent is not determined by these runs.")
    assert found.table().set_index("constant")["value"].isna()["A"]


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
