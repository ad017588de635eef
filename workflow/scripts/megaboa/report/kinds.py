"""The kinds of figures. Each draws one tidy table on one set of axes, according to the figure's specification.

Very many curves are summarized: by their mean with its confidence interval, or by their distribution.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from megaboa.check.refusals import some_of
from megaboa.config.models.outputs import Figure
from megaboa.metrics import label, named
from megaboa.report.fits import FLOP, Fit
from megaboa.report.frames import FLOPS, NOT_SET, PARAMS, TOKENS, UNKNOWN
from megaboa.report.intervals import LEVEL, student
from megaboa.report.style import (
    DASHES,
    FORMATS,
    GRID,
    INK,
    MARKERS,
    MOST_ENTRIES,
    MOST_PLAIN,
    MUTED,
    NAMES,
    Shades,
    finish,
    in_field,
    is_number,
    legend,
    number,
    places,
    text_of,
)

MOST_POINTS = 20_000  # a figure with more points shows only every n-th step
MOST_BARS = 40
FEW_POINTS = 12  # curves with no more have markers
FEWEST_VALUES = 3  # fewest values for a confidence interval
MOST_FACETS = 12
NEXT_TO = 0.68  # distance of bars of one name; those of different names are 1 apart
SCHEDULED = ("lr",)  # columns of steps that the configuration decides, so that runs have them in common
_QUANTILES = {"p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95}
MOST_PLACES = 500  # number of places on x at which the distribution of very many curves is computed


def draw(
    spec: Figure, table: pd.DataFrame, shades: Shades, fits: Mapping[str, Fit] | None = None
) -> tuple[Drawing, pd.DataFrame] | None:
    """The figure and a table of its data, or None if the table is empty."""
    if table.empty:
        return None
    parts = (
        {"": table} if spec.facet is None else {text_of(k): part for k, part in table.groupby(spec.facet, sort=True)}
    )
    parts = dict(list(parts.items())[:MOST_FACETS])
    columns = min(2, len(parts))
    lines = math.ceil(len(parts) / columns)
    height = _height(spec, table) if len(parts) == 1 else 2.6 * lines
    look = FORMATS[spec.format]
    figure, grid = plt.subplots(lines, columns, figsize=(look.width, height * look.height), squeeze=False)
    shown = []
    for axes, (name, part) in zip(grid.flat, parts.items(), strict=False):
        shown.append(KINDS[spec.kind](axes, part, spec, shades))
        finish(axes, spec)
        if fits:
            shown[-1] = fitted(axes, shown[-1], spec, shades, fits)
        if spec.direct:
            direct(axes, part, spec, shades)
        if name:
            axes.set_title(f"{label(spec.facet)} {name}", fontsize=look.small, color=INK)
    for axes in list(grid.flat)[len(parts) :]:
        axes.set_visible(False)
    # names next to bars and boxes replace the legend
    if spec.kind != "heat" and not (spec.kind in ("bar", "box") and spec.x == shades.column):
        legend(figure)
    return figure, pd.concat(shown, ignore_index=True)


def shared(spec: Figure, table: pd.DataFrame) -> bool:
    """Whether bars or boxes stand for several runs, so that none of these may name one."""
    places = [spec.x, *([spec.facet] if spec.facet else [])]
    return spec.kind in ("bar", "box") and bool((table.groupby(places)["run"].nunique() > 1).any())


def _bars(table: pd.DataFrame, spec: Figure) -> list[pd.DataFrame]:
    """The rows of each bar or box: of a value of x or, with `hue`, of a value of both."""
    keys = list(dict.fromkeys([spec.x, spec.hue or spec.x]))
    return [part for _, of_x in table.groupby(spec.x, sort=False) for _, part in of_x.groupby(keys, sort=False)]


def _stand(names: Sequence[object]) -> list[float]:
    """The places of bars or boxes: neighbours of one name close together, with a gap to the next name's."""
    steps = [NEXT_TO if name == before else 1.0 for before, name in pairwise(names)]
    return [0.0, *itertools.accumulate(steps)]


