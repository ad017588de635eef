"""The figures of the report. Each is a function of what is plotted and gives None where there is nothing to plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from megaboa.report.checks import differences
from megaboa.report.colours import Colours, legend
from megaboa.report.corpora import CorpusCard
from megaboa.report.runs import RunResult
from megaboa.report.style import INK, PALETTE, POWERS_OF_TEN, WIDTH

# Points that a figure holds before only every so many-th step is drawn.
MOST_POINTS = 20_000
MOST_BARS = 40


def loss_figure(runs: list[RunResult], colours: Colours) -> Figure | None:
    """Training loss by step, every run on one set of axes."""
    return _curves(runs, colours, "training loss", lambda run: run.steps[["step", "loss"]])


def validation_figure(runs: list[RunResult], colours: Colours) -> Figure | None:
    """Validation loss by step."""
    runs = [run for run in runs if not _validation(run).empty]
    return _curves(runs, colours, "validation loss", _validation, marker="o")


def agreement_figure(agreements: list[dict[str, Any]], runs: list[RunResult], colours: Colours) -> Figure | None:
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
    for run, curve in curves:
        # Of steps that share a point the largest difference is shown: none may hide.
        curve = curve.groupby((curve["step"] - 1) // stride).max()
        axes.plot(
            curve["step"],
            curve["difference"],
            color=colours.of(run),
            label=colours.label(run),
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
    _finish(axes, "|difference of the loss|")
    legend(axes)
    return figure


def step_time_figure(runs: list[RunResult], colours: Colours) -> Figure | None:
    """Median step time of every run with its 5th to 95th percentile."""
    return _bars(runs, colours, "step_seconds", "step time (seconds)", duration, smallest_first=True)


def throughput_figure(runs: list[RunResult], colours: Colours) -> Figure | None:
    """Median tokens per second of every run with the 5th to 95th percentile."""
    return _bars(runs, colours, "tokens_per_second", "tokens per second", lambda value: f"{value:,.0f}")


def lengths_figure(corpora: Sequence[CorpusCard]) -> Figure | None:
    """Share of a corpus's documents by their length in tokens, in powers of two."""
    corpora = [corpus for corpus in corpora if corpus.documents]
    if not corpora:
        return None
    figure, axes = plt.subplots(figsize=(WIDTH, 3.0))
    used = [power for corpus in corpora for power, count in enumerate(corpus.lengths) if count]
    first, last = min(used), max(used)
    for number, corpus in enumerate(corpora):
        shares = [count / corpus.documents for count in corpus.lengths[first : last + 1]]
        axes.stairs(
            shares,
            range(first, last + 2),
            color=PALETTE[number % len(PALETTE)],
            fill=len(corpora) == 1,
            linewidth=1.6,
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
        legend(axes)
    return figure


def tokens_text(count: int) -> str:
    """`512`, `4k`, `1M`: powers of two as people call them."""
    for size, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k")):
        if count >= size:
            return f"{count // size}{letter}"
    return str(count)


def _curves(
    runs: list[RunResult],
    colours: Colours,
    label: str,
    values: Callable[[RunResult], pd.DataFrame],
    marker: str | None = None,
) -> Figure | None:
    if not runs:
        return None
    stride = _stride(sum(len(values(run)) for run in runs))
    figure, axes = plt.subplots(figsize=(WIDTH, 3.5))
    for index, run in enumerate(runs):
        curve = values(run).iloc[::stride]
        # Curves that agree lie on each other: the first are drawn broad, so that each shows at the rims of the next.
        width = 1.3 + 0.6 * (len(runs) - 1 - index) if colours.few else 1.0
        axes.plot(
            curve.iloc[:, 0],
            curve.iloc[:, 1],
            color=colours.of(run),
            label=colours.label(run),
            linewidth=width,
            alpha=1.0 if colours.few else 0.55,
            marker=marker,
            markersize=width + 2,
            solid_capstyle="round",
        )
    _finish(axes, label)
    legend(axes)
    return figure


def _bars(
    runs: list[RunResult],
    colours: Colours,
    name: str,
    label: str,
    text: Callable[[float], str],
    smallest_first: bool = False,
) -> Figure | None:
    measured = [(run, run.summary[name]) for run in runs if run.summary[name]]
    if not measured:
        return None
    if len(measured) > MOST_BARS:
        best_first = sorted(measured, key=lambda item: item[1]["median"], reverse=not smallest_first)
        measured = best_first[:MOST_BARS]
    figure, axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.3 * len(measured)))
    end = max(spread["p95"] for _, spread in measured)
    for row, (run, spread) in enumerate(measured):
        axes.barh(row, spread["median"], height=0.62, linewidth=0, color=colours.of(run), label=colours.label(run))
        axes.plot([spread["p5"], spread["p95"]], [row, row], color=INK, linewidth=1.4, solid_capstyle="butt")
        axes.annotate(
            text(spread["median"]),
            (max(spread["p95"], spread["median"]), row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=9,
        )
    axes.set_yticks(range(len(measured)), [run.name for run, _ in measured], color=INK)
    axes.set_ylim(len(measured) - 0.4, -0.6)
    axes.set_xlim(0, end * 1.2)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.grid(axis="y", visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(label)
    if colours.by_model:  # else the names beside the bars say it
        legend(axes)
    return figure


def _finish(axes: Axes, label: str) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="x", visible=False)


def _validation(run: RunResult) -> pd.DataFrame:
    rows = [(entry["step"], entry["losses"].get("lm loss")) for entry in run.summary["validation"]]
    return pd.DataFrame(rows, columns=["step", "loss"]).dropna()


def _stride(points: int) -> int:
    return max(1, math.ceil(points / MOST_POINTS))


def duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
