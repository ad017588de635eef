"""Compares measurements with preflight's predictions and with published tables."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megaboa import formats
from megaboa.check.costs import OWN
from megaboa.layout import AXES
from megaboa.metrics import named
from megaboa.paths import ExperimentFolder
from megaboa.report.baseline import Setting, more, sample, settings_of
from megaboa.report.intervals import Sample, judged, ratio
from megaboa.report.runs import RunResult

# A run is compared with the rows of its own layout, by their other conditions. Axes that a table doesn't mention have
# their defaults. But many tables don't mention sequence parallelism, or axes that needn't be stated: without a value in
# the table, these aren't compared.
LAYOUT = {"world_size": 1, **{axis.name: axis.default or "-" for axis in AXES if axis.stated}}
# Allowed shortfall from a published range. NVIDIA's own reference training accepts 95% of its baseline.
LIMIT = 0.05
# Numbers of parameters are published with two or three digits.
PARAMS_TOLERANCE = 0.02


@dataclass(frozen=True)
class Expected:
    """A row of preflight.tsv with measurements. None: unknown, or not measured.

    `model_seconds` and `model_parts` are the speed model's step time and its parts, even if the expected time is that
    of an earlier run.
    """

    run: str
    tokens: str
    flops: str
    disk: str
    step_source: str
    model_seconds: float | None
    model_parts: str
    predicted_seconds: float | None
    measured_seconds: float | None
    predicted_gib: float | None
    measured_gib: float | None

    @property
    def memory_error(self) -> str:
        return _error(self.predicted_gib, self.measured_gib)

    @property
    def model_error(self) -> str:
        """The error of the speed model."""
        return _error(self.model_seconds, self.measured_seconds)


def _error(predicted: float | None, measured: float | None) -> str:
    return "" if predicted is None or not measured else f"{predicted / measured - 1:+.1%}"


def known_columns(expected: Sequence[Expected]) -> set[str]:
    """The columns that any run has a value of."""
    names = [*(one.name for one in fields(Expected)), "memory_error", "model_error"]
    return {name for name in names if any(getattr(one, name) not in (None, "", "-") for one in expected)}


def load_expected(results: Path, runs: Sequence[RunResult]) -> list[Expected]:
    path = ExperimentFolder(results).preflight_table
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as stream:
        rows = {row["run"]: row for row in csv.DictReader(stream, delimiter="\t")}
    return [_expected(rows[run.name], run) for run in runs if run.name in rows]


def _expected(row: dict[str, str], run: RunResult) -> Expected:
    disk = _number(row["disk_bytes"])
    return Expected(
        run=run.name,
        tokens=formats.count(_number(row["tokens"])),
        flops=formats.count(_number(row["flops"])),
        disk="-" if disk is None else formats.size(disk),
        step_source=row["step_source"],
        model_seconds=_number(row.get("model_seconds") or "-"),
        model_parts=(row.get("model_parts") or "-").removeprefix("-"),
        predicted_seconds=None if row["step_source"] == OWN else _number(row["step_seconds"]),
        measured_seconds=named("step_seconds").of(run.documents),
        predicted_gib=_number(row["tensors_gib"]),
        measured_gib=named("memory.measured_gib").of(run.documents),
    )


def _number(text: str) -> float | None:
    return None if text == "-" else float(text)


def gap_rows(table: dict[str, Any], runs: list[RunResult]) -> list[dict[str, Any]]:
    """One row for each published value and each run of its layout; without such a run, the published value alone.

    If a table has several rows of one layout, for other models, GPUs or precisions, those that differ least are taken.
    """
    rows, stated = [], [{**table["conditions"], **published["conditions"]} for published in table["rows"]]
    least_differing = {
        run.name: min(
            (len(_differing(one, run)[0]) for one in stated if _same_layout(one, run.plan)),
            default=0,
        )
        for run in runs
    }
    for published, conditions in zip(table["rows"], stated, strict=True):
        like = [run for run in runs if _same_layout(conditions, run.plan)]
        like = [run for run in like if len(_differing(conditions, run)[0]) == least_differing[run.name]]
        for quantity, (least, most) in published["values"].items():
            known = {"row": published["name"], "quantity": quantity, "published": [least, most]}
            for setting in settings_of(like):
                judged_so = _interval(quantity, least, most, setting)
                rows += [
                    {**known, **_measured(quantity, least, most, conditions, run, judged_so)} for run in setting.runs
                ]
            if not like:
                nothing = dict.fromkeys(("run", "measured", "ratio", "low", "high", "interval_by", "verdict", "why"))
                rows.append({**known, **nothing, "differs": [], "unknown": []})
    return rows


def _interval(quantity: str, least: float, most: float, setting: Setting) -> dict[str, Any]:
    """The interval of the ratio to the middle of the published range, and the verdict on its worse end."""
    ours, less = sample(quantity, setting.runs), named(quantity).less_is_better
    if ours is None:
        return dict.fromkeys(("low", "high", "interval_by", "verdict", "why"))
    middle = ratio(ours, Sample(((least + most) / 2,), exact=True))
    found = ratio(ours, Sample((most if less else least,), exact=True))
    well = judged(found, LIMIT, less)
    verdict = {True: "PASS", False: "FAIL", None: "can't be told"}[well]
    why = more(found, LIMIT, less) if well is None else None
    return {"low": middle.low, "high": middle.high, "interval_by": middle.by, "verdict": verdict, "why": why}


def _measured(
    quantity: str, least: float, most: float, conditions: dict[str, Any], run: RunResult, found: dict[str, Any]
) -> dict[str, Any]:
    value = named(quantity).of(run.documents)
    differs, unknown = _differing(conditions, run)
    share = None if value is None else value / ((least + most) / 2)
    if differs or value is None:
        found = {**found, "verdict": None, "why": None}
    return {"run": run.name, "measured": value, "ratio": share, **found, "differs": differs, "unknown": unknown}


def _differing(conditions: dict[str, Any], run: RunResult) -> tuple[list[str], list[str]]:
    """Conditions in which a run differs from a published row, and those that are unknown for the run."""
    differs, unknown = [], []
    for name, asked in conditions.items():
        have = run.summary.get("gpu") if name == "gpu" else run.plan.get(name)
        if have in (None, "-", "recipe") and name not in LAYOUT and name != "sp":
            unknown.append(f"{name}: {_text(asked)}")
        elif not _same(name, asked, have):
            differs.append(f"{name}: {_text(have)} instead of {_text(asked)}")
    return differs, unknown


def _same_layout(conditions: dict[str, Any], plan: dict[str, str]) -> bool:
    asked = {**LAYOUT, **{name: value for name, value in conditions.items() if name in LAYOUT or name == "sp"}}
    return all(_same(name, value, plan.get(name, LAYOUT.get(name, False))) for name, value in asked.items())


def _same(name: str, asked: Any, have: Any) -> bool:
    if name == "params":
        return abs(float(have) / asked - 1) <= PARAMS_TOLERANCE
    if name == "precision" and asked == "fp8":  # the table doesn't name the scaling
        return "_fp8_" in _text(have)
    if name == "precision":  # ignore the suffix of Bridge's names
        return _text(have).removesuffix("_mixed") == _text(asked).removesuffix("_mixed")
    if name in ("gpu", "model"):  # "GPT OSS 120B" matches gpt-oss-120b
        return _letters(have).startswith(_letters(asked))
    return _text(have) == _text(asked)


def _letters(value: Any) -> str:
    return re.sub(r"[^a-z0-9]", "", _text(value).lower())


def _text(value: Any) -> str:
    """A value as plan.tsv has it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