def line(axes: Axes, table: pd.DataFrame, spec: Figure, shades: Shades) -> pd.DataFrame:
    """A curve for each run; or the mean over runs with its band; or the distribution of very many runs."""
    if spec.over is not None:
        return _means(axes, table, spec, shades)
    stride = max(1, math.ceil(len(table) / MOST_POINTS))
    runs = list(dict.fromkeys(table["run"]))
    if len(runs) > MOST_ENTRIES:
        return _crowd(axes, table, spec, shades)
    curves = {run: table[table["run"] == run].sort_values(spec.x, kind="stable").iloc[::stride] for run in runs}
    if _alone(spec, shades) and (len(runs) > MOST_PLAIN or spec.y in SCHEDULED):
        _named_curves(axes, curves, spec, shades)
        return pd.concat(curves.values())
    shown, dashes = [], _levels(axes, table, spec, shades, DASHES)
    for index, curve in enumerate(curves.values()):
        # Equal curves cover each other. The first ones are drawn wider, so that they show at the edges of the next.
        width = 1.3 + 0.6 * (len(runs) - 1 - index) if shades.few and not spec.dash else 1.0
        axes.plot(
            curve[spec.x],
            curve[spec.y],
            color=shades.of(curve[shades.column].iloc[0]),
            label=_entry(spec, shades, curve[shades.column].iloc[0]),
            linewidth=width,
            linestyle=dashes.get(curve[spec.dash].iloc[0], "-") if spec.dash else "-",
            alpha=1.0 if shades.few or spec.dash or spec.direct else 0.55,
            marker="o" if len(curve) <= FEW_POINTS else None,
            markersize=width + 2,
            solid_capstyle="round",
        )
        shown.append(curve)
    return pd.concat(shown)


def _alone(spec: Figure, shades: Shades) -> bool:
    """Whether each curve has a name of its own, and thus may have a dash of its own."""
    return shades.column in NAMES and spec.dash is None and not spec.direct


def _named_curves(axes: Axes, curves: Mapping[str, pd.DataFrame], spec: Figure, shades: Shades) -> None:
    """Many runs' curves, told apart by colours and dashes. Equal curves are drawn once, with the names of all."""
    equal: dict[Any, list[str]] = {}
    for run, curve in curves.items():
        points = (tuple(curve[spec.x]), tuple(curve[spec.y]))
        equal.setdefault(points if spec.facet is None else run, []).append(run)
    firsts = [runs[0] for runs in equal.values()]
    dashed = len(firsts) > MOST_PLAIN or len({shades.of(run) for run in firsts}) < len(firsts)
    for runs in equal.values():
        curve = curves[runs[0]]
        axes.plot(
            curve[spec.x],
            curve[spec.y],
            color=shades.of(runs[0]),
            label=some_of(runs),
            linewidth=1.2,
            linestyle=shades.dash(runs[0]) if dashed else "-",
            marker="o" if len(curve) <= FEW_POINTS else None,
            markersize=3.2,
        )


def _means(axes: Axes, table: pd.DataFrame, spec: Figure, shades: Shades) -> pd.DataFrame:
    shown, dashes = [], _levels(axes, table, spec, shades, DASHES)
    columns = [shades.column, *([spec.dash] if spec.dash else [])]
    dashed = _alone(spec, shades) and MOST_PLAIN < table[shades.column].nunique() <= MOST_ENTRIES
    for levels, part in table.groupby(columns, sort=False):
        band, colour = mean_band(part, spec.x, spec.y), shades.of(levels[0])
        text, dash = _entry(spec, shades, levels[0]), dashes.get(levels[-1], "-") if spec.dash else "-"
        dash = shades.dash(levels[0]) if dashed else dash
        marker = "o" if len(band) <= FEW_POINTS else None  # a mean at one place alone would be no line
        axes.plot(
            *(band[spec.x], band["mean"]),
            **{
                "color": colour,
                "label": text,
                "linewidth": 1.4,
                "linestyle": dash,
                "marker": marker,
                "markersize": 3.5,
            },
        )
        axes.fill_between(band[spec.x], band["low"], band["high"], color=colour, alpha=0.2, linewidth=0)
        shown.append(band.assign(**dict(zip(columns, levels, strict=True))))
    return pd.concat(shown)


