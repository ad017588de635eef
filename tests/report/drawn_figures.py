"""Figures as a report draws them, for tests of what is drawn."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from megaboa.config.models.outputs import Figure
from megaboa.report import style
from megaboa.report.drawing import of_spec
from megaboa.report.frames import Frames


def drawn_by(spec: Figure, frames: Frames) -> tuple[Drawing, pd.DataFrame]:
    """The figure of a specification, and the table of what it shows."""
    style.apply_style()
    found = of_spec(spec, frames)
    return found.figure, found.table


def drawn(frames: Frames, **given: Any) -> tuple[list[Axes], pd.DataFrame]:
    """The panels of a figure with these keys, and the table of what they show."""
    figure, table = drawn_by(Figure(name="mine", **given), frames)
    return [axes for axes in figure.axes if axes.get_visible()], table
