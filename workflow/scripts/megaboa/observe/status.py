"""Progress of every run of an experiment, as a table for the terminal, and the standing of untrained runs."""

from __future__ import annotations

import csv
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from megaboa import formats
from megaboa.doctor import examine
from megaboa.errors import InputError, forbidden
from megaboa.observe.queue import Queue, trained_by, with_queue
from megaboa.paths import ExperimentFolder, RunFolder
from megaboa.records import read_paces
from megaboa.run import checkpoints, claims, ledger, stragglers, unfinished
from megaboa.run.identity import is_outdated, is_trained
from megaboa.run.outlook import without_store
from megaboa.run.progress import (
    Progress,
    format_age,
    format_duration,
    format_speed,
    format_steps,
    read_progress,
    slowest_save,
    usual_seconds_per_step,
)
from megaboa.run.recovery import lead_seconds, links, wall_seconds
from megaboa.scheduler.answers import QueuedJob
from megaboa.scheduler.registry import cluster
from megaboa.store_paths import RunStore

STYLES = {
    "running": "bold cyan",
    "queued": "blue",
    "done": "green",
    "failed": "bold red",
    "lost": "bold red",
    "interrupted": "yellow",
    "unknown": "yellow",
    "waiting": "dim",
}
STOPPED = ("failed", "lost", "interrupted", "unknown")  # states that need a person's attention
WIDE = 140  # from so many columns on a terminal has room for everything
SILENT_SECONDS, SILENT_STEPS = 120.0, 10
_RIGHT = {"justify": "right", "no_wrap": True}
SHOWN = 10
SHOWN_SCORE, SCORED_SAVES = 1.1, 3  # a rank is shown as slow if it is above this score at so many saves in a row


def experiment_progress(
    results: str | Path, now: float | None = None, queue: Queue | None = None, only: str | None = None
) -> list[Progress]:
    """Progress of every run, or `only` this one, in the order of the plan. `queue`: the scheduler's, queried just
    before."""
    results = Path(results)
    jobs = trained_by(queue, results) if queue else {}
    runs = [only] if only else planned_runs(results)
    return [_read_progress(ExperimentFolder(results).run(run), now, queue, jobs.get(run, ())) for run in runs]


def _read_progress(run: RunFolder, now: float | None, queue: Queue | None, jobs: Sequence[QueuedJob]) -> Progress:
    """A run's progress. A file of one run that is damaged, or may not be read, doesn't hide the others."""
    try:
        return run_progress(run, now, queue, jobs)
    except InputError as error:
        return Progress(run.name, "failed", detail=str(error))
    except PermissionError as error:
        return Progress(run.name, "unknown", detail=forbidden(error))


def planned_runs(results: Path) -> list[str]:
    plan = ExperimentFolder(results).plan
    if not plan.exists():
        return [run.name for run in ExperimentFolder(results).runs]
    with plan.open(encoding="utf-8", newline="") as stream:
        return [row["run"] for row in csv.DictReader(stream, delimiter="\t") if row.get("state") != "INVALID"]


def run_progress(
    run: RunFolder, now: float | None = None, queue: Queue | None = None, jobs: Sequence[QueuedJob] = ()
) -> Progress:
    """A run's progress, from the link to its attempts, which its supervisor makes, and from the scheduler."""
    store = RunStore.of(run.attempts_link) if run.attempts_link.exists() else None
    if store is None or is_outdated(run, store):
        progress = Progress(run.name, "waiting", total=run.run.training.get("train_iters"))
        if gone := without_store(run):
            progress = replace(progress, state="lost", detail=gone)
        return with_queue(progress, queue, jobs) if queue else progress
    kept = checkpoints.sizes(store.checkpoints)
    progress = read_progress(store.path, run=run.name, now=now)
    progress = replace(progress, checkpoints=len(kept), checkpoint_bytes=sum(kept.values()))
    if run.train_manifest.exists():
        # The manifest counts: the last attempt may have been killed before it could record its end.
        if progress.state != "done":
            told = {"event": "finished", "event_time": run.train_manifest.stat().st_mtime}
            progress = replace(progress, state="done", detail=None, goes_on=False, **told)
        return progress
    if queue:
        progress = with_queue(progress, queue, jobs, claims.last_holder(store.claims))
    left = jobs_left(progress, store, run, time.time() if now is None else now)
    return replace(progress, jobs_left=left, slow=slowest(progress, store))


def slowest(progress: Progress, store: RunStore) -> str | None:
    """A sentence about the slowest rank at the newest saves of a running attempt; None if none stands out."""
    if progress.state != "running" or not progress.attempt or not progress.job:
        return None
    newest = read_paces(store.attempt(progress.attempt).paces, SCORED_SAVES)
    worst = max(stragglers.find(newest, SHOWN_SCORE, SCORED_SAVES), key=lambda one: one.times, default=None)
    if worst is None:
        return None
    nodes, ranks = progress.nodes, len(newest[-1].seconds)
    where = f" on {nodes[worst.rank * len(nodes) // ranks]}" if nodes else ""
    return f"rank {worst.rank}{where} calculates {worst.times:.2f} times as long as the others"