def _levels(axes: Axes, table: pd.DataFrame, spec: Figure, shades: Shades, looks: Sequence[Any]) -> dict[Any, Any]:
    """The look of each value of `dash`. The legend shows it in grey, and the colours without it."""
    if spec.dash is None:
        return {}
    levels = list(dict.fromkeys(table[spec.dash]))
    if len(levels) > len(looks):
        raise ValueError(f"dash: {spec.dash} has {len(levels)} values, and no more than {len(looks)} can be told apart")
    drawn, point = dict(zip(levels, looks, strict=False)), looks is MARKERS
    if not spec.direct:
        for level in dict.fromkeys(table[shades.column]):
            look = {"marker": "o", "linestyle": "none"} if point else {}
            axes.plot([], [], color=shades.of(level), label=_named(spec, shades, level), **look)
    for level, look in drawn.items():
        style = {"marker": look, "linestyle": "none"} if point else {"linestyle": look}
        text = f"{level:g}" if is_number(level) else str(level)
        axes.plot([], [], color=MUTED, label=f"{label(spec.dash)} {text}", **style)
    return drawn


def _named(spec: Figure, shades: Shades, level: object) -> str:
    """A legend text. A number needs the name of its column."""
    named = spec.hue and (is_number(level) or level in (NOT_SET, UNKNOWN))
    return f"{label(spec.hue)} {shades.text(level)}" if named else shades.text(level)


def _entry(spec: Figure, shades: Shades, level: object) -> str:
    """The legend entry of a curve; hidden if its name stands next to it, or an entry without its dash exists."""
    return f"_{shades.text(level)}" if spec.direct or spec.dash else _named(spec, shades, level)


