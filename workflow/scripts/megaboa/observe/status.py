"""Progress of every run of an experiment, as a table for the terminal."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from megaboa.files import read_json
from megaboa.observe.progress import (
    Progress,
    format_duration,
    format_speed,
    format_steps,
    read_progress,
)
from megaboa.results import RunFolder, RunStore

STYLES = {"running": "bold cyan", "done": "green", "failed": "bold red", "interrupted": "yellow", "waiting": "dim"}


def experiment_progress(results: str | Path, now: float | None = None) -> list[Progress]:
    """Progress of every run, in the order of the plan."""
    results = Path(results)
    return [run_progress(RunFolder(results / "runs" / run), now) for run in planned_runs(results)]


def planned_runs(results: Path) -> list[str]:
    plan = results / "plan.tsv"
    if not plan.exists():
        return sorted(path.parent.name for path in results.glob("runs/*/run.json"))
    with plan.open(encoding="utf-8", newline="") as stream:
        return [row["run"] for row in csv.DictReader(stream, delimiter="\t")]


def run_progress(run: RunFolder, now: float | None = None) -> Progress:
    """A run's progress, by the link to its attempts that its supervisor makes when it starts."""
    waiting = Progress(run.name, "waiting", total=run.run["training"].get("train_iters"))
    if not run.attempts_link.exists():
        return waiting
    store = RunStore(run.attempts_link.resolve().parent)
    if _outdated(run, store):
        return waiting
    progress = read_progress(store.path, run=run.name, now=now)
    if run.train_manifest.exists():
        # Also where the last attempt was killed after its last checkpoint and could not say that it ended.
        return replace(progress, state="done", detail=None)
    return progress


def progress_table(name: str, runs: list[Progress]) -> Group:
    """A table of the runs and one line that counts them."""
    table = Table(title=Text(name, style="bold"), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("run", no_wrap=True)
    table.add_column("state")
    for heading in ("step", "loss", "steps/s", "ETA", "attempt"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for run in runs:
        table.add_row(
            Text(run.run),
            Text(run.state, style=STYLES.get(run.state, "")),
            format_steps(run),
            "" if run.loss is None else f"{run.loss:.4f}",
            "" if run.steps_per_second is None else format_speed(run.steps_per_second),
            "" if run.eta_seconds is None else format_duration(run.eta_seconds),
            str(run.attempt or ""),
            Text(_note(run), style="dim"),
        )
    counts = Counter(run.state for run in runs)
    line = ", ".join(f"{counts[state]} {state}" for state in STYLES if counts[state])
    return Group(table, Text(line or "no runs", style="dim"))


def as_record(run: Progress) -> dict[str, object]:
    """One run for machines."""
    return {**vars(run), "eta_seconds": run.eta_seconds}


def _note(run: Progress) -> str:
    if run.state == "running":
        return f"on {run.host}, last event {format_duration(run.age_seconds or 0)} ago"
    return run.detail or ""


def _outdated(run: RunFolder, store: RunStore) -> bool:
    """Whether the attempts belong to the run as it was configured before: its own have not begun."""
    return store.identity.exists() and read_json(store.identity)["run"] != run.run
