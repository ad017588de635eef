"""The look of all figures: colours and their legend, axes, and formats of numbers.

The same data gives the same bytes. The page can invert the colours for its dark theme.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.category import UnitData
from matplotlib.figure import Figure as Drawing
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator

from megaboa.config.models.outputs import Figure
from megaboa.files import write_bytes, write_text
from megaboa.formats import UNITS, text
from megaboa.metrics import SECONDS, SHARE, label, named
from megaboa.report import fonts
from megaboa.report.frames import Frames

INK, MUTED, GRID = "#1d2129", "#5e6673", "#dfe3e8"
# Okabe and Ito's palette for the colour-blind, without yellow, which is invisible on white, and with a grey.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C6BB1", "#7F7F7F"]
WIDTH = 5.2
# The looks of curves and points that a second column distinguishes.
DASHES = ("-", (0, (4, 2)), (0, (1.2, 1.5)), (0, (5, 1.5, 1.2, 1.5)), (0, (9, 2.5)), (0, (3, 1.2, 1, 1.2, 1, 1.2)))
MOST_PLAIN = 6  # up to so many curves are told apart by their colours alone
NAMES = ("run", "setting")  # columns whose values have no order
MARKERS = ("o", "s", "^", "D", "v", "P")


@dataclass(frozen=True)
class Format:
    """Sizes in inches and points. `height`: a multiple of that of the page's figures."""

    width: float
    height: float
    text: float
    small: float


# The widths of a column and of the whole text in two-column papers (IEEE's 3.5 and 7.16, ICML's 3.25 and 6.75 inches).
# The narrower of the two fits both.
FORMATS = {
    "page": Format(WIDTH, 1.0, 10, 9.5),
    "one-column": Format(3.25, 0.72, 8, 7),
    "two-columns": Format(6.75, 0.8, 8, 7),
}
FULL = 0.97  # usable share of a figure's width for a legend: PDF and SVG set text slightly wider than measured
KINDS = ("svg", "pdf", "png")
DATA = "data"  # folder next to the figures
FIT = ".fit"  # suffix, after a figure's name, of the file with the constants of its fit

_STYLE = {
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "font.sans-serif": [fonts.OWN],
    "font.size": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.linewidth": 0.8,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "ytick.left": False,
    # names are text, not formulas: a `$` stays a `$`
    "text.parse_math": False,
    # text isn't converted to paths: smaller files, searchable, and in the page's own font
    "svg.fonttype": "none",
    "svg.hashsalt": "megaboa",
    "pdf.fonttype": 42,
    "savefig.transparent": True,
}
_NO_DATES = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
# more legend entries would be indistinguishable
MOST_ENTRIES = 24
FEW_ENTRIES = 8  # up to so many entries have the normal size
MOST_COLUMNS = 5


def apply_style() -> None:
    matplotlib.use("agg")
    seaborn.set_theme(context="paper", style="ticks", palette=PALETTE, rc=_STYLE)


def formatted(spec: Figure) -> AbstractContextManager[None]:
    """A context with the text sizes of a figure's format."""
    look = FORMATS[spec.format]
    sizes = dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), look.small)
    return plt.rc_context({"font.size": look.text, "axes.labelsize": look.text, **sizes})


def power_of_ten(value: float, _position: int | None = None) -> str:
    """A power of ten without a formula renderer (`10⁻⁵`); 0 for the zero of a symmetric logarithmic axis."""
    if value <= 0:
        return "0"
    exponent = f"{value:.0e}".split("e")
    digits = str(int(exponent[1])).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}" if exponent[0] == "1" else f"{exponent[0]}·10{digits}"


POWERS_OF_TEN = FuncFormatter(power_of_ten)


@dataclass(frozen=True)
class Shown:
    """A figure on the page, whose files lie next to it under its name."""

    name: str
    svg: str
    caption: str
    note: str = ""
    data: str | None = None  # path of its table
    own: bool = False  # the experiment's own
    fault: str = ""  # "can't be drawn: ..."
    format: str = "page"


def save(figure: Drawing, folder: Path, name: str) -> str:
    """Save a figure as SVG, PDF and PNG; returns the SVG for embedding in the page."""
    for kind, content in fonts.rendered(figure, _render).items():
        write_bytes(folder / f"{name}.{kind}", content)
    return for_page((folder / f"{name}.svg").read_text(encoding="utf-8"), name)


