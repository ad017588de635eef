"""What axes say, and how numbers are written in figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator

from megaboa.config.models.outputs import Figure
from megaboa.metrics import SECONDS, SHARE, label, named
from megaboa.report.style import INK, power_of_ten


def places(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", length=0)


def finish(axes: Axes, spec: Figure) -> None:
    if spec.kind in ("bar", "box"):
        axes.set_xlabel(spec.y_label or label(spec.y))
        axes.set_ylabel("" if spec.x == "run" else label(spec.x))
        axes.xaxis.set_major_locator(MaxNLocator(5))
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
        elif name not in ("loss", "lr", "optimizer.lr"):
            axis.set_major_formatter(formatter(name))
    if "x" not in spec.log:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=spec.x in ("step", "world_size")))


def formatter(name: str | None) -> FuncFormatter:
    if name is not None and named(name).unit == SHARE:
        return FuncFormatter(lambda value, _: f"{value:.0%}")
    return FuncFormatter(lambda value, _: short(value))


class LogText(LogFormatter):
    """`0.01`, `100`, `30k`, `10⁻⁷` at the ticks that Matplotlib would name: names are no formulas here, as its are."""

    def __call__(self, value: float, pos: int | None = None) -> str:
        if not super().__call__(value, pos):
            return ""
        return short(value) if 1e-3 <= abs(value) < 1e15 else power_of_ten(value)


def short(value: float) -> str:
    """`30k`, `1.5M`: what fits under an axis."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.6g}{letter}"
    return f"{value:.6g}"


def is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number)


def number(value: float, name: str) -> str:
    """A value as it is written into a figure: `32.5 ms`, `12,345`, `41%`."""
    unit = named(name).unit
    if unit == SECONDS:
        return duration(value)
    if unit == SHARE:
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def in_field(value: float, name: str) -> str:
    """With as many digits in each field."""
    if pd.isna(value):
        return ""
    return number(value, name) if named(name).unit in (SHARE, SECONDS) or value >= 1000 else f"{value:#.4g}"
