"""Figures of an experiment before any run is trained: their columns, filters and labels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import get_args

from megaboa import metrics
from megaboa.config.models.outputs import Figure, Scalar
from megaboa.config.problems import no_value, some_nearest
from megaboa.config.sweep import Factor
from megaboa.formats import listed, text
from megaboa.plan import documents
from megaboa.plan.choices import Place
from megaboa.plan.plan import Plan
from megaboa.plan.specifications import values_of_others

AXES = ("x", "y", "value", "hue", "dash", "facet", "over")  # keys that name a column
_PLANNED = [name for name in documents.COLUMNS if name not in ("tokens", "state", "why")]


def figure_problems(
    figures: Sequence[Figure],
    swept: Collection[str],
    axes: Collection[str],
    apart: Mapping[str, Mapping[str, str]],
) -> Iterator[tuple[Place, str]]:
    """Places in the file, and problems.

    `swept`: keys of the sweep, which are columns, too, also where runs that set them are left out or wrong. `axes`:
    axes of the sweep that are columns of labels. `apart`: names of validation sets in the report, by set and run.
    """
    seen: set[str] = set()
    for index, figure in enumerate(figures):
        path = ("report", "figures", index)
        for key, problem in filter(None, (column_problem(figure, (*swept, *axes)), label_problem(figure, axes))):
            yield (*path, key), problem
        for key in AXES:
            prefix, column = metrics.VALIDATION_SET, str(getattr(figure, key))
            if column.startswith(prefix) and (names := apart.get(column.removeprefix(prefix))):
                columns = listed([repr(f"{prefix}{name}") for name in dict.fromkeys(names.values())])
                message = f"has other documents in other runs, so there are the columns {columns}: name one of them"
                yield (*path, key), message
        if figure.name in seen:
            yield (*path, "name"), f"two figures are called {figure.name!r}: rename one"
        seen.add(figure.name)


def empty_figures(plan: Plan) -> list[str]:
    """A warning for each figure whose filter no run of the plan can match."""
    others, found = values_of_others(plan), []
    for index, figure in enumerate(plan.experiment.report.figures):
        for column in figure.filter.keys() & {"model", *plan.swept, *plan.axes}:
            known = ({"model": run.model, **others.get(run.name, {}), **run.labels, **run.values} for run in plan.runs)
            values = [of_run[column] for of_run in known]
            asked = figure.wanted(column)
            there = list(dict.fromkeys(map(text, values)))
            # a recipe decides None; blends and lists have other names in the report
            if all(isinstance(value, Scalar) for value in values) and not {*asked} & {*there}:
                nothing = f"nothing to show: {no_value(column, asked, there)}"
                found.append(f"warning: report.figures[{index}].filter: {figure.name} has {nothing}")
    return found


def own_columns(factors: Iterable[Factor], swept: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The labels of each axis of the sweep that has some, in their order, unless tables have another column of the
    axis's name."""
    found: dict[str, dict[str, None]] = {}
    for factor in factors:
        for option in factor.options:
            for axis, label in option.labels.items():
                found.setdefault(axis, {})[label] = None
    others = {*documents.COLUMNS, *swept, *(name for rows in get_args(metrics.Rows) for name in metrics.columns(rows))}
    return {axis: tuple(labels) for axis, labels in found.items() if axis not in others}


def label_problem(figure: Figure, axes: Collection[str]) -> tuple[str, str] | None:
    """The key of a figure that needs numbers where an axis of the sweep has labels, and the problem."""
    for key in ("x", "y"):
        name = getattr(figure, key)
        if name in axes and (key in figure.log or figure.fit):
            asked = "log" if key in figure.log else "fit"
            return asked, f"needs numbers, and {key}: {name} has labels: name a key that they set, or remove it"
    return None


def column_problem(figure: Figure, swept: Iterable[str]) -> tuple[str, str] | None:
    """The key of a figure that names an unknown column, and the problem; None if all are known. `swept`: keys and axes
    of the sweep."""
    known = dict.fromkeys([*metrics.columns(figure.data), *_PLANNED, *metrics.columns("runs"), *swept])
    for key in AXES:
        name = getattr(figure, key)
        if name is not None and name not in known and not name.startswith((metrics.EVALUATION, *metrics.LOSSES)):
            return key, no_column(name, known)
    for name in figure.filter:
        if name not in known and not name.startswith(metrics.EVALUATION):
            return "filter", no_column(name, known)
    return None


def no_column(name: str, known: Iterable[str]) -> str:
    """The problem of an unknown column, with the names that were probably meant."""
    *rest, last = [repr(one) for one in some_nearest(name, known)] or [""]
    meant = f"{', '.join(rest)} or {last}" if rest else last
    hint = f"; did you mean {meant}? All" if last else "; all"
    return f"there is no column {name!r}{hint} columns are listed in docs/how-to/report.md, 'Your own figures'"
