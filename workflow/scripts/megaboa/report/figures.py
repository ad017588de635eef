"""Figures that are more than a table with two axes. Each gives the figure and the table of what it shows, or None where
there is nothing to plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from megaboa.report.bands import crowd
from megaboa.report.checks import differences
from megaboa.report.colours import MOST_ENTRIES, Shades, legend
from megaboa.report.corpora import CorpusCard
from megaboa.report.kinds import MOST_POINTS
from megaboa.report.runs import RunResult
from megaboa.report.style import INK, PALETTE, POWERS_OF_TEN, WIDTH

Drawn = tuple[Figure, pd.DataFrame]


def agreement_figure(agreements: list[dict[str, Any]], runs: list[RunResult], shades: Shades) -> Drawn | None:
    """Absolute difference from the reference by step, on a logarithmic axis that ends in a zero."""
    known = {run.name: run for run in runs}
    curves = [
        (known[name], differences(known[agreement["reference"]], known[name]))
        for agreement in agreements
        for name in agreement["runs"]
        if name in known and agreement["reference"] in known and name != agreement["reference"]
    ]
    curves = [(run, curve) for run, curve in curves if not curve.empty]
    if not curves:
        return None
    stride = _stride(sum(len(curve) for _, curve in curves))
    figure, axes = plt.subplots(figsize=(WIDTH, 3.5))
    # Of steps that share a point the largest difference is shown: none may hide.
    curves = [(run, curve.groupby((curve["step"] - 1) // stride).max()) for run, curve in curves]
    table = pd.concat([curve.assign(run=run.name, model=run.model) for run, curve in curves], ignore_index=True)
    if len(curves) > MOST_ENTRIES:
        _distribution(axes, table)
    else:
        for run, curve in curves:
            level = run.model if shades.column == "model" else run.name
            axes.plot(
                curve["step"],
                curve["difference"],
                color=shades.of(level),
                label=shades.text(level),
                linewidth=1,
                marker="o",
                markersize=3 if len(curve) <= 60 else 0,
            )
    tolerances = sorted({agreement["tolerance"] for agreement in agreements})
    for tolerance in tolerances:
        axes.axhline(tolerance, color=INK, linewidth=1, linestyle=(0, (4, 2)), label=f"tolerance {tolerance:g}")
    values = np.concatenate([curve["difference"].to_numpy() for _, curve in curves])
    positive = np.append(values[values > 0], tolerances)
    lowest, highest = (math.floor(math.log10(positive.min())), math.ceil(math.log10(positive.max()) + 0.3))
    # Below the smallest difference the axis is linear and ends in 0: equal to the last bit.
    axes.set_yscale("symlog", linthresh=10.0**lowest, linscale=0.5)
    axes.set_ylim(0, 10.0**highest)
    decades = range(lowest, highest + 1, max(1, math.ceil((highest - lowest) / 6)))
    axes.yaxis.set_major_locator(FixedLocator([0.0, *(10.0**exponent for exponent in decades)]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(POWERS_OF_TEN)
    axes.set_xlabel("step")
    axes.set_ylabel("|difference of the loss|")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="x", visible=False)
    legend(figure)
    return figure, table[["run", "step", "difference"]]


def _distribution(axes: Axes, table: pd.DataFrame) -> None:
    """Of very many runs the largest difference at each step, and the median."""
    bands, largest = crowd(table, "step", "difference"), table.groupby("step")["difference"].max()
    axes.plot(
        largest.index, largest, color=PALETTE[1], linewidth=1.2, label=f"largest of {table['run'].nunique()} runs"
    )
    axes.plot(bands["step"], bands["median"], color=PALETTE[0], linewidth=1.2, label="median")


def lengths_figure(corpora: Sequence[CorpusCard]) -> Drawn | None:
    """Share of a corpus's documents by their length in tokens, in powers of two."""
    corpora = [corpus for corpus in corpora if corpus.documents]
    if not corpora:
        return None
    figure, axes = plt.subplots(figsize=(WIDTH, 3.0))
    used = [power for corpus in corpora for power, count in enumerate(corpus.lengths) if count]
    first, last = min(used), max(used)
    rows: list[dict[str, Any]] = []
    for number, corpus in enumerate(corpora):
        shares = [count / corpus.documents for count in corpus.lengths[first : last + 1]]
        rows += [
            {"corpus": corpus.name, "tokens_from": 2**power, "tokens_below": 2 ** (power + 1), "share": share}
            for power, share in enumerate(shares, first)
        ]
        axes.stairs(
            shares,
            range(first, last + 2),
            color=PALETTE[number % len(PALETTE)],
            fill=len(corpora) == 1,
            linewidth=0 if len(corpora) == 1 else 1.6,  # an edge would be white, and seen in the dark
            label=corpus.name,
        )
    axes.set_xticks(range(first, last + 2))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(lambda power, _: tokens_text(2 ** int(power)))
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens per document")
    axes.set_ylabel("share of documents")
    axes.grid(axis="x", visible=False)
    if len(corpora) > 1:
        legend(figure)
    return figure, pd.DataFrame(rows)


def tokens_text(count: int) -> str:
    """`512`, `4k`, `1M`: powers of two as people call them."""
    for size, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k")):
        if count >= size:
            return f"{count // size}{letter}"
    return str(count)


def _stride(points: int) -> int:
    return max(1, math.ceil(points / MOST_POINTS))