def jobs_left(progress: Progress, store: RunStore, run: RunFolder, now: float) -> int | None:
    """The number of jobs that the run needs after the running one; None if its speed or the job's end is unknown."""
    step = usual_seconds_per_step(store) if progress.job and progress.total and progress.state != "done" else None
    if step is None or (progress.state == "running" and progress.job_ends is None):
        return None
    wall, save = wall_seconds(run.launch.runtime), slowest_save(store)
    seconds = (progress.total - progress.step) * step
    if progress.state == "running":
        seconds -= progress.job_ends - now - lead_seconds(save, step, wall)
    return links(seconds, wall, step, save)


def progress_table(name: str, runs: Sequence[Progress], now: float | None = None) -> ProgressTable:
    """A table of the runs and a line with their counts, for terminals of any width."""
    return ProgressTable(name, runs, time.time() if now is None else now)


def _mean_size(run: Progress) -> str:
    return formats.size(run.checkpoint_bytes / run.checkpoints)


@dataclass(frozen=True)
class _Column:
    heading: str
    cell: Callable[[Progress], str]
    options: dict[str, Any]


_COLUMNS = (
    _Column("step", format_steps, _RIGHT),
    _Column("loss", lambda run: "" if run.loss is None else f"{run.loss:.4f}", _RIGHT),
    _Column(
        "tokens/s", lambda run: "" if run.tokens_per_second is None else formats.count(run.tokens_per_second), _RIGHT
    ),
    _Column("ETA", lambda run: "" if run.eta_seconds is None else format_duration(run.eta_seconds), _RIGHT),
    _Column("try", lambda run: str(run.attempt or ""), _RIGHT),
    _Column("job", lambda run: run.job or "", _RIGHT),
    _Column("+jobs", lambda run: "" if run.jobs_left is None else str(run.jobs_left), _RIGHT),
)
_WIDE_COLUMNS = (
    *_COLUMNS[:2],
    _Column("steps/s", lambda run: "" if run.steps_per_second is None else format_speed(run.steps_per_second), _RIGHT),
    *_COLUMNS[2:],
    _Column("saved", lambda run: f"{run.checkpoints} x {_mean_size(run)}" if run.checkpoints else "", _RIGHT),
    _Column("nodes", lambda run: ledger.brief(run.nodes), {"overflow": "ellipsis", "no_wrap": True}),
)


