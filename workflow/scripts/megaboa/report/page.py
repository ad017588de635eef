"""The page: figures and tables of an experiment in one self-contained file."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import matplotlib.pyplot as plt
import pandas as pd
import yaml
from markupsafe import Markup

from megaboa import metrics
from megaboa.check.refusals import some
from megaboa.config.models.outputs import Figure
from megaboa.config.problems import no_value
from megaboa.errors import InputError
from megaboa.formats import counted, listed, some_of, text, written
from megaboa.records import AgreementSpec, BaselineSpec, Counts, ReportCheck, Tree
from megaboa.report import figures, kinds, style
from megaboa.report.checks import by_subject, counts, faults, verdict
from megaboa.report.corpora import CorpusCard, DataRead
from megaboa.report.expected import LIMIT, Expected, gap_rows, known_columns
from megaboa.report.figures import standard_figures
from megaboa.report.fits import Fit, fit_of
from megaboa.report.frames import Frames, UnknownColumnError
from megaboa.report.interim import Interim
from megaboa.report.profiles import FIGURES as TRACE_FIGURES
from megaboa.report.profiles import PREFIX, Profile
from megaboa.report.runs import RunResult, passed
from megaboa.report.style import MOST_ENTRIES, Shades, Shown
from megaboa.report.tables import MOST_SWEPT, cell

HERE = Path(__file__).parent
SECTIONS = {
    "loss": ("loss", "loss_by_tokens", "validation", "learning_rate"),
    "sweep": ("sweep",),
    "agreement": ("agreement",),
    "speed": ("step_time", "step_times", "throughput", "mfu", "scaling", "gpus"),
    "data": ("lengths",),
    "time": ("goodput",),
    "expected": ("memory",),
    "along": ("along",),
}
FIGURES = tuple(name for names in SECTIONS.values() for name in names)
PARENT = "continue_from"  # the swept key
KNOWN_ON_THE_CPU = ("tflops_per_gpu", "mfu")  # known even on the CPU, so no reason for a row in the table of machines
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


def read_captions(path: Path) -> dict[str, str]:
    """Read a caption for every figure, from the file that the user may edit."""
    captions = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(captions, dict) or set(captions) != set(CAPTIONS):
        raise ReportError(f"{path}: must have one caption for each of {', '.join(CAPTIONS)}, and nothing else")
    return captions


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

    `interim`: if no run has a column yet, the figure is omitted instead of being an error. An own figure that has
    nothing to show has no drawing, but a note.
    """
    style.apply_style()
    good = passed(runs)
    frames = frames or Frames(good)
    shades = Shades(frames)
    named = {spec.name for spec in own}
    makers: dict[str, Callable[[], figures.Drawn | None]] = {
        "agreement": lambda: figures.agreement_figure(agreements, good, shades),
        "lengths": lambda: figures.lengths_figure(corpora),
        "goodput": lambda: figures.goodput_figure(good),
        "gpus": lambda: figures.gpus_figure(good),
    }
    standard = [spec for spec in standard_figures(frames) if spec.name not in named]
    specs = {spec.name: spec for spec in [*standard, *own]}
    fits = {spec.name: _fits(spec, frames) for spec in own if spec.fit}
    makers |= {name: partial(_drawn, spec, frames, interim, fits.get(name)) for name, spec in specs.items()}
    for path in (folder / style.DATA).glob("*.tsv"):  # figures of earlier reports
        if path.stem not in makers:
            style.remove(folder, path.stem)
    drawn = []
    for name, make in makers.items():
        made, spec = make(), specs.get(name)
        mine = spec in own
        if made is None:
            style.remove(folder, name)
            if mine and (why := _empty(spec, frames)):
                caption = _ended(spec.caption or _described(spec))
                drawn.append(
                    Shown(name, "", caption, f"{name} has nothing to show: {why}", own=True, format=spec.format)
                )
            continue
        figure, table = made
        svg = Markup(style.save(figure, folder, name))
        style.save_data(table, folder, name)
        rows = table if spec is None else frames.of(spec)
        spec = spec and kinds.told_apart(spec, rows)
        caption = (spec.caption or _described(spec)) if mine else captions.get(name, "")
        note = _first_runs(name, good) if spec is None else _note(spec, table, rows, frames, mine)
        if found := fits.get(name):
            constants = [one.table().assign(of=level) for level, one in found.items()]
            style.save_data(pd.concat(constants, ignore_index=True), folder, f"{name}{style.FIT}")
            note = " ".join([note, *(_said(level, one) for level, one in found.items())]).strip()
        if mine or name == figures.LOSS_BY_TOKENS.name:
            note = " ".join([note, *_left_out(spec, frames)]).strip()
        counted_in = table if "run" in table else rows  # of means, the rows that they are of
        runs_shown = counted_in["run"].nunique() if "run" in counted_in else len(good)
        style.save_text(_printed(name, caption, note, runs_shown), folder, name)
        caption = _ended(caption) if note else caption
        form = spec.format if spec else Shown.format
        drawn.append(Shown(name, svg, caption, note, f"{style.DATA}/{name}.tsv", own=mine, format=form))
        plt.close(figure)
    return drawn