def _render(figure: Drawing) -> dict[str, bytes]:
    made = {}
    for kind in KINDS:
        buffer = io.BytesIO()
        # the PNG may be placed on any background, so it brings its own white one
        extra = {"dpi": 200, "facecolor": "white", "transparent": False} if kind == "png" else {}
        figure.savefig(buffer, format=kind, metadata=_NO_DATES[kind], **extra)
        made[kind] = buffer.getvalue()
    return made


def save_data(table: pd.DataFrame, folder: Path, name: str) -> None:
    """Save a figure's data, one observation per row, to the last bit."""
    write_text(folder / DATA / f"{name}.tsv", table.to_csv(sep="\t", index=False, lineterminator="\n"))


def save_text(lines: Sequence[str], folder: Path, name: str) -> None:
    """Save the text that may be printed below a figure."""
    write_text(folder / f"{name}.txt", "".join(f"{' '.join(line.split())}\n" for line in lines))


def remove(folder: Path, name: str) -> None:
    """Remove a figure of an earlier report that this one doesn't have."""
    for kind in (*KINDS, "txt"):
        (folder / f"{name}.{kind}").unlink(missing_ok=True)
    for kind in (".tsv", f"{FIT}.tsv"):
        (folder / DATA / f"{name}{kind}").unlink(missing_ok=True)


def for_page(svg: str, name: str) -> str:
    """Adapt an SVG to the page: flexible size, the page's font and colours, and unique ids."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?) ?width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) ?height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\1{name}-", svg)
    svg = re.sub(rf"'{fonts.OWN}'(, (sans-serif|'[^']*'))*", "var(--sans)", svg)
    for colour, variable in ((INK, "--ink"), (MUTED, "--muted"), (GRID, "--line")):
        svg = svg.replace(colour, f"var({variable})")
    return svg


class Shades:
    """Colours by the values of one column: few values have one each of the palette, many go from light to dark.

    `levels`: the column's value of each run, if it is no column of the runs.

    Without a column, few runs have a colour each, and a value of a column has the colour of its first run, as figures
    stand next to each other. For many runs the colour shows the model or, if there is only one, the place in the plan.
    """

    def __init__(self, frames: Frames, column: str | None = None, levels: Sequence[str] = ()) -> None:
        runs = frames.runs
        self.few = len(runs) <= len(PALETTE)
        self.column = column or ("model" if not self.few and runs["model"].nunique() > 1 else "run")
        self.by_group = self.column != "run"
        values = list(levels or (frames.named(runs[self.column]) if self.column in runs else ()))
        levels = list(dict.fromkeys(values))
        if (
            self.column == "run" and len(levels) > MOST_ENTRIES
        ):  # bars have names next to them, so shades would add nothing
            colours = [PALETTE[0]] * len(levels)
        elif self.column in NAMES and not self.few and len(levels) <= MOST_ENTRIES:
            # More than there are colours: dashes and markers tell apart those of one colour.
            colours = [PALETTE[index % len(PALETTE)] for index in range(len(levels))]
        elif self.few and self.by_group:
            colours = [PALETTE[values.index(level)] for level in levels]
        elif len(levels) <= len(PALETTE) or self.column == "model":
            # Models beyond the palette share its last colour, a grey.
            colours = [PALETTE[min(index, len(PALETTE) - 1)] for index in range(len(levels))]
        else:
            colours = seaborn.color_palette("flare", len(levels)).as_hex()
        self._colours = dict(zip(levels, colours, strict=True))

    @property
    def first(self) -> str:
        return PALETTE[0]

    def of(self, level: object) -> str:
        if level not in self._colours:  # a value of a column that runs don't have: kinds of time, names of sets
            self._colours[level] = PALETTE[min(len(self._colours), len(PALETTE) - 1)]
        return self._colours[level]

    def dash(self, level: object) -> Any:
        """A dash for each name, so that no two of MOST_ENTRIES have the same colour and dash."""
        return DASHES[self._place(level) % len(DASHES)]

    def marker(self, level: object) -> str:
        """As `dash`, of points."""
        return MARKERS[self._place(level) % len(MARKERS)]

    def _place(self, level: object) -> int:
        return list(self._colours).index(level)

    def text(self, level: object) -> str:
        return text(level)


def legend(figure: Drawing) -> None:
    """Draw a legend below the axes, one entry per label, if there are several and not too many."""
    unique = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        unique |= dict(zip(labels, handles, strict=True))
    if not 1 < len(unique) <= MOST_ENTRIES:
        return
    small = {"fontsize": 8} if len(unique) > FEW_ENTRIES else {}
    dashed = any(isinstance(handle, Line2D) and handle.is_dashed() for handle in unique.values())
    length, width = (2.6, 1.6) if dashed else (1.4, 2.2)
    drawn = below(figure, list(unique.values()), list(unique), handlelength=length, columnspacing=1.4, **small)
    for line in drawn.get_lines():
        line.set(linewidth=width, alpha=1)


def below(figure: Drawing, handles: list[Any], labels: list[str], **more: Any) -> Legend:
    """A legend below the axes, in as many columns as fit.

    The figure grows by its height, so that the axes keep theirs.
    """
    for columns in range(MOST_COLUMNS, 0, -1):
        # matplotlib fills column by column, and people read line by line
        shown = [[entry for start in range(columns) for entry in kind[start::columns]] for kind in (handles, labels)]
        drawn = figure.legend(*shown, loc="outside lower center", ncols=columns, **more)
        size = drawn.get_window_extent(figure.canvas.get_renderer())
        if size.width <= FULL * figure.bbox.width or columns == 1:
            break
        drawn.remove()
    figure.set_figheight(figure.get_figheight() + size.height / figure.dpi)
    return drawn


def places(axes: Axes, names: Sequence[str], at: Sequence[float]) -> None:
    """Name bars or boxes, from the top down. Neighbours of one name have it once, at their middle."""
    groups: dict[str, list[float]] = {}
    for name, place in zip(names, at, strict=True):
        groups.setdefault(name, []).append(place)
    axes.set_yticks([(group[0] + group[-1]) / 2 for group in groups.values()], list(groups), color=INK)
    axes.set_ylim(at[-1] + 0.6, -0.6)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", length=0)


def finish(axes: Axes, spec: Figure, alone: bool = True) -> None:
    """Label the axes. `alone`: they have the figure's whole width."""
    if spec.kind in ("bar", "box"):
        axes.set_xlabel(spec.y_label or label(spec.y))
        axes.set_ylabel("" if spec.x == "run" else label(spec.x))
        axes.xaxis.set_major_locator(MaxNLocator(5 if alone else 3))
        axes.xaxis.set_major_formatter(formatter(spec.y))
        axes.grid(axis="y", visible=False)
        return
    axes.set_xlabel(spec.x_label or label(spec.x))
    axes.set_ylabel(spec.y_label or label(spec.y))
    axes.grid(axis="x", visible=spec.kind == "scatter")
    if spec.kind == "heat":
        axes.grid(visible=False)
        return
    for which, axis, name in (("x", axes.xaxis, spec.x), ("y", axes.yaxis, spec.y)):
        if which in spec.log:
            (axes.set_xscale if which == "x" else axes.set_yscale)("log")
            axis.set_major_formatter(LogText())
            axis.set_minor_formatter(LogText(labelOnlyBase=False))
        elif name not in ("loss", "lr") and not _has_names(axis):
            axis.set_major_formatter(formatter(name))
    if "x" not in spec.log and not _has_names(axes.xaxis):
        few = {} if alone else {"nbins": 3, "steps": [1, 2, 5, 10]}
        axes.xaxis.set_major_locator(MaxNLocator(**{"nbins": 6, "integer": spec.x in ("step", "world_size")} | few))


