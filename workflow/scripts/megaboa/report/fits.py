"""Fits to runs: a scaling law to losses, a parabola to a sweep. Returns numbers and sentences.

It needs only NumPy: both problems are small, and all starts and resamples are solved at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from megaboa import metrics
from megaboa.config.models.outputs import Figure
from megaboa.formats import counted
from megaboa.report.frames import PARAMS, TOKENS
from megaboa.report.intervals import LEVEL, student

FLOP = 6  # FLOPs of training per parameter and token
FEWEST = 3  # number of sizes, budgets, or values of a sweep
HUBER = 1e-3  # applied to the logarithm of the loss, as in Chinchilla's paper
RESAMPLES = 400
OPEN = 0.025  # share of resamples without an end, from which on a 95% interval has none
ON_A_LINE = 0.05  # budgets that leave a line by less change losses by less than seeds do
MOST_CONDITION = 1000  # of the residuals' slopes: beyond it, an error of 0.1% in the losses moves a constant by 100%
NEAR = 2  # number of values on either side of the best that the parabola is fitted to
_ITERATIONS = 150
# Bounds of log A and log B at the mean size and budget and of log E, all relative to the log of the smallest loss, and
# of the exponents.
_LEAST = np.array([-12.0, -12.0, -6.0, 0.01, 0.01])
_MOST = np.array([4.0, 4.0, 0.0, 3.0, 3.0])

Points = np.ndarray


@dataclass(frozen=True)
class Constant:
    """A fitted number and its 95% interval; None if these runs don't determine it, or don't bound it."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.name} is not determined by these runs"
        if self.low is None or self.high is None:
            return f"{self.name} = {self.value:.3g} (not bounded by these runs)"
        return f"{self.name} = {self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class Fit:
    """The result of a fit. `why`: the reason if there is none. `curve`: y at x; for a law, the loss at N and D."""

    constants: tuple[Constant, ...] = ()
    sentence: str = ""
    why: str = ""
    curve: Callable[..., np.ndarray] | None = None
    law: Law | None = None

    @property
    def has_best_size(self) -> bool:
        """Whether the runs determine how the best size grows with compute."""
        return self.law is not None and self.constants[-1].value is not None

    def table(self) -> pd.DataFrame:
        """The constants with six digits, as further ones depend on the processor."""
        rows = [
            {"constant": one.name, **{end: _six(getattr(one, end)) for end in ("value", "low", "high")}}
            for one in self.constants
        ]
        return pd.DataFrame(rows, columns=["constant", "value", "low", "high"])


def _six(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


@dataclass(frozen=True)
class Law:
    """L = E + A / N^alpha + B / D^beta."""

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, params: Points, tokens: Points) -> Points:
        return self.e + self.a / np.asarray(params) ** self.alpha + self.b / np.asarray(tokens) ** self.beta

    def best_params(self, flop: Points) -> Points:
        """The size with the smallest loss for a given compute budget."""
        ratio = self.alpha * self.a / (self.beta * self.b)
        return ratio ** (1 / (self.alpha + self.beta)) * (np.asarray(flop) / FLOP) ** self.exponent

    @property
    def exponent(self) -> float:
        """The exponent with which the best size grows with compute."""
        return self.beta / (self.alpha + self.beta)


def fit_of(spec: Figure, table: pd.DataFrame) -> dict[str, Fit]:
    """Fits of a figure: one for each level of `hue` for optima, one of all runs for a law."""
    if spec.fit == "scaling-law":
        return {"": scaling_law(*(table[name].to_numpy(float) for name in (PARAMS, TOKENS, spec.y)))}
    groups = {"": table} if spec.hue is None else {f"{level}": part for level, part in table.groupby(spec.hue)}
    return {
        name: optimum(part[spec.x].to_numpy(float), part[spec.y].to_numpy(float), spec) for name, part in groups.items()
    }


