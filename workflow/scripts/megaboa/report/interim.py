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
from megaboa.records import ExportRecord, ExportSpec, TrainRecord, read, read_if_there
from megaboa.report.checks import is_evaluated
from megaboa.report.runs import RunResult, is_left_out, load_run, read_plan, result_of, with_names, with_texts
from megaboa.run.identity import is_outdated
from megaboa.run.versions import versions
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
    if not _is_exported(folder):
        return replace(found, export=None, evaluation={})
    return found if is_evaluated(folder.path) else replace(found, evaluation={})


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
    return replace(_result(folder, plan, found), **known, checkpoint=None, export=None, evaluation={})


def _result(folder: RunFolder, plan: dict[str, str], found: measure.Measured) -> RunResult:
    return result_of(folder, plan, found.summary, table_of(found.rows).to_pandas(), found.goodput)


def _is_exported(folder: RunFolder) -> bool:
    """Whether the export is that of the present training, or of an earlier version, where that may be asked for."""
    export = read_if_there(ExportRecord, folder.export)
    if export is None:
        return False
    newest, *earlier = [one.store.path for one in versions(folder, RunStore(folder.store))]
    asked = read_if_there(ExportSpec, folder.experiment_folder.specs.of("exports", folder.name))
    of_any = asked is not None and asked.checkpoint != "final"
    return not {newest, *(earlier if of_any else ())}.isdisjoint(Path(export.checkpoint).parents)
