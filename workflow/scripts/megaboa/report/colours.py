"""Which run has which colour, and the legend that tells it."""

from __future__ import annotations

import seaborn
from matplotlib.axes import Axes

from megaboa.report.runs import RunResult
from megaboa.report.style import PALETTE

# More legend entries than this would leave the curves no room.
MOST_ENTRIES = 24


class Colours:
    """A few runs have a colour each. Of many, the colour tells the model or, where there is only one, the place in the
    plan, from light to dark."""

    def __init__(self, runs: list[RunResult]) -> None:
        self.few = len(runs) <= len(PALETTE)
        self.by_model = not self.few and len({run.model for run in runs}) > 1
        labels = list(dict.fromkeys(self.label(run) for run in runs))
        if self.few or self.by_model:
            # Models beyond the palette share its last colour, a grey.
            colours = [PALETTE[min(index, len(PALETTE) - 1)] for index in range(len(labels))]
        else:
            colours = seaborn.color_palette("flare", len(labels)).as_hex()
        self._colour = dict(zip(labels, colours, strict=True))

    def label(self, run: RunResult) -> str:
        return run.model if self.by_model else run.name

    def of(self, run: RunResult) -> str:
        return self._colour[self.label(run)]

    def note(self) -> str:
        """What a figure without a legend has to say about its colours."""
        return "" if len(self._colour) <= MOST_ENTRIES else "From light to dark in the order of the plan."


def legend(axes: Axes) -> None:
    """A legend below the axes, one entry per label, where there is something to tell apart and room to do it."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if not 1 < len(unique) <= MOST_ENTRIES:
        return
    columns = max(1, min(4, 44 // (max(map(len, unique)) + 5)))
    drawn = axes.figure.legend(
        unique.values(), unique.keys(), loc="outside lower center", ncols=columns, handlelength=1.4, columnspacing=1.4
    )
    for line in drawn.get_lines():
        line.set(linewidth=2.2, alpha=1)
