"""The report's part about profiles: the analysis of each run, and its figures.

A figure is None if it has no data.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megaboa.paths import ExperimentFolder
from megaboa.records import Analysis, plain, read_if_there
from megaboa.report import style
from megaboa.report.style import GRID, INK, PALETTE, PERCENT, WIDTH, LogText, Shown, below

MOST_PROFILES = 6  # number of runs whose figures are drawn
PREFIX = "profile_"
PARTS = {
    "compute": ("computing", PALETTE[0]),
    "exposed": ("exposed communication", PALETTE[1]),
    "copies_exposed": ("copies", PALETTE[5]),
    "idle": ("idle", "#c5cad3"),
}
CLASS_COLOURS = {
    "GEMM": PALETTE[0],
    "attention": PALETTE[2],
    "norm": PALETTE[4],
    "elementwise": PALETTE[5],
    "MoE": PALETTE[6],
    "optimizer": PALETTE[3],
    "communication": PALETTE[1],
    "other": PALETTE[7],
    "copies": INK,
}
MOST_RANKS = 64
MOST_LINES = 8
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


@dataclass(frozen=True)
class Profile:
    run: str
    document: Analysis

    @property
    def tool(self) -> str:
        """The profilers and devices: `pytorch on NVIDIA H200`."""
        kinds = sorted({capture.kind for capture in self.document.captures})
        devices = sorted({one.device_name for one in self.document.captures if one.device_name})
        return ", ".join(kinds) + (f" on {', '.join(devices)}" if devices else "")


def load_profiles(results: Path, runs: list[str]) -> list[Profile]:
    """The profiles of all profiled runs, in the order of the plan."""
    paths = [(run, ExperimentFolder(results).run(run).analysis) for run in runs]
    return [Profile(run, found) for run, path in paths if (found := read_if_there(Analysis, path))]


def draw_profiles(profiles: list[Profile], captions: dict[str, str], folder: Path) -> dict[str, list[Shown]]:
    """Draw the figures for the page, by run, and remove those of earlier reports."""
    for path in folder.glob(f"{PREFIX}*.svg"):
        style.remove(folder, path.stem)
    drawn = {}
    for number, profile in enumerate(profiles[:MOST_PROFILES]):
        figures = draw_all(profile.document, folder, f"{PREFIX}{number}_")
        drawn[profile.run] = [
            Shown(name, svg, captions[f"{PREFIX}{name}"], _note(name, profile.document))
            for name, svg in figures.items()
        ]
    return drawn


def draw_all(document: Analysis, folder: Path, prefix: str = "") -> dict[str, Markup]:
    """Draw and save every figure with data."""
    style.apply_style()
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, make in FIGURES.items():
        figure = make(document)
        if figure is not None:
            drawn[name] = Markup(style.save(figure, folder, f"{prefix}{name}"))
            plt.close(figure)
    return drawn


def _note(name: str, document: Analysis) -> str:
    if name == "timeline":
        return f"Step {document.timeline.step} of rank {document.timeline.rank}."
    rows = document.ranks
    said = f"{rows[0].window.split(' of ')[0]}, n = {sum(row.n for row in rows)}"
    return said[:1].upper() + said[1:] + "."


def ranks_figure(document: Analysis) -> Figure | None:
    """Mean milliseconds of a step by rank: computation, exposed communication and copies, and idle time."""
    rows = document.ranks[:MOST_RANKS]
    table = pd.DataFrame(map(plain, document.budget))
    if not rows or table["compute"].isna().all():
        return None
    means = table.groupby("rank")[list(PARTS)].mean(numeric_only=False).astype(float).fillna(0.0)
    figure, axes = plt.subplots(figsize=(WIDTH, 1.2 + 0.3 * len(rows)))
    left = np.zeros(len(rows))
    for part, (label, colour) in PARTS.items():
        if not table[part].isna().all():
            values = means[part].loc[[row.rank for row in rows]].to_numpy()
            axes.barh(range(len(rows)), values, left=left, height=0.66, color=colour, label=label, linewidth=0)
            left += values
    axes.set_yticks(range(len(rows)), [f"rank {row.rank}" for row in rows], color=INK)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel("milliseconds of a step")
    below(figure, *axes.get_legend_handles_labels(), handlelength=1.0, handleheight=0.9)
    return figure


def classes_figure(document: Analysis) -> Figure | None:
    """Milliseconds per step of every class of kernels: the mean over ranks, and a line from minimum to maximum."""
    rows = [
        {"rank": rank, "class": row.name, "ms": row.ms}
        for rank, detail in document.details.items()
        for row in detail.classes
    ]
    if not rows:
        return None
    table = pd.DataFrame(rows).pivot_table(index="class", columns="rank", values="ms", fill_value=0.0)
    table = table.loc[table.mean(axis=1).sort_values(ascending=False).index]
    figure, axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.3 * len(table)))
    for place, (name, values) in enumerate(table.iterrows()):
        axes.barh(place, values.mean(), height=0.62, color=CLASS_COLOURS[name], linewidth=0)
        if len(values) > 1:
            axes.plot([values.min(), values.max()], [place, place], color=INK, linewidth=1.4, solid_capstyle="butt")
        place_of_text = (max(values.max(), values.mean()), place)
        text = f"{values.mean():,.3g}"
        axes.annotate(text, place_of_text, (5, 0), textcoords="offset points", va="center", color=INK, fontsize=9)
    axes.set_yticks(range(len(table)), table.index, color=INK)
    axes.set_ylim(len(table) - 0.4, -0.6)
    axes.set_xlim(0, float(table.to_numpy().max()) * 1.15)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds of a step")
    return figure


def exposed_figure(document: Analysis) -> Figure | None:
    """Share of every step in exposed communication, by rank."""
    table = pd.DataFrame(map(plain, document.budget))
    if table.empty or table["exposed"].isna().all() or not table["communication"].any():
        return None
    table["share"] = table["exposed"].astype(float) / table["wall"]
    order = sorted(table["rank"].unique())
    figure, axes = plt.subplots(figsize=(WIDTH, 3.0))
    if len(order) <= MOST_LINES:
        palette = dict(zip(order, PALETTE, strict=False))
        seaborn.lineplot(
            table,
            x="step",
            y="share",
            hue="rank",
            palette=palette,
            marker="o",
            markeredgewidth=0,
            ax=axes,
            legend=False,
        )
        handles = [Patch(color=colour) for colour in palette.values()]
        if len(order) > 1:
            below(figure, handles, [f"rank {rank}" for rank in palette], handlelength=1.0, handleheight=0.9)
    else:
        seaborn.lineplot(
            table, x="step", y="share", estimator="median", errorbar=("pi", 100), color=PALETTE[1], ax=axes
        )
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(PERCENT)
    axes.set_ylim(0, max(0.01, 1.12 * float(table["share"].max())))
    axes.set_xlabel("step")
    axes.set_ylabel("exposed communication")
    axes.grid(axis="x", visible=False)
    return figure


def heat_figure(document: Analysis) -> Figure | None:
    """Each rank's own work in each step, relative to the median of the ranks of the same part."""
    table = pd.DataFrame(map(plain, document.budget))
    if table.empty or table["rank"].nunique() < 2 or table["compute"].isna().any():
        return None
    table["work"] = table["compute"] + table["copies_exposed"].astype(float).fillna(0.0)
    table["part"] = table["rank"].map({row.rank: row.part for row in document.ranks})
    table["difference"] = table["work"] / table.groupby(["part", "step"])["work"].transform("median") - 1
    grid = table.pivot_table(index="rank", columns="step", values="difference") * 100
    limit = max(1.0, float(np.nanmax(np.abs(grid.to_numpy()))))
    figure, axes = plt.subplots(figsize=(WIDTH, 1.4 + 0.28 * min(len(grid), MOST_RANKS)))
    bar = {"label": "% from the median", "shrink": 0.9}
    seaborn.heatmap(grid, cmap="vlag", vmin=-limit, vmax=limit, ax=axes, cbar_kws=bar, linewidths=0.5, linecolor=GRID)
    axes.set_yticklabels([f"rank {label.get_text()}" for label in axes.get_yticklabels()], rotation=0, color=INK)
    axes.set_ylabel("")
    axes.set_xlabel("step")
    axes.grid(visible=False)
    return figure


