"""Measurements as tidy tables with one observation per row: runs, steps, evaluations and times."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from megaboa import blends, metrics
from megaboa.check.refusals import some
from megaboa.config.models.outputs import Figure
from megaboa.config.problems import some_nearest
from megaboa.formats import text
from megaboa.records import SweepAxis
from megaboa.report.bits import has_several_tokenizers
from megaboa.report.runs import RunResult, by_score

SEED = "training.seed"
NOT_SET, UNKNOWN = "not set", "unknown"  # in place of a key's value, and of a measured one, that isn't known
WITH_GAPS = ("validation", "exports")  # tables in which every row was measured; in others a value may be of other steps
PARAMS, TOKENS, FLOPS = "params", "trained_tokens", "train_flops"


class UnknownColumnError(Exception):
    """A figure refers to a column that no table has."""


class Frames:
    """Tables of the runs that passed.

    `values`: what each run sets in the sweep; `unset`: what it has of the keys that only other runs set; `predicted`:
    GiB by preflight; `axes`: those of the sweep that have labels; `unscored`: runs whose evaluation failed.
    """

    def __init__(
        self,
        runs: Sequence[RunResult],
        values: Mapping[str, Mapping[str, Any]] | None = None,
        predicted: Mapping[str, float | None] | None = None,
        unset: Mapping[str, Mapping[str, Any]] | None = None,
        axes: Sequence[SweepAxis] = (),
        unscored: Sequence[str] = (),
    ) -> None:
        self._runs = list(runs)
        self._values = _with_named_blends(values or {})
        self._predicted = predicted or {}
        self._unset = _with_named_blends(unset or {})
        self._axes = {axis.name: axis for axis in axes}
        self._unscored = unscored

    def of(self, figure: Figure) -> pd.DataFrame:
        """The rows and columns that a figure shows, with the name of the run.

        A row whose value isn't finite stays in a curve: as a gap.
        """
        rows, places = self._chosen(figure), _places(figure)
        if figure.kind == "line" and figure.over is None and figure.data in WITH_GAPS:
            values = rows.groupby(["run", metrics.SERIES[figure.data]], sort=False)[figure.y]
            rows, places = rows[values.transform("count") > 0], [figure.x]
        return rows.dropna(subset=places).reset_index(drop=True)

    def lacking(self, figure: Figure, shown: Collection[str] = ()) -> dict[str, list[str]]:
        """The runs that a figure can't show, by the column of which they have no value. `shown`: those that it does."""
        found: dict[str, list[str]] = {}
        for run, part in self._chosen(figure).groupby("run", sort=False):
            if run not in shown:
                column = next((name for name in _places(figure) if part[name].isna().all()), figure.y)
                found.setdefault(column, []).append(run)
        return found

    def named(self, column: pd.Series) -> pd.Series:
        """A column whose values are names of groups: a missing value is a group, too."""
        if not column.isna().any():
            return column
        measured = column.name in metrics.columns("runs") or str(column.name).startswith(metrics.EVALUATION)
        return column.astype(object).where(column.notna(), UNKNOWN if measured else NOT_SET)

    def _chosen(self, figure: Figure) -> pd.DataFrame:
        """The rows that a figure's filter leaves, also those without a value that has a place on an axis."""
        table = self.unfiltered(figure)
        for name in figure.filter:
            table = table[table[name].map(text).isin(figure.wanted(name))]
        return table

    def unfiltered(self, figure: Figure) -> pd.DataFrame:
        """All rows of a figure's table, with the columns that it names."""
        table = self.table(figure.data)
        if figure.data == "time" and "kind" not in figure.filter:  # kinds that no run has spent time on say nothing
            table = table[table.groupby("kind")["seconds"].transform("any")]
        series = metrics.SERIES.get(figure.data)
        given = (figure.x, figure.y, figure.value, figure.hue, figure.dash, figure.facet, figure.over, *figure.filter)
        given += (series, "step" if "step" in table.columns and figure.kind in ("bar", "box", "heat") else None)
        asked = list(dict.fromkeys(name for name in given if name is not None))
        if figure.fit == "scaling-law":
            asked = list(dict.fromkeys([*asked, PARAMS, TOKENS]))
        if figure.over and figure.hue is None and "setting" not in asked:
            table = table.assign(setting=table["run"].map(self.settings(figure)))
            asked.append("setting")
        asked += [name for name in metrics.named(figure.y).columns({}) if name in self.runs.columns]
        for name in asked:
            if name not in table.columns:
                if name not in self.runs.columns:
                    raise UnknownColumnError(self._no_column(name, dict.fromkeys([*table.columns, *self.runs.columns])))
                table = table.merge(self.runs[["run", name]], on="run", how="left")
        bars = figure.kind in ("bar", "box")
        groups = (figure.hue, figure.dash, figure.facet, figure.over, *figure.filter, figure.x if bars else None)
        for name in dict.fromkeys(groups):
            if name in table.columns and name in self.runs.columns:
                table = table.assign(**{name: self.named(table[name])})
        columns = list(dict.fromkeys(["run", *(name for name in asked if name not in figure.filter), *figure.filter]))
        return table[columns]

    def _no_column(self, name: str, known: Collection[str]) -> str:
        """Why there is no column of this name, and the nearest: for a score other scores alone."""
        said, failed = f"no run has the column {name!r}", ""
        if name.startswith(metrics.EVALUATION):
            known = [other for other in known if other.startswith(metrics.EVALUATION)]
            failed = f"evaluation of {some(self._unscored)} failed" if self._unscored else ""
            if not known:
                return f"{said}, as {f'the {failed}' if failed else 'no run was evaluated'}"
        meant = " or ".join(map(repr, some_nearest(name, known)))
        hint = f"did you mean {meant}?" if meant else f"there are {', '.join(known)}"
        return f"{said}; {hint}{f' The {failed}' if failed else ''}"

    def pooled(self, figure: Figure, rows: pd.DataFrame) -> list[str]:
        """The swept keys, the model, and steps and sets, in which the values of one mean, bar, box or cell differ.
        `rows`: the figure's.

        `over` is the first; keys that tell its values are left out.
        """
        series = metrics.SERIES.get(figure.data)
        keys = [name for name in dict.fromkeys([*self.swept, "model"]) if self.varies(name)]
        shown = {figure.x, figure.hue, figure.dash, figure.facet, figure.y if figure.value else None}
        shown |= {series, *(["setting"] if figure.hue is None else [])} if figure.over else set()
        # Means of steps are not looked at step by step: runs have them in common.
        groups = [name for name in shown if name in rows.columns and not (figure.over and name in ("step", "tokens"))]
        known = {*shown, figure.over, *(self._determined_by(figure.over) if figure.over else ())}
        others = [name for name in (*keys, series, "step") if name is not None and name not in known]
        own = [name for name in dict.fromkeys(["run", *groups, *others]) if name in rows.columns]
        rows = rows[own].drop_duplicates()
        rows = rows.merge(self.runs[["run", *(name for name in keys if name not in own)]], on="run").assign(all="")
        by_group = rows.groupby(["all", *groups], dropna=False)
        found = [name for name in others if name in rows.columns and (by_group[name].nunique(dropna=False) > 1).any()]
        return [*([figure.over] if figure.over else []), *found]

    def settings(self, figure: Figure) -> dict[str, str]:
        """The settings that a figure of means has a curve for, by run.

        They name neither what is on the x axis, of which each curve would have one value, nor what is averaged over.
        """
        without = {SEED, figure.over, *self._determined_by(figure.x)}
        return {run.name: self.setting(run, without) or "all models" for run in self._runs}

    def _determined_by(self, x: str) -> list[str]:
        """The swept keys, and the model, that have one value for each value of a column of the configuration, and the
        other way round: `lr` tells `optimizer.lr`, and `params` the model. An axis's label tells all that it sets."""
        if x in self._axes and x in self.runs.columns:
            keys = [*self.swept, "model"]
            return [key for key in keys if not self.runs[[x, key]].astype(str).drop_duplicates()[x].duplicated().any()]
        planned = {*self.swept, PARAMS, TOKENS, *(name for run in self._runs for name in run.plan)}
        if x not in planned or x not in self.runs.columns:
            return []
        keys = [*self.swept, *(["model"] if self.varies("model") else [])]
        tables = {key: self.runs[[key]].assign(x=self.runs[x]).astype(str).drop_duplicates() for key in keys}
        return [key for key, pairs in tables.items() if pairs[key].is_unique and pairs["x"].is_unique]

    @property
    def swept(self) -> list[str]:
        """The keys of the sweep."""
        return list(dict.fromkeys(name for values in self._values.values() for name in values))

    def swept_by(self, runs: Sequence[str]) -> dict[str, list[Any]]:
        """The values of these runs, also of those that didn't pass, of each swept key in which they differ, and their
        labels."""
        found = {key: [self._unset.get(run, {}).get(key) for run in runs] for key in self.swept}
        for key, values in found.items():
            for place, run in enumerate(runs):
                values[place] = self._values.get(run, {}).get(key, values[place])
        labels = {axis.name: [axis.runs.get(run) for run in runs] for axis in self._axes.values()}
        return {key: values for key, values in {**labels, **found}.items() if len(set(map(text, values))) > 1}

    def is_number(self, name: str) -> bool:
        return pd.api.types.is_numeric_dtype(self.runs[name])

    def varies(self, name: str) -> bool:
        return name in self.runs.columns and self.runs[name].nunique() > 1

    @property
    def has_several_tokenizers(self) -> bool:
        return has_several_tokenizers(run.text for run in self._runs)

    def table(self, name: str) -> pd.DataFrame:
        return {
            "runs": self.runs,
            "steps": self.steps,
            "validation": self.validation,
            "time": self.time,
            "exports": self.exports,
        }[name]

    @functools.cached_property
    def runs(self) -> pd.DataFrame:
        table = pd.DataFrame([self._row(run) for run in self._runs])
        if table.empty:
            return pd.DataFrame(columns=["run", "model"])
        for name in table.columns:
            if name not in ("run", "model", "setting", "layout") and table[name].dtype == object:
                table[name] = _numbers(table[name])
        for name, axis in self._axes.items():
            table[name] = pd.Categorical(table["run"].map(axis.runs), categories=axis.labels, ordered=True)
        rate = table["tokens_per_second_per_gpu"]
        fewest = table.groupby("model")["world_size"].transform("min")
        base = rate.where(table["world_size"] == fewest).groupby(table["model"]).transform("max")
        several = table.groupby("model")["world_size"].transform("nunique") > 1
        # The plan has no parameter count for a recipe that doesn't state its own.
        table[PARAMS] = pd.to_numeric(table[PARAMS], errors="coerce") if PARAMS in table else float("nan")
        table[FLOPS] = 6.0 * table[PARAMS] * table[TOKENS].astype(float)
        table["scaling_efficiency"] = (rate / base).where(several)
        return table

    def _row(self, run: RunResult) -> dict[str, Any]:
        values = dict(self._values.get(run.name, {}))
        plan = {name: value for name, value in run.plan.items() if name not in ("tokens", "state", "why")}
        row: dict[str, Any] = {**plan, "run": run.name, "layout": run.layout}
        row |= {**self._unset.get(run.name, {}), **values}
        row["setting"] = self.setting(run)
        documents = {**run.documents, "preflight": {"tensors_gib": self._predicted.get(run.name)}}
        for metric in metrics.used("figures"):
            row |= metric.columns(documents) if metric.source else {}
        row[TOKENS] = _tokens(run.summary or {})
        row[metrics.BITS] = finite(run.bits_per_byte.get(blends.MAIN))
        return row | {name: finite(value) for name, value in run.scores.items()}

    def setting(self, run: RunResult, without: Collection[str | None] = (SEED,)) -> str:
        """The setting that averaged runs have in common: `dense lr=0.003 tp=2`. A key is called by its last part, or in
        full if another swept key is called so."""
        last = [key.rpartition(".")[2] for key in self.swept]
        kept = {key: value for key, value in self._own(run).items() if key not in (*without, "model")}
        names = {key: key if last.count(short := key.rpartition(".")[2]) > 1 else short for key in kept}
        named = [] if "model" in without else [run.model]
        return " ".join([*named, *(f"{names[key]}={text(value)}" for key, value in kept.items())])

    def _own(self, run: RunResult) -> dict[str, Any]:
        """What distinguishes a run's setting: what it sets, unless runs that don't set it have the same value."""
        values = self._values.get(run.name, {})
        return {key: value for key, value in values.items() if self._defaults.get(key) != text(value)}

    @functools.cached_property
    def _defaults(self) -> dict[str, str]:
        """The values, as text, that all runs have that don't set the key."""
        found: dict[str, set[str]] = {}
        for values in self._unset.values():
            for key, value in values.items():
                found.setdefault(key, set()).add(text(value))
        return {key: next(iter(values)) for key, values in found.items() if len(values) == 1}

    @functools.cached_property
    def steps(self) -> pd.DataFrame:
        """All steps. Further losses have columns `losses/<name>`; `warm` marks the steps that count for the speed."""
        tables = [_steps(run) for run in self._runs if run.steps is not None]
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["run", "step", "loss"])

    @functools.cached_property
    def validation(self) -> pd.DataFrame:
        rows = [
            {
                "run": run.name,
                "step": step,
                "set": name,
                "loss": finite(loss),
                "bits_per_byte": finite(run.bits(name, loss)),
            }
            for run in self._runs
            for step, losses in run.validation
            for name, loss in losses.items()
        ]
        return pd.DataFrame(rows, columns=metrics.columns("validation"))

    @functools.cached_property
    def exports(self) -> pd.DataFrame:
        """The results of every checkpoint that was exported along a run's training; a score that one lacks, or that
        isn't finite, is a row without a value."""
        rows = []
        for run in self._runs:
            scores = dict.fromkeys(name for one in run.along for name in by_score(one.numbers))
            for one in run.along:
                losses = {} if one.loss is None else {"validation loss": one.loss}
                for name, value in {**losses, **scores, **by_score(one.numbers)}.items():
                    rows.append({"run": run.name, "step": one.iteration, "name": name, "value": finite(value)})
        return pd.DataFrame(rows, columns=metrics.columns("exports")).astype({"value": float})

    @functools.cached_property
    def time(self) -> pd.DataFrame:
        rows = [
            {
                "run": run.name,
                "kind": kind,
                "time_share": seconds / run.goodput.allocated_seconds,
                "seconds": seconds,
            }
            for run in self._runs
            if run.goodput and run.goodput.allocated_seconds
            for kind, seconds in run.goodput.seconds.items()
        ]
        return pd.DataFrame(rows, columns=metrics.columns("time"))


