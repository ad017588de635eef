"""Draws and saves the figures of a report, each with the table of its data and its text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure as Drawing

from megaboa.config.models.outputs import Figure
from megaboa.records import AgreementSpec
from megaboa.report import figures, kinds, notes, style
from megaboa.report.corpora import CorpusCard
from megaboa.report.figures import standard_figures
from megaboa.report.fits import Fit, fit_of
from megaboa.report.frames import Frames, UnknownColumnError
from megaboa.report.notes import FigureError
from megaboa.report.runs import RunResult, passed
from megaboa.report.style import Shades, Shown


@dataclass(frozen=True)
class Drawn:
    """A figure, and a table of what it shows. With a specification also that, the rows that the table is made of, and
    their fits."""

    figure: Drawing
    table: pd.DataFrame
    spec: Figure | None = None
    rows: pd.DataFrame | None = None
    fits: Mapping[str, Fit] = field(default_factory=dict)


def draw(
    runs: list[RunResult],
    corpora: Sequence[CorpusCard],
    agreements: Sequence[AgreementSpec],
    captions: dict[str, str],
    folder: Path,
    frames: Frames | None = None,
    own: Sequence[Figure] = (),
    interim: bool = False,
) -> list[Shown]:
    """Draw and save every figure with data, of the runs that passed. `own`: the experiment's figures.

    `interim`: if no run has a column yet, the figure is omitted instead of being an error. An own figure that can't be
    drawn, or has nothing to show, has no drawing, but a note.
    """
    style.apply_style()
    good = passed(runs)
    frames = frames or Frames(good)
    named = {spec.name for spec in own}
    special: dict[str, Callable[[], figures.WithTable | None]] = {
        "agreement": lambda: figures.agreement_figure(agreements, good, Shades(frames)),
        "lengths": lambda: figures.lengths_figure(corpora),
        "goodput": lambda: figures.goodput_figure(good),
        "gpus": lambda: figures.gpus_figure(good),
    }
    specs = {spec.name: spec for spec in (*standard_figures(frames), *own)}
    _remove_others(folder, {*special, *specs})
    shown = []
    for name in dict.fromkeys((*special, *specs)):
        spec, fault = specs.get(name), ""
        try:
            drawn = of_spec(spec, frames, interim) if spec else _of_table(special[name]())
        except FigureError as error:
            if name not in named:
                raise
            drawn, fault = None, error.why
        if drawn is not None:
            shown.append(_saved(name, drawn, good, frames, captions.get(name, ""), name in named, folder))
            continue
        style.remove(folder, name)
        if name in named:
            shown += _without_drawing(spec, frames, fault)
    return shown


def _of_table(found: figures.WithTable | None) -> Drawn | None:
    return found and Drawn(*found)


def _without_drawing(spec: Figure, frames: Frames, fault: str) -> list[Shown]:
    """The place of an own figure that has none, which says why; nothing while no run has passed."""
    if fault:
        note = f"{spec.name} {notes.ended(fault)}"
    elif why := notes.why_nothing(spec, frames):
        note = f"{spec.name} has nothing to show: {why}"
    else:
        return []
    caption = notes.ended(spec.caption or notes.described(spec))
    return [Shown(spec.name, "", caption, note, own=True, format=spec.format, fault=fault)]


def _remove_others(folder: Path, names: Collection[str]) -> None:
    """Remove figures of earlier reports that this one doesn't have."""
    for path in (folder / style.DATA).glob("*.tsv"):
        if path.stem not in names:
            style.remove(folder, path.stem)


def of_spec(spec: Figure, frames: Frames, interim: bool = False) -> Drawn | None:
    """The figure of a specification, and its fits; None if it has nothing to show."""
    if frames.runs.empty:
        return None
    try:
        rows = frames.of(spec)
        fits = _fits(spec, rows)
        spec = kinds.told_apart(spec, rows)
        if spec.hue is None and spec.over is not None:
            shades = Shades(frames, "setting", list(frames.settings(spec).values()))
        else:
            shades = Shades(frames, kinds.colour_by(spec, rows))
        table = rows
        if shades.column not in table.columns:
            table = table.merge(frames.runs[["run", shades.column]], on="run", how="left")
        with style.formatted(spec):
            found = kinds.draw(spec, table, shades, fits)
    except UnknownColumnError as error:
        if interim:
            return None
        raise FigureError(spec.name, f"can't be drawn: {error}") from None
    except (TypeError, ValueError) as error:
        raise FigureError(spec.name, f"can't be drawn as {spec.kind}: {error}") from error
    return found and Drawn(*found, spec, rows, fits)


def _fits(spec: Figure, rows: pd.DataFrame) -> dict[str, Fit]:
    try:
        return fit_of(spec, rows) if spec.fit else {}
    except (TypeError, ValueError) as error:
        raise FigureError(spec.name, f"can't be fitted: {error}") from error


def _saved(
    name: str, drawn: Drawn, good: Sequence[RunResult], frames: Frames, caption: str, own: bool, folder: Path
) -> Shown:
    """The figure on the page; saves its drawing, its data and its text. `caption`: that of the file of captions."""
    table, spec, rows = drawn.table, drawn.spec, drawn.rows
    svg = Markup(style.save(drawn.figure, folder, name))
    style.save_data(table, folder, name)
    said = [notes.first_runs(name, good) if spec is None else notes.note(spec, table, rows, frames, own)]
    if drawn.fits:
        constants = [one.table().assign(of=level) for level, one in drawn.fits.items()]
        style.save_data(pd.concat(constants, ignore_index=True), folder, f"{name}{style.FIT}")
        said += [notes.of_fit(level, one) for level, one in drawn.fits.items()]
        said.append(notes.of_curves(spec, rows, drawn.fits))
    if own or name == figures.LOSS_BY_TOKENS.name:
        said += notes.left_out(spec, frames, rows)
    note = " ".join(filter(None, said))
    if own:
        caption = spec.caption or notes.described(spec)
    counted = table if spec is None or "run" in table else rows  # of means, the rows that they are of
    shown = counted["run"].nunique() if "run" in counted else len(good)
    style.save_text(notes.printed(name, caption, note, shown), folder, name)
    plt.close(drawn.figure)
    caption, form = notes.ended(caption) if note else caption, spec.format if spec else Shown.format
    return Shown(name, svg, caption, note, f"{style.DATA}/{name}.tsv", own=own, format=form)