def _ended(caption: str) -> str:
    """A note is a sentence, so the text before it has to end like one."""
    return f"{caption}." if caption and caption[-1] not in ".!?:;" else caption


def _fits(spec: Figure, frames: Frames) -> dict[str, Fit]:
    try:
        return {} if frames.runs.empty else fit_of(spec, frames.of(spec))
    except UnknownColumnError:  # reported when the figure is drawn
        return {}
    except (TypeError, ValueError) as error:
        raise ReportError(f"report.figures: {spec.name}: can't be fitted: {error}") from error


def _said(level: str, fit: Fit) -> str:
    return f"{level}: {fit.why or fit.sentence}" if level else fit.why or fit.sentence


def _left_out(spec: Figure, frames: Frames) -> list[str]:
    """A sentence for each column that some runs of a figure have no value of."""
    lacking = frames.lacking(spec).items()
    return [
        f"Runs without a value of {metrics.label(column)} are not shown: {some_of(runs)}." for column, runs in lacking
    ]


def _described(spec: Figure) -> str:
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


def _printed(name: str, caption: str, note: str, runs: int) -> list[str]:
    """Three lines of text for print: the content, a note, and the source."""
    count = counted(runs, "run")
    return [caption, note or f"It shows {count} that passed.", f"Data: {style.DATA}/{name}.tsv ({count} that passed)."]


def _drawn(
    spec: Figure, frames: Frames, interim: bool = False, fits: Mapping[str, Fit] | None = None
) -> figures.Drawn | None:
    if frames.runs.empty:
        return None
    try:
        table = frames.of(spec)
        spec = kinds.told_apart(spec, table)
        if spec.hue is None and spec.over is not None:
            shades = Shades(frames, "setting", list(frames.settings(spec).values()))
        else:
            shades = Shades(frames, kinds.colour_by(spec, table))
        if shades.column not in table.columns:
            table = table.merge(frames.runs[["run", shades.column]], on="run", how="left")
        with style.formatted(spec):
            return kinds.draw(spec, table, shades, fits)
    except UnknownColumnError as error:
        if interim:
            return None
        raise ReportError(f"report.figures: {spec.name}: {error}") from None
    except (TypeError, ValueError) as error:
        raise ReportError(f"report.figures: {spec.name}: can't be drawn as {spec.kind}: {error}") from error


def render(
    *,
    title: str,
    experiment: str,
    runs: list[RunResult],
    corpora: Sequence[CorpusCard],
    checks: Sequence[ReportCheck],
    drawn: list[Shown],
    provenance: dict[str, Any],
    data: Sequence[DataRead] = (),
    published: Tree | None = None,
    baseline: BaselineSpec | None = None,
    profiles: Sequence[Profile] = (),
    profile_figures: dict[str, list[Shown]] | None = None,
    expected: Sequence[Expected] = (),
    tables: Collection[str] = (),
    swept: pd.DataFrame | None = None,
    settings: pd.DataFrame | None = None,
    question: str | None = None,
    failures: Sequence[str] = (),
    interim: Interim | None = None,
    excluded: Sequence[str] = (),
) -> str:
    """The page's HTML. `tables`: names of the tables that are also files. `swept`: the values of the swept keys, a row
    for each run. `settings`: the means over seeds, to be read. `interim`: the missing parts of an interim report.
    `excluded`: runs that the sweep leaves out."""
    swept = pd.DataFrame() if swept is None else _on_page(swept, runs)
    proofs = [check for check in checks if check.kind in ("import", "export")]
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            css=Markup((HERE / "page.css").read_text(encoding="utf-8")),
            js=Markup((HERE / "page.js").read_text(encoding="utf-8")),
            title=title,
            experiment=experiment,
            verdict=verdict(runs, checks),
            verdict_text=verdict_text(counts(runs, checks)),
            failed=faults(runs, checks),
            stages=[check for check in checks if check.kind in ("validation", "evaluation", "profile")],
            figures={section: _named(drawn, names) for section, names in SECTIONS.items()},
            own_figures=[figure for figure in drawn if figure.own and figure.name not in FIGURES],
            machine_metrics=metrics.used("machines"),
            machines=machines(passed(runs)),
            times=figures.time_rows(passed(runs)),
            starts=figures.startup_rows(passed(runs)),
            runs=runs,
            swept={name: [cell(value) for value in swept[name]] for name in swept.columns[:MOST_SWEPT]},
            more_swept=list(swept.columns[MOST_SWEPT:]),
            numbers=[name for name in swept.columns if pd.api.types.is_numeric_dtype(swept[name])],
            corpora=corpora,
            agreements=[check for check in checks if check.kind == "agreement"],
            tensors=[check for check in checks if check.kind == "tensors"],
            proofs=proofs,
            proved=by_subject(proofs),
            data=data,
            profiles=profiles,
            profile_figures=profile_figures or {},
            expected=expected,
            foreseen=known_columns(expected),
            validation=validated(runs),
            settings=pd.DataFrame() if settings is None else settings,
            evaluated=evaluated(runs),
            along=along(runs),
            places=[run for run in runs if run.checkpoint or run.export],
            provenance=provenance,
            published=published,
            published_limit=LIMIT,
            baseline=baseline,
            compared=[check for check in checks if check.kind == "baseline"],
            tables=tables,
            question=question,
            failures=failures,
            interim=interim,
            excluded=excluded,
            gaps=gap_rows(published, passed(runs)) if published else [],
        )
    )