def _has_names(axis: Axis) -> bool:
    """Whether Matplotlib has placed names on the axis, such as models or labels, and not numbers."""
    return isinstance(axis.units, UnitData)


def formatter(name: str | None) -> FuncFormatter:
    if name is not None and named(name).unit == SHARE:
        return PERCENT
    return FuncFormatter(lambda value, _: short(value))


PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.4g}%")  # `40%`, and `0.5%` where ticks are close


class LogText(LogFormatter):
    """Labels the same ticks as Matplotlib, but with plain text instead of formulas: `0.01`, `100`, `30k`, `10⁻⁷`."""

    def __call__(self, value: float, pos: int | None = None) -> str:
        if not super().__call__(value, pos):
            return ""
        return short(value) if 1e-3 <= abs(value) < 1e15 else power_of_ten(value)


def short(value: float) -> str:
    """A short number for an axis: `30k`, `1.5M`."""
    for unit, letter in UNITS:
        if abs(value) >= unit:
            return f"{value / unit:.6g}{letter}"
    return f"{value:.6g}"


def is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number)


def number(value: float, name: str) -> str:
    """A value for a figure: `32.5 ms`, `12,345`, `41%`."""
    unit = named(name).unit
    if unit == SECONDS:
        return duration(value)
    if unit == SHARE:
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def in_field(value: float, name: str) -> str:
    """A value for a cell of a heat map, with the same number of digits in each."""
    if pd.isna(value):
        return ""
    return number(value, name) if named(name).unit in (SHARE, SECONDS) or value >= 1000 else f"{value:#.4g}"
