"""Captions and notes of figures: what is drawn, of how many runs, and why a figure shows nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pandas as pd
import yaml

from megaboa import metrics
from megaboa.check.refusals import some
from megaboa.config.models.outputs import Figure
from megaboa.config.problems import no_value
from megaboa.errors import InputError
from megaboa.formats import counted, listed, some_of, text
from megaboa.report import figures, kinds, style
from megaboa.report.fits import Fit
from megaboa.report.frames import FLOPS, PARAMS, Frames, UnknownColumnError
from megaboa.report.page import FIGURES
from megaboa.report.profiles import FIGURES as TRACE_FIGURES
from megaboa.report.profiles import PREFIX
from megaboa.report.runs import RunResult
from megaboa.report.style import MOST_ENTRIES

# What a caption calls a row of a figure's table, and its values.
ROW = {"runs": "run", "steps": "step", "validation": "evaluation", "exports": "value", "time": "kind of time of a run"}
OF = {
    "runs": "",
    "steps": " of every step",
    "validation": " of every evaluation",
    "exports": " of every export along the training",
    "time": " of the runs' time",
}
CAPTIONS = (*FIGURES, *(f"{PREFIX}{name}" for name in TRACE_FIGURES))


class ReportError(InputError):
    """A problem of a file that the user may edit."""


class FigureError(ReportError):
    """A figure that can't be drawn, and why."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"report.figures: {name}: {why}")
        self.why = why


def read_captions(path: Path) -> dict[str, str]:
    """Read a caption for every figure, from the file that the user may edit."""
    captions = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(captions, dict) or set(captions) != set(CAPTIONS):
        raise ReportError(f"{path}: must have one caption for each of {', '.join(CAPTIONS)}, and nothing else")
    return captions


def described(spec: Figure) -> str:
    """The caption of a figure that has none: `Loss of every step by tokens: a line for each run; colour: learning
    rate.`"""
    x, y = spec.x_label or metrics.label(spec.x), spec.y_label or metrics.label(spec.y)
    if spec.kind == "heat":
        axes, each = f"{metrics.label(spec.value)}{OF[spec.data]} by {x} and {y}", "a cell for each pair"
    else:
        axes = f"{y}{OF[spec.data]} by {x}"
        group = metrics.label(spec.hue or "setting") if spec.over else "run"
        bars = x if spec.hue in (None, spec.x) else f"{x} and {metrics.label(spec.hue)}"
        each = {
            "line": f"a line for each {group}",
            "scatter": f"a point for each {ROW[spec.data]}",
            "bar": f"a bar for each {bars}",
            "box": f"a box for each {bars}",
        }[spec.kind]
    columns = (("colour", spec.hue), ("line or marker", spec.dash), ("panels", spec.facet))
    further = [f"{how}: {metrics.label(column)}" for how, column in columns if column is not None]
    further += [f"only {metrics.label(column)} {' or '.join(spec.wanted(column))}" for column in spec.filter]
    return "; ".join([f"{axes[:1].upper()}{axes[1:]}: {each}", *further]) + "."


def ended(caption: str) -> str:
    """A note is a sentence, so the text before it has to end like one."""
    return f"{caption}." if caption and caption[-1] not in ".!?:;" else caption


def printed(name: str, caption: str, note: str, runs: int) -> list[str]:
    """Three lines of text for print: the content, a note, and the source."""
    count = counted(runs, "run")
    return [caption, note or f"It shows {count} that passed.", f"Data: {style.DATA}/{name}.tsv ({count} that passed)."]


def first_runs(name: str, good: Sequence[RunResult]) -> str:
    """A note on a figure without a specification that shows some of the runs."""
    most, known = {
        "gpus": (figures.MOST_SAMPLED, len(figures.sampled(good))),
        "goodput": (kinds.MOST_BARS, len(figures.known(good))),
    }.get(name, (0, 0))
    return f"The first {most} of {known} runs." if known > most else ""


def note(spec: Figure, table: pd.DataFrame, rows: pd.DataFrame, frames: Frames, own: bool) -> str:
    """What is drawn of the rows. `own`: a figure of the experiment, whose caption doesn't say it."""
    said = {"line": _of_lines, "bar": _of_bars, "box": _of_boxes, "heat": _of_cells}.get(spec.kind)
    notes = [said(spec, table, rows, frames, own)] if said else []
    if spec.facet is not None and (panels := rows[spec.facet].nunique()) > kinds.MOST_FACETS:
        notes.append(f"The first {kinds.MOST_FACETS} of {panels} panels.")
    return " ".join(filter(None, notes))


def _of_lines(spec: Figure, table: pd.DataFrame, rows: pd.DataFrame, frames: Frames, own: bool) -> str:
    if spec.over is not None:
        counts = set(table["n"])
        bands = [" with its 95% confidence interval"] if max(counts) >= kinds.FEWEST_VALUES else []
        bands += [f"; the band{_where(2, counts)} spans both values"] if 2 in counts else []
        bands += [f"; there is none{_where(1, counts)}"] if 1 in counts and len(counts) > 1 else []
        said = f"Mean over {listed(frames.pooled(spec, rows))} ({_n(table)}){''.join(bands)}."
        settings = table["setting"].nunique() if "setting" in table else 0
        return f"{said} From light to dark in the order of the plan." if settings > MOST_ENTRIES else said
    if "p25" in table.columns:
        ends = "and those that end lowest and highest"
        return f"Of {rows['run'].nunique()} runs the median, the middle half (dark), nine tenths (light), {ends}."
    series = metrics.SERIES.get(spec.data)
    if series in (None, spec.x, spec.hue, spec.dash, spec.facet) or rows[series].nunique() == 1:
        return ""
    return f"A line for each {metrics.label(series)} of a run: `hue`, `dash` or `facet` can tell them apart."