def _tokens(summary: Mapping[str, Any]) -> int | None:
    """Tokens that the model was trained on, by the runs that this one continues too; None if they aren't known."""
    before = summary.get("tokens_before")  # None in summaries of earlier versions, too
    if before is None:
        before = None if summary.get("parent") else 0
    return None if before is None or "tokens" not in summary else summary["tokens"] + before


def finite(value: float | None) -> float | None:
    """A value that has a place on an axis and in a mean."""
    return value if value is not None and math.isfinite(value) else None


def _places(figure: Figure) -> list[str]:
    """The columns whose values have places on the axes or colours of a scale."""
    return [name for name in (figure.x, figure.y, figure.value) if name is not None]


def _steps(run: RunResult) -> pd.DataFrame:
    table = run.steps.copy()
    table["tokens_per_second"] = table["tokens"] / table["seconds"]
    # The last step has the run's trained_tokens: steps before a run continued in place are rows of their own, those of
    # other parents aren't.
    trained = _tokens(run.summary or {})
    before = float("nan") if trained is None else trained - table["tokens"].sum()
    table["tokens"] = before + table["tokens"].cumsum()
    table["warm"] = run.warm.map({True: "true", False: "false"})
    return table.drop(columns=["attempt", "replayed", "time", "skipped"]).assign(run=run.name)


def _numbers(column: pd.Series) -> pd.Series:
    """Convert a column to numbers, if all known values are numeric. plan.tsv has `-` for unknown ones."""
    known = column.mask(column == "-")
    numbers = pd.to_numeric(known, errors="coerce")
    return numbers if numbers.notna().sum() == known.notna().sum() else column.map(text)


def _with_named_blends(values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Blends by their names in plan.tsv, so that `wiki` and `{wiki: 1.0}` are the same."""

    def shown(key: str, value: Any) -> Any:
        is_blend = key == "data.blend" or key.startswith("data.blend_per_split.")
        return blends.named(value) if is_blend and isinstance(value, Mapping) else value

    return {run: {key: shown(key, value) for key, value in own.items()} for run, own in values.items()}
