"""A run's attempts brought together: its steps in one table, its summary, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaboa.files import digest, read_json, read_jsonl
from megaboa.observe import performance
from megaboa.observe.accounting import read_lives
from megaboa.observe.drift import drift
from megaboa.observe.goodput import goodput
from megaboa.observe.progress import last_step
from megaboa.observe.routing import add_routing
from megaboa.observe.steps import Row, read_attempts, read_events, step_rows, steps_in
from megaboa.observe.summary import summarize
from megaboa.results import RunFolder, RunStore


@dataclass(frozen=True)
class Measured:
    rows: list[Row]
    summary: dict[str, Any]
    goodput: dict[str, Any]


def trained(folder: RunFolder, peak_tflops: float | None = None) -> Measured:
    """Of a run that came to its end, as its train.json says."""
    train = read_json(folder.train_manifest)
    store = RunStore(folder.store)
    attempts, events = read_attempts(store), read_events(store)
    rows = add_routing(step_rows(events, steps_in(train.get("skipped", []))), store)
    numbers = [start["attempt"] for start in attempts]
    final = [row for row in rows if not row["replayed"]]
    summary = summarize(
        train["run"],
        train,
        attempts,
        events,
        rows,
        drift=drift(folder.run, read_json(store.identity), train, final),
        peak_tflops=peak_tflops,
        memory=performance.memory(store, numbers),
        **performance.consoles(store, numbers, train["world_size"]),
    )
    return Measured(rows, summary, _time(store, events, rows))


def so_far(folder: RunFolder, store: RunStore) -> Measured | None:
    """Of a run that has not come to its end: what its gates say means nothing yet. None before its first attempt."""
    attempts, steps = read_attempts(store), last_step(store)
    if not attempts or steps is None:
        return None
    events, left_out = read_events(store), attempts[-1].get("skipped", [])
    rows = add_routing(step_rows(events, steps_in(left_out)), store)
    train = {
        "identity": digest(read_json(store.identity)),
        "world_size": attempts[-1]["world_size"],
        "train_iters": steps,
        "skipped": left_out,
        "parent": folder.run.get("parent"),
    }
    return Measured(rows, summarize(folder.name, train, attempts, events, rows), _time(store, events, rows))


def _time(store: RunStore, events: list[dict[str, Any]], rows: list[Row]) -> dict[str, Any]:
    entries = read_jsonl(store.ledger)
    jobs = sorted({entry["job"] for entry in entries if entry.get("job")})
    return goodput(entries, events, rows, read_lives(jobs))
