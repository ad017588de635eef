"""The kinds of figures. Each draws one tidy table on one set of axes, according to the figure's specification.

Very many curves are summarized: by their mean with its confidence interval, or by their distribution.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from megaboa.config.models.outputs import Figure
from megaboa.formats import some_of, text
from megaboa.metrics import SERIES, label
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
    PALETTE,
    Shades,
    finish,
    in_field,
    is_number,
    legend,
    number,
    places,
)

MOST_POINTS = 20_000  # a figure with more points shows only every n-th step
MOST_BARS = 40
FEW_POINTS = 12  # curves with no more have markers
FEWEST_VALUES = 3  # fewest values for a confidence interval
MOST_FACETS = 12
NEXT_TO = 0.68  # distance of bars of one name; those of different names are 1 apart
SCHEDULED = ("lr",)  # columns of steps that the configuration decides, so that runs have them in common
BEYOND = 2  # factor by which a law's curve goes on beyond the runs that it belongs to
_QUANTILES = {"p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95}
MOST_PLACES = 500  # number of places on x at which the distribution of very many curves is computed


def draw(
    spec: Figure, table: pd.DataFrame, shades: Shades, fits: Mapping[str, Fit] | None = None
) -> tuple[Drawing, pd.DataFrame] | None:
    """The figure and a table of its data, or None if the table is empty."""
    if table.empty:
        return None
    parts = [(None, table)] if spec.facet is None else list(table.groupby(spec.facet, sort=False))[:MOST_FACETS]
    draw_one = KINDS[spec.kind]
    if spec.kind == "heat":
        means = [cells(part, spec)[spec.value] for _, part in parts]
        draw_one = partial(heat, least=min(map(min, means)), most=max(map(max, means)))
    columns = min(2, len(parts))
    lines = math.ceil(len(parts) / columns)
    height = _height(spec, table) if len(parts) == 1 else 2.6 * lines
    look = FORMATS[spec.format]
    figure, grid = plt.subplots(lines, columns, figsize=(look.width, height * look.height), squeeze=False)
    panels, shown = list(grid.flat)[: len(parts)], []
    for axes, (level, part) in zip(panels, parts, strict=True):
        shown.append(draw_one(axes, part, spec, shades))
        finish(axes, spec, alone=columns == 1)
        if fits:
            shown[-1] = fitted(axes, shown[-1], spec, shades, fits)
        if spec.facet is not None:
            axes.set_title(_level(spec.facet, level), fontsize=look.small, color=INK)
            shown[-1] = shown[-1].assign(**{spec.facet: level})
    if not (spec.data == "exports" and spec.facet == SERIES["exports"]):  # panels of several quantities
        _same_scale(panels, spec)
    if spec.direct:
        for axes, (_, part) in zip(panels, parts, strict=True):
            direct(axes, part, spec, shades)
    for axes in list(grid.flat)[len(parts) :]:
        axes.set_visible(False)
    # names next to bars and boxes replace the legend
    if spec.kind != "heat" and not (spec.kind in ("bar", "box") and spec.x == shades.column):
        legend(figure)
    return figure, pd.concat(shown, ignore_index=True)


def _same_scale(panels: Sequence[Axes], spec: Figure) -> None:
    """One axis of values for all panels, so that they can be compared."""
    which = {"line": "ylim", "scatter": "ylim", "bar": "xlim", "box": "xlim"}.get(spec.kind)
    if which and len(panels) > 1:
        ends = [end for axes in panels for end in getattr(axes, f"get_{which}")()]
        for axes in panels:
            axes.set(**{which: (min(ends), max(ends))})


def told_apart(spec: Figure, table: pd.DataFrame) -> Figure:
    """The figure, with a dash or marker for each set of one run's values, unless something else tells them apart."""
    series = SERIES.get(spec.data)
    if spec.kind not in ("line", "scatter") or spec.dash or series in (None, spec.x, spec.hue, spec.facet):
        return spec
    return spec.model_copy(update={"dash": series}) if 1 < table[series].nunique() <= len(DASHES) else spec