def scaling_law(params: Points, tokens: Points, loss: Points) -> Fit:
    """Fit Chinchilla's law: Huber's loss on log L, many starts, and a bootstrap over runs."""
    known = np.isfinite(params) & np.isfinite(tokens) & np.isfinite(loss) & (loss > 0)
    params, tokens, loss = params[known], tokens[known], loss[known]
    if why := _too_few(params, tokens) or _on_a_line(params, tokens):
        return Fit(why=f"No law is fitted: {why}.")
    problem = _Problem(params, tokens, loss)
    ones = np.ones(len(loss))
    found, costs = problem.solve(problem.starts(), ones)
    best = found[np.argmin(costs)]
    ends = problem.at_bounds(best)
    if not ends.any() and problem.condition(best) > MOST_CONDITION:
        return Fit(why=f"No law is fitted: these runs don't tell its five constants apart; {_VARY}.")
    random = np.random.default_rng(0)
    counts = random.multinomial(len(loss), ones / len(loss), RESAMPLES).astype(float)
    counts = counts[[not _too_few(params[row > 0], tokens[row > 0]) for row in counts]]
    law, laws, open_ends = problem.law(best), [], np.ones(len(best), bool)
    if len(counts) >= RESAMPLES // 4:
        others = _resampled(problem, best, found[np.argsort(costs)], counts)
        laws, open_ends = [problem.law(one) for one in others], problem.at_bounds(others).mean(axis=0) > OPEN
    determined, bounded = _by_name(~ends), _by_name(~open_ends)
    named = {"E": "e", "A": "a", "B": "b", "alpha": "alpha", "beta": "beta", "compute-optimal exponent": "exponent"}
    constants = tuple(
        _constant(text, getattr(law, name), [getattr(one, name) for one in laws] if bounded[name] else [])
        if determined[name]
        else Constant(text, None)
        for text, name in named.items()
    )
    said, exponent = ", ".join(str(one) for one in constants[:-1]), constants[-1]
    growth = f"The best size grows with compute to the power of {str(exponent).partition(' = ')[2]}"
    return Fit(
        constants=constants,
        sentence=f"L = E + A/N^alpha + B/D^beta, fitted to {len(loss)} runs (in brackets: 95% interval, bootstrap over "
        f"runs): {said}. {f'The {exponent}' if exponent.value is None else growth}.",
        curve=law.loss,
        law=law,
    )


_VARY = "vary training.train_tokens within a size"


def _too_few(params: Points, tokens: Points) -> str:
    """Why there are too few runs for the law; empty if there are enough."""
    for values, noun, remedy in ((params, "size", "parameters"), (tokens, "budget", "tokens")):
        count = len(np.unique(values))
        if count < FEWEST:
            return f"these runs have {counted(count, noun)} of {remedy}, and it takes {FEWEST}"
    count = _pairs(params, tokens).shape[1]
    if count < len(_LEAST):
        there = f"{count} combinations of size and budget"
        return f"these runs have {there}, and its five constants take {len(_LEAST)}; {_VARY}"
    return ""


def _pairs(params: Points, tokens: Points) -> Points:
    """The sizes and budgets of the runs, without repeats."""
    return np.unique(np.stack([params, tokens]), axis=1)


def _on_a_line(params: Points, tokens: Points) -> str:
    """Why the law isn't determined, if tokens follow from parameters in all runs, or in all but one; empty otherwise.

    On such a line the loss is a function of one variable, which tells nothing of two.
    """
    pairs = _pairs(params, tokens)
    for which in range(-1, pairs.shape[1]):
        n, d = np.log(pairs if which < 0 else np.delete(pairs, which, axis=1))
        all_runs = "all runs" if which < 0 else "all combinations but one"
        if (d - n).std() < ON_A_LINE:
            each = np.exp(np.median(d - n))
            return f"tokens are proportional to parameters in {all_runs} ({each:.3g} per parameter); {_VARY}"
        slope = np.polyfit(n, d, 1)[0]
        if (d - slope * n).std() < ON_A_LINE:
            return f"tokens follow from parameters in {all_runs} (D grows as N^{slope:.2g}); {_VARY}"
    return ""


def _by_name(known: Points) -> dict[str, bool]:
    """What is known of each constant, from what is known of log A, log B, log E, alpha and beta."""
    a, b, e, alpha, beta = (bool(one) for one in known)
    return {"a": a and alpha, "b": b and beta, "e": e, "alpha": alpha, "beta": beta, "exponent": alpha and beta}


