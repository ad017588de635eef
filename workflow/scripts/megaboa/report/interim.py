"""The report of incomplete experiments. It only reads results, and doesn't touch the inputs of the final report."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from megaboa.doctor import failed_stages
from megaboa.observe import measure
from megaboa.observe.queue import read_queue
from megaboa.observe.status import Standing, missing
from megaboa.observe.steps import table_of
from megaboa.paths import RunFolder
from megaboa.records import TrainRecord, read
from megaboa.report.exported import along_so_far
from megaboa.report.runs import RunResult, is_left_out, load_run, read_plan, result_of, with_names, with_texts
from megaboa.run.identity import is_outdated
from megaboa.store_paths import RunStore


@dataclass(frozen=True)
class Interim:
    """The summary at the top of an interim report."""

    made: str
    runs: int
    missing: list[Standing]
    stages: list[str]  # failed stages other than training


def load_interim(results: Path) -> tuple[list[RunResult], Interim]:
    """Every run of plan.tsv in its present state, and the missing ones."""
    absent = {run.run: run for run in missing(results, read_queue())}
    runs = [_load(RunFolder(results / "runs" / row["run"]), row, absent) for row in read_plan(results)]
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    failed = [line for line in failed_stages.failed(results) if not line.startswith(" ")]
    return with_texts(results, with_names(runs)), Interim(made, len(runs), list(absent.values()), failed)


def _load(folder: RunFolder, plan: dict[str, str], absent: dict[str, Standing]) -> RunResult:
    if is_left_out(plan):
        return load_run(folder, plan)
    if folder.name in absent:
        return _unfinished(folder, plan, absent[folder.name])
    found = _of_metrics(folder, plan) or _result(folder, plan, measure.trained(folder, folder.launch.peak_tflops))
    return replace(found, along=along_so_far(folder))


def _of_metrics(folder: RunFolder, plan: dict[str, str]) -> RunResult | None:
    """The run's result from its metrics, if they are those of the present training. Another call may be about to write
    them."""
    try:
        found = load_run(folder, plan)
        identity = read(TrainRecord, folder.train_manifest).identity
    except FileNotFoundError:
        return None
    return found if found.summary and found.goodput and found.summary["identity"] == identity else None


def _unfinished(folder: RunFolder, plan: dict[str, str], standing: Standing) -> RunResult:
    known, found = {"state": standing.state, "reasons": [standing.why]}, None
    if folder.attempts_link.exists():
        store = RunStore.of(folder.attempts_link)
        found = None if is_outdated(folder, store) else measure.so_far(folder, store)
    if found is None:
        return RunResult(folder.name, plan, **known)
    shown = replace(_result(folder, plan, found), **known, checkpoint=None, export=None, evaluation={})
    return replace(shown, along=along_so_far(folder))


def _result(folder: RunFolder, plan: dict[str, str], found: measure.Measured) -> RunResult:
    return result_of(folder, plan, found.summary, table_of(found.rows).to_pandas(), found.goodput)
