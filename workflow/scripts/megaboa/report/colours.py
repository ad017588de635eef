"""Which value has which colour, and the legend that tells it."""

from __future__ import annotations

from typing import Any

import seaborn
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from megaboa.report.frames import Frames
from megaboa.report.style import PALETTE

# More legend entries than this nobody would tell apart.
MOST_ENTRIES = 24
FEW_ENTRIES = 8  # that are written in the size of the axes' own names
MOST_COLUMNS = 5


class Shades:
    """Colours by the values of one column: a few have one each of the palette, many go from light to dark.

    Without a column a few runs have a colour each. Of many, the colour tells the model or, where there is only one, the
    place in the plan.
    """

    def __init__(self, frames: Frames, column: str | None = None) -> None:
        runs = frames.runs
        self.few = len(runs) <= len(PALETTE)
        self.column = column or ("model" if not self.few and runs["model"].nunique() > 1 else "run")
        self.by_group = self.column != "run"
        levels = list(dict.fromkeys(runs[self.column])) if self.column in runs else []
        if (
            self.column == "run" and len(levels) > MOST_ENTRIES
        ):  # names beside bars tell them; shades would tell nothing
            colours = [PALETTE[0]] * len(levels)
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
        if level not in self._colours:  # of a column that is not the runs': kinds of time, names of sets
            self._colours[level] = PALETTE[min(len(self._colours), len(PALETTE) - 1)]
        return self._colours[level]

    def text(self, level: object) -> str:
        return f"{level:g}" if isinstance(level, float) else str(level)


def legend(figure: Figure) -> None:
    """A legend below the axes, one entry per label, where there is something to tell apart and room to do it."""
    unique = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        unique |= dict(zip(labels, handles, strict=True))
    if not 1 < len(unique) <= MOST_ENTRIES:
        return
    small = {"fontsize": 8} if len(unique) > FEW_ENTRIES else {}
    drawn = below(figure, list(unique.values()), list(unique), handlelength=1.4, columnspacing=1.4, **small)
    for line in drawn.get_lines():
        line.set(linewidth=2.2, alpha=1)


def below(figure: Figure, handles: list[Any], labels: list[str], **more: Any) -> Legend:
    """A legend below the axes, in as many columns as fit. The figure grows by its height: the axes keep theirs."""
    for columns in range(MOST_COLUMNS, 0, -1):
        drawn = figure.legend(handles, labels, loc="outside lower center", ncols=columns, **more)
        size = drawn.get_window_extent(figure.canvas.get_renderer())
        if size.width <= figure.bbox.width or columns == 1:
            break
        drawn.remove()
    figure.set_figheight(figure.get_figheight() + size.height / figure.dpi)
    return drawn
