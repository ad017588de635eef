"""Where the runs stand that are not trained: failed for good, or not there yet, and the doctor's word for why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaboa.doctor import examine
from megaboa.observe.slurm_jobs import Queue
from megaboa.observe.status import experiment_progress
from megaboa.paths import ExperimentFolder, RunFolder
from megaboa.run.identity import is_trained
from megaboa.run.progress import Progress, format_steps

SHOWN = 10


@dataclass(frozen=True)
class Standing:
    run: str
    state: str  # FAIL: no call is on its way to go on with it. NOT_RUN: all else
    why: str


def missing(results: Path, queue: Queue | None = None) -> list[Standing]:
    """The planned runs that are not trained as they are configured now, in the order of the plan."""
    untrained = (run for run in experiment_progress(results, queue=queue) if not is_trained(_folder(results, run)))
    return [_standing(_folder(results, run), run) for run in untrained]


def failed(experiment: str, runs: Sequence[Standing]) -> list[str]:
    """What to say after a call that ended with failed runs of an experiment, in lines: what else can be had."""
    found = [run for run in runs if run.state == "FAIL"]
    if not found:
        return []
    more = [f"  and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return [
        f"{len(found)} run{'s' if len(found) > 1 else ''} failed, and report and bundle need every run of the plan:",
        *(f"  {run.run}: {run.why}" for run in found[:SHOWN]),
        *more,
        f"`megaboa doctor {experiment}` says what to try, `megaboa interim {experiment}` makes a report of what is "
        "there; to finish without a run, take its values out of `sweep`",
    ]


def _folder(results: Path, run: Progress) -> RunFolder:
    return ExperimentFolder(results).run(run.run)


def _standing(folder: RunFolder, run: Progress) -> Standing:
    state = "FAIL" if run.state == "failed" and not run.goes_on else "NOT_RUN"
    return Standing(folder.name, state, _why(folder, run))


def _why(folder: RunFolder, run: Progress) -> str:
    if run.state == "waiting":
        return "has not begun"
    if run.state == "done":
        return "trained, but not as it is configured now: the next call looks at it again"
    said = examine.run(folder, None)
    verdict = f": {said[0].removeprefix(f'{folder.name}: ')}" if said else ""
    return f"{run.state}, step {format_steps(run)}{verdict}"
