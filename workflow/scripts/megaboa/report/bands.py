"""Many curves as a few: the mean over seeds with its confidence, and how very many are distributed."""

from __future__ import annotations

import numpy as np
import pandas as pd

# Student's t for 95% of both sides, by degrees of freedom; beyond the table the normal distribution's is near enough.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL = 1.960
_QUANTILES = {"p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95}
MOST_PLACES = 500  # of x, at which very many curves are looked at


def mean_band(table: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """Mean of y at each x, its 95% confidence interval (of a single value none), and the number of values."""
    found = table.groupby(x)[y].agg(["mean", "std", "count"]).reset_index().rename(columns={"count": "n"})
    error = found["std"] / np.sqrt(found["n"]) * found["n"].map(t_value)
    found["low"], found["high"] = found["mean"] - error, found["mean"] + error
    return found[[x, "mean", "low", "high", "n"]]


def t_value(count: int) -> float:
    """For the mean of so many values; of one nothing is known."""
    if count < 2:
        return float("nan")
    return _T[count - 2] if count - 2 < len(_T) else _NORMAL


def crowd(table: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """Quantiles of y over the curves at each x, at no more than so many places."""
    places = np.sort(table[x].unique())
    table = table[table[x].isin(places[:: max(1, len(places) // MOST_PLACES)])]
    groups = table.groupby(x)[y]
    found = pd.DataFrame({name: groups.quantile(share) for name, share in _QUANTILES.items()})
    return found.assign(n=groups.size()).reset_index()
