"""What preflight expected of each run, beside what was measured."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaboa.check.overview import short, size
from megaboa.metrics import named
from megaboa.paths import ExperimentFolder
from megaboa.report.runs import RunResult


@dataclass(frozen=True)
class Expected:
    """A row of preflight.tsv; None is what wasn't known, or wasn't measured."""

    run: str
    tokens: str
    flops: str
    disk: str
    step_source: str
    predicted_seconds: float | None
    measured_seconds: float | None
    predicted_gib: float | None
    measured_gib: float | None

    @property
    def memory_error(self) -> str:
        if self.predicted_gib is None or not self.measured_gib:
            return ""
        return f"{self.predicted_gib / self.measured_gib - 1:+.1%}"


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
        tokens=short(_number(row["tokens"])),
        flops=short(_number(row["flops"])),
        disk="-" if disk is None else size(disk),
        step_source=row["step_source"],
        predicted_seconds=_number(row["step_seconds"]),
        measured_seconds=named("step_seconds").of(run.documents),
        predicted_gib=_number(row["tensors_gib"]),
        measured_gib=named("memory.measured_gib").of(run.documents),
    )


def _number(text: str) -> float | None:
    return None if text == "-" else float(text)
