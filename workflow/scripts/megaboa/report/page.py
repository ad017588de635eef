"""The page: figures and tables of an experiment in one self-contained file."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from megaboa import metrics
from megaboa.formats import counted, written
from megaboa.records import Counts, ReportCheck
from megaboa.report import style
from megaboa.report.checks import by_subject, counts, faults, verdict
from megaboa.report.contents import Contents
from megaboa.report.expected import LIMIT, known_columns
from megaboa.report.runs import RunResult, by_score, in_bits, passed
from megaboa.report.style import Shown
from megaboa.report.tables import MOST_SWEPT, brief_settings, cell

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


def render(contents: Contents, tables: Collection[str] = ()) -> str:
    """The page's HTML. `tables`: names of the tables that are also files."""
    runs, checks, drawn = contents.runs, contents.checks, contents.drawn
    good, swept, proofs = passed(runs), _on_page(contents.swept, runs), _of(checks, "import", "export")
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            vars(contents),
            tables=tables,
            verdict=verdict(runs, checks),
            verdict_text=verdict_text(counts(runs, checks)),
            failed=faults(runs, checks),
            stages=_of(checks, "validation", "evaluation", "profile"),
            figures={section: _named(drawn, names) for section, names in SECTIONS.items()},
            own_figures=[figure for figure in drawn if figure.own and figure.name not in FIGURES],
            machine_metrics=metrics.used("machines"),
            machines=machines(good),
            times=contents.times,
            starts=contents.starts,
            swept={name: [cell(value) for value in swept[name]] for name in swept.columns[:MOST_SWEPT]},
            more_swept=list(swept.columns[MOST_SWEPT:]),
            numbers=[name for name in swept.columns if pd.api.types.is_numeric_dtype(swept[name])],
            settings=brief_settings(contents.settings),
            agreements=_of(checks, "agreement"),
            tensors=_of(checks, "tensors"),
            proofs=proofs,
            proved=by_subject(proofs),
            foreseen=known_columns(contents.expected),
            validation=validated(runs),
            bits=_rows(in_bits(good)),
            lossy={run.name: run.text.restored for run in good if run.text.restored < 1},
            evaluated=evaluated(runs),
            along=along(runs),
            places=[run for run in runs if run.checkpoint or run.export],
            published_limit=LIMIT,
            compared=_of(checks, "baseline"),
            gaps=contents.gaps,
        )
    )


def _of(checks: Sequence[ReportCheck], *kinds: str) -> list[ReportCheck]:
    return [check for check in checks if check.kind in kinds]


def environment() -> jinja2.Environment:
    """The environment of the templates in this folder, which all have the style and the script of this page."""
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
    made.globals |= {name: Markup((HERE / f"page.{name}").read_text(encoding="utf-8")) for name in ("css", "js")}
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
    return _rows({run.name: by_score(run.evaluation) for run in runs if run.evaluation})


def _rows(found: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(name for values in found.values() for name in values))
    return [{"run": run, "values": {name: values.get(name) for name in names}} for run, values in found.items()]


def along(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Every export along a training, with a value or None for every key that any export has."""
    found = [(run.name, one, by_score(one.numbers)) for run in runs for one in run.along]
    names = list(dict.fromkeys(name for *_, scores in found for name in scores))
    return [
        {
            "run": run,
            "step": one.iteration,
            "values": {"validation loss": one.loss, **{name: scores.get(name) for name in names}},
        }
        for run, one, scores in found
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


def _digits(form: str, value: float | None) -> str:
    return "" if value is None else f"{value:{form}}" if math.isfinite(value) else str(written(value))


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _difference(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