def _resampled(problem: _Problem, best: Points, found: Points, counts: Points) -> Points:
    """Fit each resample from the best fit and from two others, and keep the result with the least cost."""
    tries = []
    for start in (best, found[len(found) // 3], found[-1]):
        tries.append(problem.solve(np.tile(start, (len(counts), 1)), counts))
    costs = np.stack([cost for _, cost in tries])
    return np.stack([one for one, _ in tries])[costs.argmin(axis=0), np.arange(len(counts))]


def _constant(name: str, value: float, sample: list[float]) -> Constant:
    low, high = np.percentile(sample, [2.5, 97.5]) if sample else (np.nan, np.nan)
    # Resamples that are fitted by quite another law than the runs bound nothing.
    return Constant(name, value, float(low), float(high)) if low <= value <= high else Constant(name, value)


class _Problem:
    """The Levenberg-Marquardt method for many starts at once, with weights that turn the squares into Huber's loss."""

    def __init__(self, params: Points, tokens: Points, loss: Points) -> None:
        self.n, self.d, self.y = np.log(params), np.log(tokens), np.log(loss)
        self.centre_n, self.centre_d, self.floor = self.n.mean(), self.d.mean(), self.y.min()
        self.n, self.d = self.n - self.centre_n, self.d - self.centre_d
        shift = np.array([self.floor, self.floor, self.floor, 0.0, 0.0])
        self.least, self.most = _LEAST + shift, _MOST + shift

    def starts(self) -> Points:
        grid = np.meshgrid((-3.0, -1.0), (-3.0, -1.0), (-1.0, -0.2), (0.2, 0.5, 1.0), (0.2, 0.5, 1.0), indexing="ij")
        starts = np.stack([axis.ravel() for axis in grid], axis=1)
        return starts + np.array([self.floor, self.floor, self.floor, 0.0, 0.0])

    def law(self, found: Points) -> Law:
        a, b, e, alpha, beta = found
        return Law(
            e=float(np.exp(e)),
            a=float(np.exp(a + alpha * self.centre_n)),
            b=float(np.exp(b + beta * self.centre_d)),
            alpha=float(alpha),
            beta=float(beta),
        )

    def _residuals(self, at: Points) -> tuple[Points, Points]:
        """The residuals of every start and run, and the shares of the loss's three parts."""
        a, b, e, alpha, beta = (at[:, [column]] for column in range(5))
        parts = np.stack([a - alpha * self.n, b - beta * self.d, e + 0 * self.n])
        top = parts.max(axis=0)
        total = top + np.log(np.exp(parts - top).sum(axis=0))
        return total - self.y, np.exp(parts - total)

    def at_bounds(self, found: Points) -> Points:
        """Which constants a fit, or each of several, has at the bounds of the search."""
        return np.isclose(found, self.least) | np.isclose(found, self.most)

    def condition(self, found: Points) -> float:
        """The condition number of the residuals' slopes by the constants, each of which has length 1."""
        slopes = self._slopes(self._residuals(found[None])[1])[0]
        return float(np.linalg.cond(slopes / np.linalg.norm(slopes, axis=0)))

    def _slopes(self, shares: Points) -> Points:
        by_n, by_d, by_e = shares
        return np.stack([by_n, by_d, by_e, -by_n * self.n, -by_d * self.d], axis=2)

    def _cost(self, residuals: Points, counts: Points) -> Points:
        size = np.abs(residuals)
        return (counts * np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2))).sum(axis=1)

    def solve(self, starts: Points, counts: Points) -> tuple[Points, Points]:
        """Minimize from every start; returns the solutions and their costs. `counts`: how often each resample has each
        run."""
        at, damping = starts.copy(), np.full(len(starts), 1e-2)
        residuals, shares = self._residuals(at)
        cost = self._cost(residuals, counts)
        for _ in range(_ITERATIONS):
            slopes = self._slopes(shares)
            weights = counts * np.minimum(1, HUBER / np.maximum(np.abs(residuals), 1e-15))
            square = np.einsum("sri,sr,srj->sij", slopes, weights * np.ones_like(residuals), slopes)
            slope = np.einsum("sri,sr->si", slopes, weights * residuals)
            diagonal = np.einsum("sii->si", square)
            square = square + (damping[:, None] * diagonal + 1e-12)[:, :, None] * np.eye(5)
            new = np.clip(at - np.linalg.solve(square, slope[:, :, None])[:, :, 0], self.least, self.most)
            new_residuals, new_shares = self._residuals(new)
            new_cost = self._cost(new_residuals, counts)
            better = new_cost < cost
            gain = np.where(better, cost - new_cost, 0.0)
            at[better], residuals[better], cost[better] = new[better], new_residuals[better], new_cost[better]
            shares[:, better] = new_shares[:, better]
            damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-9, 1e9)
            if np.all((gain < 1e-10 * cost) & (damping > 1e6)):
                break
        return at, cost