def colour_by(spec: Figure, table: pd.DataFrame) -> str | None:
    """The column of the colours; None for that of most figures: runs or, of many, models."""
    if spec.hue or shared(spec, table):
        return spec.hue or spec.x
    # Of many runs, learning rates have few curves: each names its runs.
    return "run" if spec.kind == "line" and spec.y in SCHEDULED and spec.over is None and not spec.direct else None


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
    columns = ["run", shades.column, *_series(spec, table)]
    stride = max(1, math.ceil(len(table) / MOST_POINTS))
    curves = [
        part.sort_values(spec.x, kind="stable").iloc[::stride]
        for _, part in table.groupby(list(dict.fromkeys(columns)), sort=False, dropna=False)
    ]
    runs = table["run"].nunique()
    if _alone(spec, shades) and (runs > MOST_PLAIN or spec.y in SCHEDULED):
        groups = _equal(curves, spec)
        if (len(groups) if spec.y in SCHEDULED else runs) <= MOST_ENTRIES:
            _named_curves(axes, groups, spec, shades)
            return pd.concat(curves)
    if runs > MOST_ENTRIES:
        return _crowd(axes, table, spec, shades)
    dashes = _levels(axes, table, spec, shades, DASHES)
    few = shades.few and len(curves) <= len(PALETTE)
    for index, curve in enumerate(curves):
        # Equal curves cover each other. The first ones are drawn wider, so that they show at the edges of the next.
        width = 1.3 + 0.6 * (len(curves) - 1 - index) if few and not spec.dash else 1.0
        axes.plot(
            curve[spec.x],
            curve[spec.y],
            color=shades.of(curve[shades.column].iloc[0]),
            label=_entry(spec, shades, curve[shades.column].iloc[0]),
            linewidth=width,
            linestyle=dashes.get(curve[spec.dash].iloc[0], "-") if spec.dash else "-",
            alpha=1.0 if shades.few or spec.dash or spec.direct else 0.55,
            marker=_marker(curve, spec),
            markersize=width + 2,
            solid_capstyle="round",
        )
    return pd.concat(curves)


def _marker(curve: pd.DataFrame, spec: Figure) -> str | None:
    """Curves of few points have markers, and those with gaps: a value between two gaps would be no line."""
    return "o" if len(curve) <= FEW_POINTS or curve[spec.y].isna().any() else None


def _series(spec: Figure, table: pd.DataFrame) -> list[str]:
    """The columns, apart from the run or colour, whose values have curves of their own."""
    found = dict.fromkeys(name for name in (spec.dash, SERIES.get(spec.data)) if name is not None)
    return [name for name in found if name in table.columns and name != spec.x]


def _alone(spec: Figure, shades: Shades) -> bool:
    """Whether each curve has a name of its own, and thus may have a dash of its own."""
    return shades.column in NAMES and spec.dash is None and not spec.direct


def _equal(curves: Sequence[pd.DataFrame], spec: Figure) -> list[list[pd.DataFrame]]:
    """Groups of equal curves. Panels have a common legend, so their curves are not joined."""
    groups: dict[Hashable, list[pd.DataFrame]] = {}
    for place, curve in enumerate(curves):
        points = (tuple(curve[spec.x]), tuple(curve[spec.y].fillna(math.inf)))  # NaN isn't equal to itself
        groups.setdefault(points if spec.facet is None else place, []).append(curve)
    return list(groups.values())


def _named_curves(axes: Axes, groups: Sequence[Sequence[pd.DataFrame]], spec: Figure, shades: Shades) -> None:
    """Many runs' curves, told apart by colours and dashes. Equal curves are drawn once, with the names of all."""
    firsts = [group[0]["run"].iloc[0] for group in groups]
    names = [some_of(list(dict.fromkeys(curve["run"].iloc[0] for curve in group))) for group in groups]
    colours = [shades.of(run) for run in firsts]
    dashed = len(firsts) > MOST_PLAIN or len(set(colours)) < len(firsts)
    dashes = [shades.dash(run) if dashed else "-" for run in firsts]
    if sum(map(len, groups)) > MOST_ENTRIES:  # so many runs have no colours of their own
        colours = [PALETTE[place % len(PALETTE)] for place in range(len(groups))]
        dashes = [DASHES[place % len(DASHES)] if len(groups) > MOST_PLAIN else "-" for place in range(len(groups))]
    for group, name, colour, dash in zip(groups, names, colours, dashes, strict=True):
        axes.plot(
            group[0][spec.x],
            group[0][spec.y],
            color=colour,
            label=name,
            linewidth=1.2,
            linestyle=dash,
            marker=_marker(group[0], spec),
            markersize=3.2,
        )