def direct(axes: Axes, table: pd.DataFrame, spec: Figure, shades: Shades) -> None:
    """Write the names of colours next to the ends of their curves, and move them apart if they would overlap."""
    size = FORMATS[spec.format].small
    height = size * 1.25 / 72 * axes.figure.dpi / axes.get_window_extent().height
    ends = []
    axes.set_ylim(axes.get_ylim())
    axes.set_xlim(axes.get_xlim())
    for level, part in table.groupby(shades.column, sort=False):
        last = part[part[spec.x] == part[spec.x].max()]
        at = axes.transAxes.inverted().transform(axes.transData.transform((last[spec.x].max(), last[spec.y].mean())))
        ends.append((at[1], level))
    ends.sort(key=lambda end: end[0])
    lowest = [y for y, _ in ends]
    for index in range(1, len(lowest)):
        lowest[index] = max(lowest[index], lowest[index - 1] + height)
    # shift all texts, so that their middle stays that of the curves' ends
    shift = sum(new - end[0] for new, end in zip(lowest, ends, strict=True)) / max(1, len(ends))
    texts = [(y - shift, shades.text(level), shades.of(level)) for y, (_, level) in zip(lowest, ends, strict=True)]
    if spec.hue and any(is_number(level) for _, level in ends):
        texts.append((texts[-1][0] + 1.2 * height, label(spec.hue), MUTED))
    for y, text, colour in texts:
        axes.annotate(
            text,
            (1.0, y),
            (4, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=size,
            annotation_clip=False,
        )


def fitted(axes: Axes, table: pd.DataFrame, spec: Figure, shades: Shades, fits: Mapping[str, Fit]) -> pd.DataFrame:
    """Draw the curves of a fit over its points. The returned table has the fitted value of each point."""
    table = table.assign(fitted=float("nan"))
    if spec.fit == "scaling-law":
        law = fits[""].law
        if law is None:
            return table
        table["fitted"] = law.loss(table[PARAMS], table[TOKENS])
        other = TOKENS if spec.x == PARAMS else PARAMS
        x = _between(table[spec.x], spec)
        for size, part in table.groupby(other):
            params, tokens = (x, size) if spec.x == PARAMS else (size, x if spec.x == TOKENS else x / FLOP / size)
            levels = part[shades.column].unique()
            colour = shades.of(levels[0]) if len(levels) == 1 else MUTED
            axes.plot(x, law.loss(params, tokens), color=colour, linewidth=1.1)
        if spec.x == FLOPS:
            best = law.best_params(x)
            axes.plot(x, law.loss(best, x / FLOP / best), color=INK, linewidth=1.3, linestyle="--", label="best size")
        axes.set_ylim(*_around(table[[spec.y, "fitted"]].to_numpy(), "y" in spec.log))
        return table
    for level, part in table.groupby(shades.column) if spec.hue else [("", table)]:
        found = fits[f"{level}"]
        if found.curve is None:
            continue
        colour = shades.of(level) if spec.hue else INK
        x = _between(part[spec.x], spec)
        low, high = part[spec.y].min(), part[spec.y].max()
        y = found.curve(x)
        seen = (y >= low - 0.1 * (high - low)) & (y <= high + 0.1 * (high - low))
        axes.plot(x[seen], y[seen], color=colour, linewidth=1.1)
        best = found.constants[0]
        axes.axvline(best.value, color=colour, linewidth=0.9, linestyle=":")
        if best.low is not None:
            # clip an interval that is wider than the sweep at the axis
            axes.set_xlim(axes.get_xlim())
            axes.axvspan(best.low, best.high, color=colour, alpha=0.12, linewidth=0)
        table.loc[part.index, "fitted"] = found.curve(part[spec.x].to_numpy(float))
    return table


def _between(values: pd.Series, spec: Figure) -> np.ndarray:
    low, high = values.min(), values.max()
    return np.geomspace(low, high, 100) if "x" in spec.log else np.linspace(low, high, 100)


def _around(values: np.ndarray, log: bool) -> tuple[float, float]:
    """Axis limits around the runs, which cut off a law's curves elsewhere."""
    low, high = np.nanmin(values), np.nanmax(values)
    room = (high / low) ** 0.06 if log else 0.06 * (high - low)
    return (low / room, high * room) if log else (low - room, high + room)


def _crowd(axes: Axes, table: pd.DataFrame, spec: Figure, shades: Shades) -> pd.DataFrame:
    """The distribution of runs: half of them lie in the darker band, nine of ten in the lighter one; the line is their
    median."""
    shown = []
    groups = shades.column if shades.by_group else lambda _: ""
    for name, part in table.groupby(groups, sort=False):
        bands, colour = crowd(part, spec.x, spec.y), shades.of(name) if shades.by_group else shades.first
        for low, high, alpha in (("p5", "p95", 0.16), ("p25", "p75", 0.3)):
            axes.fill_between(bands[spec.x], bands[low], bands[high], color=colour, alpha=alpha, linewidth=0)
        text = shades.text(name) if shades.by_group else f"median of {part['run'].nunique()} runs"
        axes.plot(bands[spec.x], bands["median"], color=colour, linewidth=1.6, label=text)
        shown.append(bands.assign(**({shades.column: name} if shades.by_group else {})))
    last = table.sort_values(spec.x, kind="stable").groupby("run", sort=False)[spec.y].last()
    for run, dash in ((last.idxmin(), (0, (4, 1.5))), (last.idxmax(), (0, (1, 1.5)))):
        curve = table[table["run"] == run].sort_values(spec.x, kind="stable")
        axes.plot(curve[spec.x], curve[spec.y], color=INK, linewidth=0.9, linestyle=dash, label=run)
    return pd.concat(shown)


def bar(axes: Axes, table: pd.DataFrame, spec: Figure, shades: Shades) -> pd.DataFrame:
    """A bar for each value of x, with a line from the 5th to the 95th percentile or, of several runs, from the least to
    the most."""
    low, high = f"{spec.y}.p5", f"{spec.y}.p95"
    rows = []
    for part in _bars(table, spec):
        one = len(part) == 1 and low in part
        ends = (part[low].iloc[0], part[high].iloc[0]) if one else (part[spec.y].min(), part[spec.y].max())
        row = {spec.x: part[spec.x].iloc[0], spec.y: part[spec.y].median(), low: ends[0], high: ends[1]}
        rows.append(row | {shades.column: part[shades.column].iloc[0], "n": len(part)})
    bars = pd.DataFrame(rows)
    if len(bars) > MOST_BARS:
        bars = bars.sort_values(spec.y, ascending=named(spec.y).less_is_better, kind="stable").head(MOST_BARS)
        bars = bars.sort_index() if bars[spec.x].duplicated().any() else bars
    at = _stand(bars[spec.x].tolist())
    for place, row in zip(at, bars.to_dict("records"), strict=True):
        level = row[shades.column]
        axes.barh(
            place, row[spec.y], height=0.62, linewidth=0, color=shades.of(level), label=_named(spec, shades, level)
        )
        axes.plot([row[low], row[high]], [place, place], color=INK, linewidth=1.4, solid_capstyle="butt")
        end = (max(row[high], row[spec.y]), place)
        axes.annotate(
            number(row[spec.y], spec.y), end, (5, 0), textcoords="offset points", va="center", color=INK, fontsize=9
        )
    axes.set_xlim(0, max(bars[high].max(), bars[spec.y].max()) * 1.2 or 1)
    places(axes, [text_of(name) for name in bars[spec.x]], at)
    return bars


def box(axes: Axes, table: pd.DataFrame, spec: Figure, shades: Shades) -> pd.DataFrame:
    """Quartiles and median of y for each value of x, with a line from the 5th to the 95th percentile."""
    rows = []
    for part in _bars(table, spec)[:MOST_BARS]:
        ends = np.percentile(part[spec.y], [5, 25, 50, 75, 95])
        row = dict(zip(("p5", "p25", "median", "p75", "p95"), ends.tolist(), strict=True))
        row = {spec.x: part[spec.x].iloc[0], **{f"{spec.y}.{key}": value for key, value in row.items()}, "n": len(part)}
        rows.append(row | {shades.column: part[shades.column].iloc[0]})
    ends = np.array([[row[f"{spec.y}.p5"], row[f"{spec.y}.p95"]] for row in rows])
    at = _stand([row[spec.x] for row in rows])
    for place, row in zip(at, rows, strict=True):
        p5, p25, median, p75, p95 = (row[f"{spec.y}.{key}"] for key in ("p5", "p25", "median", "p75", "p95"))
        level = row[shades.column]
        axes.plot([p5, p95], [place, place], color=INK, linewidth=1.2, solid_capstyle="butt")
        axes.barh(
            place,
            p75 - p25,
            left=p25,
            height=0.56,
            color=shades.of(level),
            label=_named(spec, shades, level),
            linewidth=0,
        )
        # white in a box; in one too narrow to be seen, it is what is seen
        colour = "white" if p75 - p25 > 0.02 * (ends.max() - ends.min()) else shades.of(level)
        axes.plot([median, median], [place - 0.28, place + 0.28], color=colour, linewidth=1.6)
    # bars begin at zero, for their lengths to be compared; boxes have the axis of their values, or they would be lines
    if ends.min() < ends.max():
        axes.set_xlim(*_around(ends, log=False))
    places(axes, [text_of(row[spec.x]) for row in rows], at)
    return pd.DataFrame(rows)


def scatter(axes: Axes, table: pd.DataFrame, spec: Figure, shades: Shades) -> pd.DataFrame:
    markers = _levels(axes, table, spec, shades, MARKERS)
    marked = _alone(spec, shades) and MOST_PLAIN < table[shades.column].nunique() <= MOST_ENTRIES
    columns = [shades.column, *([spec.dash] if spec.dash else [])]
    for levels, part in table.groupby(columns, sort=False):
        axes.scatter(
            part[spec.x],
            part[spec.y],
            color=shades.of(levels[0]),
            label=_entry(spec, shades, levels[0]),
            marker=shades.marker(levels[0]) if marked else markers.get(levels[-1], "o"),
            s=26 if len(table) <= 60 else 12,
            alpha=0.9 if len(table) <= 60 else 0.55,
            linewidth=0,
        )
    if spec.diagonal:
        ends = [min(table[spec.x].min(), table[spec.y].min()), max(table[spec.x].max(), table[spec.y].max())]
        axes.plot(ends, ends, color=INK, linewidth=0.9, linestyle=(0, (4, 2)), label="equal")
    return table


def heat(axes: Axes, table: pd.DataFrame, spec: Figure, shades: Shades) -> pd.DataFrame:
    """The mean of `value` for every pair of x and y, written into the cells if there is room."""
    means = table.groupby([spec.y, spec.x], as_index=False)[spec.value].mean()
    grid = means.pivot(index=spec.y, columns=spec.x, values=spec.value).sort_index(ascending=False)
    written = grid.map(lambda value: in_field(value, spec.value)) if grid.size <= 64 else False
    reverse = "" if named(spec.value).less_is_better else "_r"
    seaborn.heatmap(
        grid,
        ax=axes,
        cmap=f"viridis{reverse}",
        annot=written,
        fmt="",
        annot_kws={"fontsize": 8.5},
        linewidths=0.5,
        linecolor=GRID,
        cbar_kws={"label": label(spec.value), "shrink": 0.9},
    )
    axes.set_xticks(np.arange(grid.shape[1]) + 0.5, [f"{name:g}" if is_number(name) else name for name in grid.columns])
    axes.set_yticks(np.arange(grid.shape[0]) + 0.5, [f"{name:g}" if is_number(name) else name for name in grid.index])
    axes.tick_params(axis="y", rotation=0)
    return means


KINDS: dict[str, Callable[[Axes, pd.DataFrame, Figure, Shades], pd.DataFrame]] = {
    "line": line,
    "bar": bar,
    "box": box,
    "scatter": scatter,
    "heat": heat,
}


def _height(spec: Figure, table: pd.DataFrame) -> float:
    if spec.kind in ("bar", "box"):
        names = [part[spec.x].iloc[0] for part in _bars(table, spec)[:MOST_BARS]]
        return 1.2 + 0.3 * _stand(names)[-1]
    if spec.kind == "heat":
        return 1.4 + 0.32 * min(20, table[spec.y].nunique())
    return 3.5


def mean_band(table: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """Mean of y at each x, its 95% confidence interval, and the number of values.

    For two values the interval would be useless (12.7 times their error), so the band spans both. One value has none.
    """
    by = table.groupby(x)[y]
    found = by.agg(["mean", "std", "count", "min", "max"]).reset_index().rename(columns={"count": "n"})
    t = found["n"].map(lambda count: student(LEVEL, count - 1) if count >= FEWEST_VALUES else float("nan"))
    error = t * found["std"] / np.sqrt(found["n"])
    found["low"], found["high"] = found["mean"] - error, found["mean"] + error
    two = found["n"] == 2
    found.loc[two, ["low", "high"]] = found.loc[two, ["min", "max"]].to_numpy()
    return found[[x, "mean", "low", "high", "n"]]


def crowd(table: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """Quantiles of y over the curves at each x, at no more than MOST_PLACES places."""
    places = np.sort(table[x].unique())
    table = table[table[x].isin(places[:: max(1, len(places) // MOST_PLACES)])]
    groups = table.groupby(x)[y]
    found = pd.DataFrame({name: groups.quantile(share) for name, share in _QUANTILES.items()})
    return found.assign(n=groups.size()).reset_index()