def _of_bars(spec: Figure, table: pd.DataFrame, rows: pd.DataFrame, frames: Frames, own: bool) -> str:
    notes = []
    if table["n"].max() > 1:
        notes.append(f"Median (bar), least to most (line), {_n(table)}{_pooled(spec, rows, frames)}.")
    if own and f"{spec.y}.p5" in table:
        where = "Where n = 1, the line is" if notes else "Median (bar), and"
        notes.append(f"{where} the 5th to 95th percentile of a run's steps{'' if notes else ' (line)'}.")
    runs = rows["run"].nunique()
    if spec.x == "run" and runs > kinds.MOST_BARS:
        best = "lowest" if spec.lowest_is_best else "highest"
        what = "fastest" if spec.best is None and spec.y in ("step_seconds", "tokens_per_second") else best
        notes.append(f"The {kinds.MOST_BARS} {what} of {runs} runs.")
    return " ".join(notes)


def _of_boxes(spec: Figure, table: pd.DataFrame, rows: pd.DataFrame, frames: Frames, own: bool) -> str:
    notes = []
    if own:
        notes.append(
            f"Quartiles and median (box), 5th to 95th percentile (line), {_n(table)}{_pooled(spec, rows, frames)}."
        )
    runs = rows["run"].nunique()
    if spec.x == "run" and runs > kinds.MOST_BARS:
        notes.append(f"The first {kinds.MOST_BARS} of {runs} runs.")
    return " ".join(notes)


def _of_cells(spec: Figure, table: pd.DataFrame, rows: pd.DataFrame, frames: Frames, own: bool) -> str:
    return f"A cell is a mean, {_n(table)}{_pooled(spec, rows, frames)}." if table["n"].max() > 1 else ""


def _n(table: pd.DataFrame) -> str:
    """`n = 3`, `n = 2 to 3`: how many values a mean, a median or quartiles are of."""
    least, most = int(table["n"].min()), int(table["n"].max())
    return f"n = {least}" if least == most else f"n = {least} to {most}"


def _where(n: int, counts: Collection[int]) -> str:
    return f" where n = {n}" if len(counts) > 1 else ""


def _pooled(spec: Figure, rows: pd.DataFrame, frames: Frames) -> str:
    """The keys that differ between the values of a bar, box or cell."""
    keys = frames.pooled(spec, rows)
    return f", over {listed(keys)}" if keys else ""


def of_fit(level: str, fit: Fit) -> str:
    return f"{level}: {fit.why or fit.sentence}" if level else fit.why or fit.sentence


def of_curves(spec: Figure, rows: pd.DataFrame, fits: Mapping[str, Fit]) -> str:
    """What the curves of a figure's fits are; empty if it has none."""
    drawn = [one for one in fits.values() if one.curve is not None]
    if not drawn:
        return ""
    if spec.fit == "optimum":
        band = ", band: its 95% interval" if any(one.constants[0].low is not None for one in drawn) else ""
        return f"Curve: the parabola; dotted: the optimum{band}."
    each = "budget of tokens" if spec.x == PARAMS else "size"
    said = f"Lines: the law for each {each}, up to {kinds.BEYOND} times beyond its runs."
    if spec.x != FLOPS or not drawn[0].has_best_size:
        return said
    ends = (rows[FLOPS].min(), rows[FLOPS].max())
    sizes, there = drawn[0].law.best_params(ends), (rows[PARAMS].min(), rows[PARAMS].max())
    best, measured = (" to ".join(style.short(float(f"{end:.3g}")) for end in ends) for ends in (sizes, there))
    return f"{said} Dashed: the law for the best size of each compute, {best} parameters; the runs have {measured}."


def left_out(spec: Figure, frames: Frames, rows: pd.DataFrame) -> list[str]:
    """A sentence for each column that some runs of a figure have no value of. `rows`: those of the others."""
    lacking = frames.lacking(spec, {*rows["run"]}).items()
    return [
        f"Runs without a value of {metrics.label(column)} are not shown: {some_of(runs)}." for column, runs in lacking
    ]


def why_nothing(spec: Figure, frames: Frames) -> str:
    """Why an own figure has nothing to show; empty if no run has passed yet."""
    if frames.runs.empty:
        return ""
    try:
        table = frames.unfiltered(spec)
    except UnknownColumnError:  # in an interim report: no run has it yet
        return ""
    if table.empty:
        return f"no run has rows of `data: {spec.data}`."
    for column in spec.filter:
        there, asked = list(dict.fromkeys(table[column].map(text))), spec.wanted(column)
        if not {*asked} & {*there}:
            return f"{no_value(column, asked, there)}."
    lacking = [f"no value of {metrics.label(column)} in {some(runs)}" for column, runs in frames.lacking(spec).items()]
    return f"{listed(lacking) or 'no row has all values of `filter`'}."