@dataclass(frozen=True)
class ProgressTable:
    """The table fitted to the terminal: a narrow one has no nodes and steps/s, and empty columns are omitted."""

    name: str
    runs: Sequence[Progress]
    now: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE
        title = Text(self.name, style="bold")
        padding = (0, 2 if wide else 1, 0, 0)
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=padding)
        table.add_column("run", overflow="fold", max_width=max(options.max_width // 4, 16))
        table.add_column("state", no_wrap=True)
        columns = [column for column in (_WIDE_COLUMNS if wide else _COLUMNS) if any(map(column.cell, self.runs))]
        for column in columns:
            table.add_column(column.heading, max_width=max(options.max_width // 8, 24), **column.options)
        table.add_column("last event")
        for run in self.runs:
            state = Text(run.state, style=STYLES.get(run.state, ""))
            in_full = wide and _needs_somebody(run)
            told = Text(event(run, self.now), style="" if _needs_somebody(run) else "dim")
            told.no_wrap, told.overflow = (not in_full), ("fold" if in_full else "ellipsis")
            table.add_row(Text(run.run), state, *(column.cell(run) for column in columns), told)
        yield table
        for run in self.runs:
            if not wide and _needs_somebody(run):
                yield Text(f"{run.run}: {event(run, self.now)}")
        counts = Counter(run.state for run in self.runs)
        line = ", ".join(f"{counts[state]} {state}" for state in STYLES if counts[state]) or "no runs"
        if any(run.scheduler_silent and not run.holder for run in self.runs):
            line += f"; {cluster().name} could not be asked"
        yield Text(line, style="dim")


def _needs_somebody(run: Progress) -> bool:
    """Whether it has stopped, or its job never starts as it is."""
    return run.state in STOPPED or (run.state == "queued" and run.job_stuck)


def event(run: Progress, now: float) -> str:
    """The present state and the last event: `resumed from 40 after node failure of n2, 3 min ago`."""
    parts = []
    if run.state == "running" and run.event is None:
        parts.append("its job starts")
    elif run.state == "running" and _is_silent(run):
        parts.append(f"no step for {format_age(run.age_seconds or 0)}")
    elif run.state in STOPPED and run.detail and run.detail not in (run.event or ""):
        parts.append(run.detail)
    if run.slow:
        parts.append(run.slow)
    if run.event:
        parts.append(f"{run.event}, {format_age(now - (run.event_time or now))} ago")
    if run.scheduler_silent:
        parts.append(
            f"trained by {run.holder}, as far as known here"
            if run.holder
            else f"unknown to {cluster().name} at the moment"
        )
    return " ".join([*_waits_for(run, now), "; ".join(parts)]).strip()


def _waits_for(run: Progress, now: float) -> list[str]:
    if run.state != "queued" or not run.job_state:
        return []
    starts = f"starts in {format_age(run.job_starts - now)}" if run.job_starts and run.job_starts > now else ""
    reason = ", ".join(part for part in (run.job_reason, starts) if part)
    return [f"({reason})"] if reason else []


def as_record(run: Progress) -> dict[str, object]:
    """A run as JSON."""
    record = {**vars(run), "nodes": list(run.nodes), "eta_seconds": run.eta_seconds}
    # JSON has no NaN
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }


def _is_silent(run: Progress) -> bool:
    steps = SILENT_STEPS / run.steps_per_second if run.steps_per_second else 0
    return (run.age_seconds or 0) > max(SILENT_SECONDS, steps)


@dataclass(frozen=True)
class Standing:
    run: str
    state: str  # FAIL: it has failed, and won't be resumed automatically. NOT_RUN: all else
    why: str
    stopped: str = ""  # of an interrupted run: where it stopped, and what the same call does


def missing(results: Path, queue: Queue | None = None) -> list[Standing]:
    """The planned runs that aren't trained in their present configuration, in the order of the plan."""
    jobs = trained_by(queue, results) if queue else {}
    standings = (_standing_of(ExperimentFolder(results).run(run), queue, jobs) for run in planned_runs(results))
    return [one for one in standings if one]


def failed(experiment: str, runs: Sequence[Standing]) -> list[str]:
    """An experiment's failed runs, and advice on them, in lines for the end of a call; empty if none has failed."""
    found = [run for run in runs if run.state == "FAIL"]
    if not found:
        return []
    more = [f"  and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return [
        f"{formats.counted(len(found), 'run')} failed, and report and bundle need every run of the plan:",
        *(f"  {run.run}: {run.why}" for run in found[:SHOWN]),
        *more,
        f"`megaboa doctor {experiment}` says what to try, `megaboa interim {experiment}` makes a report of what is "
        "there; to finish without a run, name it in `sweep.exclude`",
    ]


def interrupted(runs: Sequence[Standing]) -> list[str]:
    """The runs that somebody has stopped, or is stopping on a cluster, in lines for the end of a call."""
    found = [run for run in runs if run.stopped]
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return [*(f"{run.run} {run.stopped}" for run in found[:SHOWN]), *more]


def _standing_of(folder: RunFolder, queue: Queue | None, jobs: Mapping[str, Sequence[QueuedJob]]) -> Standing | None:
    """None if the run is trained. A damaged file is this run's failure, and doesn't hide those of others.

    Of a run whose files may not be read nothing is known.
    """
    try:
        run = run_progress(folder, queue=queue, jobs=jobs.get(folder.name, ()))
        return None if is_trained(folder) else _standing(folder, run)
    except InputError as error:
        return Standing(folder.name, "FAIL", str(error))
    except PermissionError as error:
        return Standing(folder.name, "NOT_RUN", said := forbidden(error), f"can't be looked at: {said}")


def _standing(folder: RunFolder, run: Progress) -> Standing:
    state = "FAIL" if run.state == "failed" and not run.goes_on else "NOT_RUN"
    return Standing(folder.name, state, _why(folder, run), _stopped(folder, run))


def _stopped(folder: RunFolder, run: Progress) -> str:
    of = f" of {run.total}" if run.total else ""
    if run.state == "running":
        return f"has not ended yet, at step {run.step}{of}: `megaboa status {folder.experiment}/{run.run}` shows it"
    if run.state not in ("interrupted", "lost") or not folder.attempts_link.exists():
        return ""
    saved = checkpoints.latest(RunStore.of(folder.attempts_link).checkpoints)
    if not saved:
        return f"stopped at step {run.step}{of}, nothing was saved; the same call starts it again from {folder.start}"
    if because := unfinished.why_refused(folder):
        return f"stopped at step {run.step}{of}, saved at step {saved}; {because}"
    if saved < run.step:
        return f"stopped at step {run.step}{of}, saved at step {saved}; the same call resumes it from there"
    return f"stopped at step {run.step}{of}, saved; the same call resumes it"


def _why(folder: RunFolder, run: Progress) -> str:
    if run.state == "waiting":
        return "has not begun"
    if gone := without_store(folder):
        return gone
    if run.state == "done":
        return "trained, but with another configuration: the next call checks it again"
    said = examine.run(folder, None)
    verdict = f": {said[0].removeprefix(f'{folder.name}: ')}" if said else ""
    return f"{run.state}, step {format_steps(run)}{verdict}"
