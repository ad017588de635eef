"""The page: figures and tables of an experiment in one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib.pyplot as plt
import yaml
from markupsafe import Markup
from matplotlib.figure import Figure

from megaboa.report import figures, style, time_spent, trace_figures
from megaboa.report.blends import DataRead, last_validation
from megaboa.report.checks import Check, by_subject, verdict
from megaboa.report.colours import Colours
from megaboa.report.corpora import CorpusCard
from megaboa.report.expected import Expected
from megaboa.report.profiles import PREFIX, Profile
from megaboa.report.runs import RunResult, passed

HERE = Path(__file__).parent
FIGURES = ("loss", "agreement", "validation", "step_time", "throughput", "lengths", "goodput")
CAPTIONS = (*FIGURES, *(f"{PREFIX}{name}" for name in trace_figures.FIGURES))


class ReportError(Exception):
    """What is wrong with a file that the user may edit."""


def read_captions(path: Path) -> dict[str, str]:
    """A caption for every figure, from the file that the user may edit."""
    captions = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(captions, dict) or set(captions) != set(CAPTIONS):
        raise ReportError(f"{path}: must have one caption for each of {', '.join(CAPTIONS)}, and nothing else")
    return captions


def draw(
    runs: list[RunResult],
    corpora: Sequence[CorpusCard],
    agreements: list[dict[str, Any]],
    captions: dict[str, str],
    folder: Path,
) -> list[dict[str, Any]]:
    """Draw and save every figure that has something to show; only runs that passed are shown."""
    style.apply_style()
    good = passed(runs)
    colours = Colours(good)
    makers: dict[str, Callable[[], Figure | None]] = {
        "loss": lambda: figures.loss_figure(good, colours),
        "agreement": lambda: figures.agreement_figure(agreements, good, colours),
        "validation": lambda: figures.validation_figure(good, colours),
        "step_time": lambda: figures.step_time_figure(good, colours),
        "throughput": lambda: figures.throughput_figure(good, colours),
        "lengths": lambda: figures.lengths_figure(corpora),
        "goodput": lambda: time_spent.goodput_figure(good),
    }
    drawn = []
    for name, make in makers.items():
        figure = make()
        if figure is None:
            style.remove(folder, name)
        else:
            svg = Markup(style.save(figure, folder, name))
            drawn.append({"name": name, "svg": svg, "caption": captions[name], "note": _note(name, good, colours)})
            plt.close(figure)
    return drawn


def render(
    *,
    title: str,
    experiment: str,
    runs: list[RunResult],
    corpora: Sequence[CorpusCard],
    checks: list[Check],
    drawn: list[dict[str, Any]],
    provenance: dict[str, Any],
    data: Sequence[DataRead] = (),
    profiles: Sequence[Profile] = (),
    profile_figures: dict[str, list[dict[str, Any]]] | None = None,
    expected: Sequence[Expected] = (),
) -> str:
    """The page's HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"loss": _loss, "duration": figures.duration, "count": _count, "difference": _difference}
    result = verdict(runs, checks)
    proofs = [check for check in checks if check["kind"] != "agreement"]
    return environment.get_template("page.html.j2").render(
        css=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        title=title,
        experiment=experiment,
        verdict=result,
        verdict_text=verdict_text(result),
        loss_figures=_named(drawn, "loss", "validation"),
        agreement_figures=_named(drawn, "agreement"),
        speed_figures=_named(drawn, "step_time", "throughput"),
        data_figures=_named(drawn, "lengths"),
        time_figures=_named(drawn, "goodput"),
        times=time_spent.time_rows(passed(runs)),
        runs=runs,
        corpora=corpora,
        agreements=[check for check in checks if check["kind"] == "agreement"],
        proofs=proofs,
        proved=by_subject(proofs),
        data=data,
        profiles=profiles,
        profile_figures=profile_figures or {},
        expected=expected,
        validation=last_validation(runs),
        places=[run for run in runs if run.checkpoint or run.export],
        provenance=provenance,
    )


def verdict_text(result: dict[str, Any]) -> str:
    """`All 7 runs passed. 8 of 9 checks passed; 1 FAIL.`"""
    counts = result["counts"]
    return f"{_counted(counts['runs'], 'run')} {_counted(counts['checks'], 'check')}"


def _counted(states: dict[str, int], noun: str) -> str:
    total, good = sum(states.values()), states.get("PASS", 0)
    if total == 0:
        return f"There are no {noun}s."
    if good == total:
        return f"The only {noun} passed." if total == 1 else f"All {total} {noun}s passed."
    rest = ", ".join(f"{count} {state}" for state, count in states.items() if state != "PASS")
    return f"{good} of {total} {noun}s passed; {rest}."


def _named(drawn: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [figure for figure in drawn if figure["name"] in names]


def _note(name: str, good: list[RunResult], colours: Colours) -> str:
    """What has to be said about a figure because of what it shows this time."""
    if name == "lengths":
        return ""
    if name == "goodput":
        return f"The first {figures.MOST_BARS} of {len(good)} runs." if len(good) > figures.MOST_BARS else ""
    if name not in ("step_time", "throughput"):
        return colours.note()
    shown = figures.MOST_BARS
    return f"The {shown} fastest of {len(good)} runs." if len(good) > shown else ""


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _difference(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