def optimum(x: Points, y: Points, spec: Figure) -> Fit:
    """Fit a parabola in log x to the values around the best; its vertex has Fieller's interval."""
    name, less = spec.x, spec.lowest_is_best
    meant = f"{'lowest' if less else 'highest'} {metrics.label(spec.y)}"
    known = np.isfinite(x) & np.isfinite(y) & (x > 0)
    x, y = x[known], y[known]
    values = np.unique(x)
    if len(values) < FEWEST:
        there = counted(len(values), "value")
        return Fit(why=f"No optimum is fitted: {name} has {there}, and it takes {FEWEST}.")
    means = np.array([y[x == value].mean() for value in values])
    best = int(np.argmin(means) if less else np.argmax(means))
    if best in (0, len(values) - 1):
        side = "smallest" if best == 0 else "largest"
        return Fit(
            why=f"The best value of {name} ({meant}), {values[best]:g}, is the {side} of the sweep: the optimum may "
            f"lie beyond; add {'smaller' if best == 0 else 'larger'} values."
        )
    near = np.isin(x, values[max(0, best - NEAR) : best + NEAR + 1])
    x, y = np.log(x[near]), y[near] if less else -y[near]
    centre = x.mean()
    design = np.stack([np.ones_like(x), x - centre, (x - centre) ** 2], axis=1)
    inverse = np.linalg.inv(design.T @ design)
    found = inverse @ design.T @ y
    _, slope, bend = found
    vertex = -slope / (2 * bend)
    if bend <= 0 or not x.min() <= centre + vertex <= x.max():
        return Fit(why=f"No optimum is fitted: the values around {name} = {values[best]:g} don't lie on a valley.")
    free = len(x) - 3
    interval = None
    if free > 0:
        variance = ((y - design @ found) ** 2).sum() / free
        interval = _fieller(slope, bend, variance * inverse, student(LEVEL, free))
    low, high = (None, None) if interval is None else tuple(float(np.exp(centre + end)) for end in interval)
    at = Constant(name, float(np.exp(centre + vertex)), low, high)
    sign = 1 if less else -1
    return Fit(
        constants=(at, Constant(spec.y, float(sign * (found[0] + slope * vertex + bend * vertex**2)), None, None)),
        sentence=f"Optimum ({meant}) by a parabola in log {name} through {len(x)} runs: {at}.",
        curve=lambda at: sign * (np.log(at)[:, None] - centre) ** np.arange(3) @ found,
    )


def _fieller(slope: float, bend: float, covariance: Points, t: float) -> tuple[float, float] | None:
    """The interval of v in which slope + 2·bend·v isn't significantly different from zero; None if it is unbounded."""
    both = 2 * covariance[1, 2]
    square = 4 * (bend**2 - t**2 * covariance[2, 2])
    middle = 4 * slope * bend - 2 * t**2 * both
    last = slope**2 - t**2 * covariance[1, 1]
    inside = middle**2 - 4 * square * last
    if square <= 0 or inside < 0:
        return None
    ends = sorted((-middle + sign * np.sqrt(inside)) / (2 * square) for sign in (-1, 1))
    return ends[0], ends[1]
