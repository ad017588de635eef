"""The figures of every report; those without data are omitted.

Most are specifications like those of `report.figures`. More complex ones have a function, which returns the figure and
a table of its data, or None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from megaboa.config.models.outputs import Figure
from megaboa.metrics import BITS
from megaboa.observe.goodput import STARTUP
from megaboa.records import AgreementSpec
from megaboa.report.agreement import differences, limits_of
from megaboa.report.corpora import CorpusCard
from megaboa.report.frames import SEED, Frames
from megaboa.report.kinds import MOST_BARS, MOST_POINTS, crowd
from megaboa.report.runs import RunResult
from megaboa.report.style import INK, MOST_ENTRIES, MOST_PLAIN, PALETTE, PERCENT, POWERS_OF_TEN, WIDTH, Shades, legend

WithTable = tuple[Drawing, pd.DataFrame]
Curve = tuple[RunResult, pd.DataFrame]  # of a run, its steps and what is drawn of them
# In the order of a run. Time in the queue, or without a request for the run, is left out because it holds no machine.
COLOURS = {
    "startup": PALETTE[5],
    "compile": PALETTE[3],
    "productive": PALETTE[0],
    "evaluation": PALETTE[4],
    "checkpoint": PALETTE[2],
    "lost": PALETTE[1],
    "idle": PALETTE[7],
}
MOST_SAMPLED = len(PALETTE)  # number of runs whose GPUs are drawn
COURSES = {
    "watts": "power (W)",
    "celsius": "temperature (°C)",
    "sm_mhz": "SM clock (MHz)",
    "utilisation": "time with a kernel (%)",
}
LOSS = Figure(name="loss", kind="line", data="steps", x="step", y="loss", y_label="training loss")
VALIDATION = Figure(
    name="validation",
    kind="line",
    data="validation",
    x="step",
    y="loss",
    filter={"set": "main"},
    y_label="validation loss",
)
LOSS_BY_TOKENS = Figure(name="loss_by_tokens", kind="line", data="steps", x="tokens", y="loss", y_label="training loss")
EXPORTS = Figure(name="along", kind="line", data="exports", x="step", y="value", facet="name")
LEARNING_RATE = Figure(name="learning_rate", kind="line", data="steps", x="step", y="lr")
STEP_TIME = Figure(name="step_time", kind="bar", x="run", y="step_seconds")
STEP_TIMES = Figure(
    name="step_times",
    kind="box",
    data="steps",
    x="run",
    y="seconds",
    filter={"warm": "true"},
    y_label="time of a step (seconds)",
)
THROUGHPUT = Figure(name="throughput", kind="bar", x="run", y="tokens_per_second")
MFU = Figure(name="mfu", kind="bar", x="run", y="mfu")
SCALING = Figure(name="scaling", kind="scatter", x="world_size", y="scaling_efficiency", hue="layout")
MEMORY = Figure(
    name="memory", kind="scatter", x="memory.predicted_gib", y="memory.measured_gib", hue="layout", diagonal=True
)
STANDARD = (LOSS, VALIDATION, LOSS_BY_TOKENS, LEARNING_RATE, STEP_TIME, STEP_TIMES, THROUGHPUT, MFU, SCALING, MEMORY)
LIMIT = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 2))}  # the look of a limit of differences
SWEPT = "sweep"  # the heat map of a sweep over two numbers


def agreement_figure(agreements: Sequence[AgreementSpec], runs: list[RunResult], shades: Shades) -> WithTable | None:
    """Absolute difference from the reference by step, on a logarithmic axis that ends at zero."""
    known = {run.name: run for run in runs}
    curves = _differences(agreements, known)
    if not curves:
        return None
    figure, axes = plt.subplots(figsize=(WIDTH, 3.5))
    table = pd.concat([curve.assign(run=run.name, model=run.model) for run, curve in curves], ignore_index=True)
    if len(curves) > MOST_ENTRIES:
        _distribution(axes, table)
    else:
        _curves(axes, curves, shades)
    tolerances = sorted({agreement.tolerance for agreement in agreements if not agreement.twins})
    for tolerance in tolerances:
        axes.axhline(tolerance, **LIMIT, label=f"tolerance {tolerance:g}")
    values = np.concatenate([table["difference"].to_numpy(), *_limits_by_twins(axes, agreements, known)])
    _down_to_equal(axes, np.append(values[values > 0], tolerances))
    axes.set_xlabel("step")
    axes.set_ylabel("|difference of the loss|")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(axis="x", visible=False)
    legend(figure)
    return figure, table[["run", "step", "difference"]]


def _differences(agreements: Sequence[AgreementSpec], known: Mapping[str, RunResult]) -> list[Curve]:
    """Each run's differences from its reference. Of steps that share a point the largest, so that none is hidden."""
    curves = [
        (known[name], differences(known[agreement.reference], known[name]))
        for agreement in agreements
        for name in agreement.runs
        if name in known and agreement.reference in known and name != agreement.reference
    ]
    stride = _stride(sum(len(curve) for _, curve in curves))
    return [(run, curve.groupby((curve["step"] - 1) // stride).max()) for run, curve in curves if not curve.empty]


def _curves(axes: Axes, curves: Sequence[Curve], shades: Shades) -> None:
    for run, curve in curves:
        level = run.model if shades.column == "model" else run.name
        axes.plot(
            curve["step"],
            curve["difference"],
            color=shades.of(level),
            label=shades.text(level),
            linewidth=1,
            linestyle=shades.dash(level) if level == run.name and len(curves) > MOST_PLAIN else "-",
            marker="o",
            markersize=3 if len(curve) <= 60 else 0,
        )


def _limits_by_twins(
    axes: Axes, agreements: Sequence[AgreementSpec], known: Mapping[str, RunResult]
) -> Iterator[np.ndarray]:
    """Draws what the twins of each reference allow; yields its values."""
    for agreement in agreements:
        if agreement.twins and {agreement.reference, *agreement.twins} <= known.keys():
            reference, twins = known[agreement.reference], [known[twin] for twin in agreement.twins]
            limits = limits_of(reference.steps["step"], agreement, reference, twins)
            text = f"what twins of {agreement.reference} allow"
            axes.plot(limits.step, limits.difference, **LIMIT, label=text)
            yield limits.difference


def _down_to_equal(axes: Axes, positive: np.ndarray) -> None:
    """A logarithmic axis. Below the smallest value it is linear and ends at 0, which means equal to the last bit."""
    lowest, highest = (math.floor(math.log10(positive.min())), math.ceil(math.log10(positive.max()) + 0.3))
    axes.set_yscale("symlog", linthresh=10.0**lowest, linscale=0.5)
    axes.set_ylim(0, 10.0**highest)
    decades = range(lowest, highest + 1, max(1, math.ceil((highest - lowest) / 6)))
    axes.yaxis.set_major_locator(FixedLocator([0.0, *(10.0**exponent for exponent in decades)]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(POWERS_OF_TEN)


def _distribution(axes: Axes, table: pd.DataFrame) -> None:
    """The largest difference at each step, and the median, for very many runs."""
    bands, largest = crowd(table, "step", "difference"), table.groupby("step")["difference"].max()
    axes.plot(
        largest.index, largest, color=PALETTE[1], linewidth=1.2, label=f"largest of {table['run'].nunique()} runs"
    )
    axes.plot(bands["step"], bands["median"], color=PALETTE[0], linewidth=1.2, label="median")


def lengths_figure(corpora: Sequence[CorpusCard]) -> WithTable | None:
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
            linewidth=0 if len(corpora) == 1 else 1.6,  # an edge would be white, and visible in the dark theme
            label=corpus.name,
        )
    axes.set_xticks(range(first, last + 2))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(lambda power, _: tokens_text(2 ** int(power)))
    axes.yaxis.set_major_formatter(PERCENT)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens per document")
    axes.set_ylabel("share of documents")
    axes.grid(axis="x", visible=False)
    if len(corpora) > 1:
        legend(figure)
    return figure, pd.DataFrame(rows)


def tokens_text(count: int) -> str:
    """A number of tokens as text: `512`, `4k`, `1M`."""
    for size, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k")):
        if count >= size:
            return f"{count // size}{letter}"
    return str(count)


def sampled(runs: list[RunResult]) -> list[RunResult]:
    """The runs with samples of their GPUs."""
    return [run for run in runs if ((run.summary or {}).get("gpus") or {}).get("course")]


def gpus_figure(runs: list[RunResult]) -> WithTable | None:
    """Power, temperature, clock and utilisation over a run's time: the median GPU, and the range over all."""
    runs = sampled(runs)[:MOST_SAMPLED]
    if not runs:
        return None
    table = course_table(runs)
    longest = table["minutes"].max()
    unit, scale = ("hours", 60) if longest > 180 else ("minutes", 1) if longest > 3 else ("seconds", 1 / 60)
    figure, grid = plt.subplots(2, 2, figsize=(WIDTH, 4.6), sharex=True, squeeze=False)
    for axes, (name, text) in zip(grid.flat, COURSES.items(), strict=True):
        for number, run in enumerate(runs):
            part = table[(table["run"] == run.name) & table[name].notna()]
            for _, attempt in part.groupby("attempt"):
                time, colour = attempt["minutes"] / scale, PALETTE[number]
                axes.fill_between(
                    time, attempt[f"{name}.least"], attempt[f"{name}.most"], color=colour, alpha=0.2, linewidth=0
                )
                marker = "o" if len(attempt) <= 12 else None
                axes.plot(time, attempt[name], color=colour, label=run.name, linewidth=1.3, marker=marker, markersize=3)
            slowed = part[part["throttled"] > 0]
            if name == "sm_mhz" and len(slowed):
                axes.plot(
                    slowed["minutes"] / scale,
                    slowed[f"{name}.least"],
                    color=INK,
                    label="slowed by heat or the power supply",
                    linestyle="none",
                    marker="o",
                    markersize=2.5,
                )
        axes.set_title(text, fontsize=9.5, color=INK)
        axes.set_ylim(0, 105 if name == "utilisation" else None)
        axes.grid(axis="x", visible=False)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_locator(MaxNLocator(5))
    for axes in grid[1]:
        axes.set_xlabel(f"time ({unit})")
    legend(figure)
    return figure, table


def course_table(runs: list[RunResult]) -> pd.DataFrame:
    rows = []
    for run in runs:
        for moment in run.summary["gpus"]["course"]:
            row = {"run": run.name, "attempt": moment["attempt"], "minutes": moment["seconds"] / 60}
            for name in COURSES:
                least, median, most = moment["values"].get(name, (None, None, None))
                row |= {name: median, f"{name}.least": least, f"{name}.most": most}
            rows.append(row | {"throttled": moment["throttled"]})
    return pd.DataFrame(rows).astype({name: float for name in rows[0] if name not in ("run", "attempt")})


def _stride(points: int) -> int:
    return max(1, math.ceil(points / MOST_POINTS))


def known(runs: list[RunResult]) -> list[RunResult]:
    """The runs that held a machine."""
    return [run for run in runs if run.goodput and run.goodput.allocated_seconds]


def goodput_figure(runs: list[RunResult]) -> WithTable | None:
    """The shares of a run's allocated time, by use."""
    runs = known(runs)[:MOST_BARS]
    if not runs:
        return None
    figure, axes = plt.subplots(figsize=(WIDTH, 1.3 + 0.3 * len(runs)))
    begins = [0.0] * len(runs)
    for kind, colour in COLOURS.items():
        shares = [run.goodput.seconds[kind] / run.goodput.allocated_seconds for run in runs]
        if any(shares):
            axes.barh(range(len(runs)), shares, left=begins, height=0.62, linewidth=0, color=colour, label=kind)
        begins = [begin + share for begin, share in zip(begins, shares, strict=True)]
    for row, run in enumerate(runs):
        text = f"{run.goodput.goodput:.0%}"
        axes.annotate(text, (1.0, row), xytext=(5, 0), textcoords="offset points", va="center", color=INK, fontsize=9)
    axes.set_yticks(range(len(runs)), [run.name for run in runs], color=INK)
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.set_xlim(0, 1.1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.xaxis.set_major_formatter(PERCENT)
    axes.grid(axis="y", visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("share of the time in which the run held its machines")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, handlelength=1.0, columnspacing=1.2)
    return figure, shares_table(runs)


def shares_table(runs: list[RunResult]) -> pd.DataFrame:
    rows = [
        {"run": run.name, "kind": kind, "time_share": run.goodput.seconds[kind] / run.goodput.allocated_seconds}
        for run in runs
        for kind in COLOURS
    ]
    return pd.DataFrame(rows)


def time_rows(runs: list[RunResult]) -> list[dict[str, Any]]:
    """Rows of the page's table of times. Kinds that no run has spent time on have no column."""
    runs = known(runs)
    kinds = [kind for kind in ("queue", *COLOURS) if any(run.goodput.seconds[kind] for run in runs)]
    return [
        {
            "run": run.name,
            "goodput": run.goodput.goodput,
            "allocated": run.goodput.allocated_seconds,
            "seconds": {kind: run.goodput.seconds[kind] for kind in kinds},
        }
        for run in runs
    ]


def startup_rows(runs: list[RunResult]) -> list[dict[str, Any]]:
    """The duration of each part of the start, for every attempt that reached its first step."""
    attempts = [(run.name, one) for run in known(runs) for one in run.goodput.attempts if "first_step" in one.startup]
    parts = [part for part in STARTUP if any(part in one.startup for _, one in attempts)]
    return [
        {
            "run": name,
            "attempt": one.attempt,
            "whole": sum(one.startup.values()),
            "seconds": {part: one.startup.get(part) for part in parts},
        }
        for name, one in attempts
    ]


def standard_figures(frames: Frames) -> list[Figure]:
    """The specifications of the standard figures. A sweep's seeds are averaged; the loss by tokens is included only if
    steps differ in their tokens. With different tokenizers validation losses are drawn per byte, if all runs have
    them."""
    figures = [figure for figure in STANDARD if figure is not LOSS_BY_TOKENS or _steps_differ(frames)]
    if frames.varies(SEED):
        curves = {"loss", "validation", "loss_by_tokens"}
        figures = [one.model_copy(update={"over": SEED}) if one.name in curves else one for one in figures]
    if frames.has_several_tokenizers and frames.runs[BITS].notna().all():
        in_bits = {"y": BITS, "y_label": "validation loss (bits per byte)"}
        figures = [one.model_copy(update=in_bits) if one.name == VALIDATION.name else one for one in figures]
    return [*figures, *_heat_map(frames), *([] if frames.exports.empty else [EXPORTS])]


def _steps_differ(frames: Frames) -> bool:
    return (frames.varies("gbs") or frames.varies("seq_length")) and not frames.steps.empty


def _heat_map(frames: Frames) -> list[Figure]:
    """A heat map, if the sweep has two numeric axes and enough runs."""
    axes = [name for name in frames.swept if name != SEED and frames.varies(name) and frames.is_number(name)]
    if len(axes) != 2 or min(frames.runs[name].nunique() for name in axes) < 2 or len(frames.runs) < 4:
        return []
    return [Figure(name=SWEPT, kind="heat", x=axes[0], y=axes[1], value="loss.tail_mean")]