def sizes_figure(document: Analysis) -> Figure | None:
    """Size and bandwidth of single collectives, on two logarithmic axes."""
    rows = [plain(point) for detail in document.details.values() for point in detail.points]
    if not rows:
        return None
    table = pd.DataFrame(rows)
    order = sorted(table["operation"].unique())
    figure, axes = plt.subplots(figsize=(WIDTH, 3.2))
    palette = dict(zip(order, PALETTE * 2, strict=False))
    seaborn.scatterplot(
        table,
        x="bytes",
        y="GBps",
        hue="operation",
        palette=palette,
        s=22,
        alpha=0.6,
        linewidth=0,
        ax=axes,
        legend=False,
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: bytes_text(size)))
    axes.yaxis.set_major_formatter(LogText())
    axes.yaxis.set_minor_formatter(LogText(labelOnlyBase=False))
    axes.set_xlabel("size of the message")
    axes.set_ylabel("GB/s")
    handles = [Patch(color=colour) for colour in palette.values()]
    below(figure, handles, list(palette), handlelength=1.0, handleheight=0.9)
    return figure


def timeline_figure(document: Analysis) -> Figure | None:
    """One step of one rank: what every stream does over time."""
    drawn = document.timeline
    if not drawn or not drawn.rows:
        return None
    lanes = list(dict.fromkeys(row.lane for row in drawn.rows))
    figure, axes = plt.subplots(figsize=(WIDTH * 1.45, 1.3 + 0.36 * len(lanes)))
    for row in drawn.rows:
        bars = [(begin, max(end - begin, 0.0)) for begin, end in row.spans]
        place = (lanes.index(row.lane) - 0.38, 0.76)
        axes.broken_barh(bars, place, facecolors=CLASS_COLOURS[row.name], linewidth=0)
    _finish_timeline(axes, lanes, drawn.wall)
    used = dict.fromkeys(row.name for row in drawn.rows)
    handles = [Patch(color=CLASS_COLOURS[name], label=name) for name in CLASS_COLOURS if name in used]
    below(figure, handles, [patch.get_label() for patch in handles], handlelength=1.0, handleheight=0.9)
    return figure


def _finish_timeline(axes: Axes, lanes: list[str], wall: float) -> None:
    axes.set_yticks(range(len(lanes)), lanes, color=INK)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, wall)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds since the step's begin")


def bytes_text(size: float) -> str:
    """A size as text: `64 KiB`."""
    value, unit = next(((size / factor, unit) for factor, unit in UNITS if size >= factor), (size, "B"))
    return f"{value:.3g} {unit}"


FIGURES = {
    "ranks": ranks_figure,
    "classes": classes_figure,
    "exposed": exposed_figure,
    "heat": heat_figure,
    "sizes": sizes_figure,
    "timeline": timeline_figure,
}