def _means(axes: Axes, table: pd.DataFrame, spec: Figure, shades: Shades) -> pd.DataFrame:
    shown, dashes = [], _levels(axes, table, spec, shades, DASHES)
    columns = list(dict.fromkeys([shades.column, *_series(spec, table)]))
    dashed = _alone(spec, shades) and MOST_PLAIN < table[shades.column].nunique() <= MOST_ENTRIES
    for levels, part in table.groupby(columns, sort=False):
        band, colour = mean_band(part, spec.x, spec.y), shades.of(levels[0])
        dash = dashes.get(part[spec.dash].iloc[0], "-") if spec.dash else "-"
        dash = shades.dash(levels[0]) if dashed else dash
        marker = "o" if len(band) <= FEW_POINTS else None  # a mean at one place alone would be no line
        axes.plot(
            *(band[spec.x], band["mean"]),
            **{
                "color": colour,
                "label": _entry(spec, shades, levels[0]),
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
        axes.plot([], [], color=MUTED, label=_level(spec.dash, level), **style)
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
        part = part.dropna(subset=[spec.y])
        last = part[part[spec.x] == part[spec.x].max()]
        at = axes.transAxes.inverted().transform(axes.transData.transform((last[spec.x].max(), last[spec.y].mean())))
        ends.append((at[1], level))
    ends.sort(key=lambda end: end[0])
    lowest = [y for y, _ in ends]
    for index in range(1, len(lowest)):
        lowest[index] = max(lowest[index], lowest[index - 1] + height)
    # shift all texts, so that their middle stays that of the curves' ends
    shift = sum(new - end[0] for new, end in zip(lowest, ends, strict=True)) / max(1, len(ends))
    names = [(y - shift, shades.text(level), shades.of(level)) for y, (_, level) in zip(lowest, ends, strict=True)]
    if spec.hue and any(is_number(level) for _, level in ends):
        names.append((names[-1][0] + 1.2 * height, label(spec.hue), MUTED))
    for y, name, colour in names:
        axes.annotate(
            name,
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
        for size, part in table.groupby(other):
            x = _between(table[spec.x], spec, part[spec.x])
            params, tokens = (x, size) if spec.x == PARAMS else (size, x if spec.x == TOKENS else x / FLOP / size)
            levels = part[shades.column].unique()
            colour = shades.of(levels[0]) if len(levels) == 1 else MUTED
            axes.plot(x, law.loss(params, tokens), color=colour, linewidth=1.1)
        if spec.x == FLOPS and fits[""].has_best_size:
            x = _between(table[spec.x], spec)
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


def _between(values: pd.Series, spec: Figure, own: pd.Series | None = None) -> np.ndarray:
    """Places on the x axis between the values; of a curve with runs of its own, no farther than BEYOND from these."""
    low, high = values.min(), values.max()
    if own is not None:
        low, high = max(low, own.min() / BEYOND), min(high, own.max() * BEYOND)
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
    series = [name for name in _series(spec, table) if table[name].nunique() > 1]
    columns = list(dict.fromkeys([*([shades.column] if shades.by_group else []), *series]))
    dashes = dict(zip(dict.fromkeys(table[spec.dash]), DASHES, strict=False)) if spec.dash else {}
    for place, (levels, part) in enumerate(_groups(table, columns)):
        of, bands = dict(zip(columns, levels, strict=True)), crowd(part, spec.x, spec.y)
        colour = shades.of(levels[0]) if shades.by_group else PALETTE[place % len(PALETTE)]
        for low, high, alpha in (("p5", "p95", 0.16), ("p25", "p75", 0.3)):
            axes.fill_between(bands[spec.x], bands[low], bands[high], color=colour, alpha=alpha, linewidth=0)
        said = [shades.text(levels[0]) if shades.by_group else f"median of {part['run'].nunique()} runs"]
        said += [_level(name, of[name]) for name in series if name != shades.column]
        dash = dashes.get(of.get(spec.dash), "-")
        axes.plot(bands[spec.x], bands["median"], color=colour, linewidth=1.6, linestyle=dash, label=", ".join(said))
        shown.append(bands.assign(**of))
    for levels, part in _groups(table, series):
        runs = part.sort_values(spec.x, kind="stable").groupby("run", sort=False)
        last = runs[spec.y].last()
        for run, dash in ((last.idxmin(), (0, (4, 1.5))), (last.idxmax(), (0, (1, 1.5)))):
            curve, said = runs.get_group(run), [run, *map(_level, series, levels)]
            axes.plot(curve[spec.x], curve[spec.y], color=INK, linewidth=0.9, linestyle=dash, label=", ".join(said))
    return pd.concat(shown)


def _groups(table: pd.DataFrame, columns: Sequence[str]) -> list[tuple[tuple[Any, ...], pd.DataFrame]]:
    """The rows by the values of these columns; all rows, without columns."""
    return list(table.groupby(list(columns), sort=False)) if columns else [((), table)]


def _level(column: str, level: object) -> str:
    """A value in titles and legends: that of a key with the key, the name of a curve alone."""
    return text(level) if column in SERIES.values() else f"{label(column)} {text(level)}"


def bar(axes: Axes, table: pd.DataFrame, spec: Figure, shades: Shades) -> pd.DataFrame:
    """A bar for each value of x, with a line from the 5th to the 95th percentile or, of several runs, from the least to
    the most."""
    p5, p95, least, most = ends = tuple(f"{spec.y}.{end}" for end in ("p5", "p95", "least", "most"))
    rows = []
    for part in _bars(table, spec):
        row = {spec.x: part[spec.x].iloc[0], spec.y: part[spec.y].median()}
        if len(part) > 1:
            row |= {least: part[spec.y].min(), most: part[spec.y].max()}
        elif p5 in part:
            row |= {p5: part[p5].iloc[0], p95: part[p95].iloc[0]}
        rows.append(row | {shades.column: part[shades.column].iloc[0], "n": len(part)})
    given = [name for name in ends if any(name in row for row in rows)]
    bars = pd.DataFrame(rows, columns=list(dict.fromkeys([spec.x, spec.y, *given, shades.column, "n"])))
    if len(bars) > MOST_BARS:
        bars = bars.sort_values(spec.y, ascending=spec.lowest_is_best, kind="stable").head(MOST_BARS)
        bars = bars.sort_index() if bars[spec.x].duplicated().any() else bars
    reach = bars[[spec.y, *given]]
    lows, highs = reach.min(axis=1), reach.max(axis=1)
    at = _stand(bars[spec.x].tolist())
    for place, row, low, high in zip(at, bars.to_dict("records"), lows, highs, strict=True):
        level = row[shades.column]
        axes.barh(
            place, row[spec.y], height=0.62, linewidth=0, color=shades.of(level), label=_named(spec, shades, level)
        )
        axes.plot([low, high], [place, place], color=INK, linewidth=1.4, solid_capstyle="butt")
        said = number(row[spec.y], spec.y)
        axes.annotate(said, (high, place), (5, 0), textcoords="offset points", va="center", color=INK, fontsize=9)
    axes.set_xlim(min(0, lows.min() * 1.2), max(0, highs.max() * 1.2) or (0 if lows.min() < 0 else 1))
    places(axes, [text(name) for name in bars[spec.x]], at)
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
    places(axes, [text(row[spec.x]) for row in rows], at)
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


def cells(table: pd.DataFrame, spec: Figure) -> pd.DataFrame:
    """The mean of `value` for every pair of x and y, and the number of values."""
    found = table.groupby([spec.y, spec.x])[spec.value].agg(["mean", "count"]).reset_index()
    return found.rename(columns={"mean": spec.value, "count": "n"})


def heat(
    axes: Axes,
    table: pd.DataFrame,
    spec: Figure,
    shades: Shades,
    least: float | None = None,
    most: float | None = None,
) -> pd.DataFrame:
    """The mean of `value` for every pair of x and y, written into the cells if there is room. `least`, `most`: the ends
    of the colours; default: those of this panel."""
    means = cells(table, spec)
    grid = means.pivot(index=spec.y, columns=spec.x, values=spec.value).sort_index(ascending=False)
    written = grid.map(lambda value: in_field(value, spec.value)) if grid.size <= 64 else False
    reverse = "" if spec.lowest_is_best else "_r"
    seaborn.heatmap(
        grid,
        ax=axes,
        vmin=least,
        vmax=most,
        cmap=f"viridis{reverse}",
        annot=written,
        fmt="",
        annot_kws={"fontsize": 8.5},
        linewidths=0.5,
        linecolor=GRID,
        cbar_kws={"label": label(spec.value), "shrink": 0.9},
    )
    axes.set_xticks(np.arange(grid.shape[1]) + 0.5, [text(name) for name in grid.columns])
    axes.set_yticks(np.arange(grid.shape[0]) + 0.5, [text(name) for name in grid.index])
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
    return found.assign(n=groups.count()).reset_index()
