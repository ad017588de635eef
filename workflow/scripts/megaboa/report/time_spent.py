"""Where the time of the runs went: one bar for each, and a table."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from megaboa.report.figures import Drawn
from megaboa.report.kinds import MOST_BARS
from megaboa.report.runs import RunResult
from megaboa.report.style import INK, PALETTE, WIDTH

# In the order of a run. Waiting in the queue, and time in which nobody asked for the run, is nobody's waste.
COLOURS = {
    "startup": PALETTE[5],
    "compile": PALETTE[3],
    "productive": PALETTE[0],
    "evaluation": PALETTE[4],
    "checkpoint": PALETTE[2],
    "lost": PALETTE[1],
    "idle": PALETTE[7],
}


def known(runs: list[RunResult]) -> list[RunResult]:
    """The runs that held a machine."""
    return [run for run in runs if run.goodput and run.goodput["allocated_seconds"]]


def goodput_figure(runs: list[RunResult]) -> Drawn | None:
    """Share of the time in which a run held its machines, by what it did with it."""
    runs = known(runs)[:MOST_BARS]
    if not runs:
        return None
    figure, axes = plt.subplots(figsize=(WIDTH, 1.3 + 0.3 * len(runs)))
    begins = [0.0] * len(runs)
    for kind, colour in COLOURS.items():
        shares = [run.goodput["seconds"][kind] / run.goodput["allocated_seconds"] for run in runs]
        if any(shares):
            axes.barh(range(len(runs)), shares, left=begins, height=0.62, linewidth=0, color=colour, label=kind)
        begins = [begin + share for begin, share in zip(begins, shares, strict=True)]
    for row, run in enumerate(runs):
        text = f"{run.goodput['goodput']:.0%}"
        axes.annotate(text, (1.0, row), xytext=(5, 0), textcoords="offset points", va="center", color=INK, fontsize=9)
    axes.set_yticks(range(len(runs)), [run.name for run in runs], color=INK)
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.set_xlim(0, 1.1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.grid(axis="y", visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("share of the time in which the run held its machines")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, handlelength=1.0, columnspacing=1.2)
    return figure, shares_table(runs)


def shares_table(runs: list[RunResult]) -> pd.DataFrame:
    rows = [
        {"run": run.name, "kind": kind, "time_share": run.goodput["seconds"][kind] / run.goodput["allocated_seconds"]}
        for run in runs
        for kind in COLOURS
    ]
    return pd.DataFrame(rows)


def time_rows(runs: list[RunResult]) -> list[dict[str, Any]]:
    """For the page's table; kinds without a second in any run have no column."""
    runs = known(runs)
    kinds = [kind for kind in ("queue", *COLOURS) if any(run.goodput["seconds"][kind] for run in runs)]
    return [
        {
            "run": run.name,
            "goodput": run.goodput["goodput"],
            "allocated": run.goodput["allocated_seconds"],
            "seconds": {kind: run.goodput["seconds"][kind] for kind in kinds},
        }
        for run in runs
    ]
