"""One look for all figures, the same bytes for the same data, and colours that the page can turn over for the dark."""

from __future__ import annotations

import io
import re
from pathlib import Path

import matplotlib
import pandas as pd
import seaborn
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from megaboa.files import write_bytes, write_text

INK, MUTED, GRID = "#1d2129", "#5e6673", "#dfe3e8"
# Okabe and Ito's colours for the colour-blind, without yellow, which can't be seen on white, and a grey.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C6BB1", "#7F7F7F"]
WIDTH = 5.2
KINDS = ("svg", "pdf", "png")
DATA = "data"  # folder beside the figures

_STYLE = {
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
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
    # Names are text, never formulas: a `$` in one is a `$`.
    "text.parse_math": False,
    # Text stays text: smaller files, searchable, and in the page's own font.
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


def apply_style() -> None:
    matplotlib.use("agg")
    seaborn.set_theme(context="paper", style="ticks", palette=PALETTE, rc=_STYLE)


def power_of_ten(value: float, _position: int | None = None) -> str:
    """`10⁻⁵` without a formula renderer; 0 for the zero of a symmetric logarithmic axis."""
    if value <= 0:
        return "0"
    exponent = f"{value:.0e}".split("e")
    digits = str(int(exponent[1])).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}" if exponent[0] == "1" else f"{exponent[0]}·10{digits}"


POWERS_OF_TEN = FuncFormatter(power_of_ten)


def save(figure: Figure, folder: Path, name: str) -> str:
    """Save a figure as SVG, PDF and PNG; returns the SVG for embedding in the page."""
    for kind in KINDS:
        buffer = io.BytesIO()
        # The PNG is for places that don't know what is behind it, so it brings its own white.
        extra = {"dpi": 200, "facecolor": "white", "transparent": False} if kind == "png" else {}
        figure.savefig(buffer, format=kind, metadata=_NO_DATES[kind], **extra)
        write_bytes(folder / f"{name}.{kind}", buffer.getvalue())
    return for_page((folder / f"{name}.svg").read_text(encoding="utf-8"), name)


def save_data(table: pd.DataFrame, folder: Path, name: str) -> None:
    """What a figure shows, one observation a row, to the last bit."""
    write_text(folder / DATA / f"{name}.tsv", table.to_csv(sep="\t", index=False, lineterminator="\n"))


def remove(folder: Path, name: str) -> None:
    """Remove a figure that an earlier report had and this one hasn't."""
    for kind in KINDS:
        (folder / f"{name}.{kind}").unlink(missing_ok=True)
    (folder / DATA / f"{name}.tsv").unlink(missing_ok=True)


def for_page(svg: str, name: str) -> str:
    """Make an SVG part of the page: its width, its font and its ink; ids that no other figure has."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?) ?width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) ?height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\1{name}-", svg)
    svg = re.sub(r"'DejaVu Sans'(, sans-serif)?", "var(--sans)", svg)
    for colour, variable in ((INK, "--ink"), (MUTED, "--muted"), (GRID, "--line")):
        svg = svg.replace(colour, f"var({variable})")
    return svg