def environment() -> jinja2.Environment:
    """The environment of the templates in this folder."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    made.filters |= {
        "loss": partial(_digits, ".4f"),
        "score": partial(_digits, ".4g"),
        "cell": cell,
        "duration": style.duration,
        "count": _count,
        "counted": counted,
        "difference": _difference,
        "form": format,
        "label": metrics.label,
    }
    return made


def _on_page(swept: pd.DataFrame, runs: Sequence[RunResult]) -> pd.DataFrame:
    """The swept columns of the page's table of runs, whose column of steps says what a run continues."""
    told = [run.continues is not None or value is None for run, value in zip(runs, swept.get(PARENT, []), strict=False)]
    return swept.drop(columns=PARENT) if told and all(told) else swept


def validated(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """The last validation losses of every run with several validation sets; None for a set that it doesn't have."""
    return _rows({run.name: run.last_losses for run in runs if len(run.last_losses) > 1})


def evaluated(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Every evaluated run, with a value or None for every key that any run has."""
    return _rows({run.name: run.evaluation for run in runs if run.evaluation})


def _rows(found: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(name for values in found.values() for name in values))
    return [{"run": run, "values": {name: values.get(name) for name in names}} for run, values in found.items()]


def along(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Every export along a training, with a value or None for every key that any export has."""
    found = [(run.name, one) for run in runs for one in run.along]
    names = list(dict.fromkeys(name for _, one in found for name in one.numbers))
    return [
        {
            "run": run,
            "step": one.iteration,
            "values": {"validation loss": one.loss, **{name: one.numbers.get(name) for name in names}},
        }
        for run, one in found
    ]


def machines(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Each run's use of its GPUs: medians, and the peak memory over all ranks. Runs on the CPU have no row."""
    rows = []
    for run in runs:
        values = {metric.name: metric.of(run.documents) for metric in metrics.used("machines")}
        if any(value is not None for name, value in values.items() if name not in KNOWN_ON_THE_CPU):
            stragglers = (run.summary or {}).get("stragglers") or {}
            rows.append({"run": run.name, "values": values, "slowest": _slowest(stragglers.get("slowest") or {})})
    return rows


def _slowest(times: dict[str, int]) -> str:
    """The slowest rank as text: `3, in 18 of 20 reports`."""
    if not times:
        return ""
    rank, often = max(times.items(), key=lambda item: item[1])
    return f"{rank}, in {often} of {sum(times.values())} reports"


def verdict_text(counts: Counts) -> str:
    """The verdict as text: `All 7 runs passed. 8 of 9 checks passed; 1 FAIL.`"""
    return f"{_counted(counts.runs, 'run')} {_counted(counts.checks, 'check')}"


def _counted(states: dict[str, int], noun: str) -> str:
    total, good = sum(states.values()), states.get("PASS", 0)
    if total == 0:
        return f"There are no {noun}s."
    if good == total:
        return f"The only {noun} passed." if total == 1 else f"All {total} {noun}s passed."
    rest = ", ".join(f"{count} {state}" for state, count in states.items() if state != "PASS")
    return f"{good} of {total} {noun}s passed; {rest}."


def _named(drawn: list[Shown], names: Sequence[str]) -> list[Shown]:
    known = {figure.name: figure for figure in drawn}
    return [known[name] for name in names if name in known]


def _first_runs(name: str, good: Sequence[RunResult]) -> str:
    """A note on a figure without a specification that shows some of the runs."""
    most, known = {
        "gpus": (figures.MOST_SAMPLED, len(figures.sampled(good))),
        "goodput": (kinds.MOST_BARS, len(figures.known(good))),
    }.get(name, (0, 0))
    return f"The first {most} of {known} runs." if known > most else ""


def _note(spec: Figure, table: pd.DataFrame, rows: pd.DataFrame, frames: Frames, own: bool) -> str:
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


def _empty(spec: Figure, frames: Frames) -> str:
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


def _digits(form: str, value: float | None) -> str:
    return "" if value is None else f"{value:{form}}" if math.isfinite(value) else str(written(value))


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _difference(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
