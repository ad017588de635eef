"""Combines a run's attempts: a table of its steps, its summary, and the breakdown of its time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaboa.harmless import without_harmless
from megaboa.observe import performance
from megaboa.observe.goodput import goodput
from megaboa.observe.steps import Row, add_routing, read_attempts, read_events, step_rows, steps_in
from megaboa.observe.summary import summarize, timed_rows, validation
from megaboa.paths import RunFolder
from megaboa.records import (
    AttemptStart,
    Called,
    Goodput,
    Identity,
    RunSpec,
    StepEvent,
    Summary,
    TrainRecord,
    Tree,
    Validation,
    parse,
    read,
    read_ledger,
)
from megaboa.run.identity import asked_as
from megaboa.run.progress import last_step
from megaboa.scheduler.registry import cluster
from megaboa.store_paths import RunStore


@dataclass(frozen=True)
class Measured:
    rows: list[Row]
    summary: Summary
    goodput: Goodput | None  # None without recorded attempts


def trained(folder: RunFolder, peak_tflops: float | None = None) -> Measured:
    """Measure a run that is completely trained according to its train.json."""
    train = read(TrainRecord, folder.train_manifest)
    store = RunStore(Path(train.store))
    attempts, events, identity = read_attempts(store), read_events(store), read(Identity, store.identity)
    rows = add_routing(step_rows(events, steps_in(train.skipped)), store)
    numbers = [start.attempt for start in attempts]
    final = [row for row in rows if not row.replayed]
    energy, stragglers = performance.consoles(store, numbers, train.world_size)
    summary = summarize(
        train.run,
        train,
        attempts,
        events,
        rows,
        drift=drift(asked_as(folder, identity), identity, train, final),
        peak_tflops=peak_tflops,
        memory=performance.memory(store, numbers),
        gpus=performance.gpus(store, numbers, timed_rows(final)),
        energy=energy,
        stragglers=stragglers,
    )
    earlier = _earlier(folder)
    summary = replace(summary, tokens_before=earlier.tokens, validation=(*earlier.evaluated, *summary.validation))
    return Measured([*earlier.rows, *rows], summary, _time(store, events, rows))


@dataclass(frozen=True)
class _Earlier:
    """What was before a run's own steps, up to the checkpoints that were continued from."""

    tokens: int | None = 0  # of all its parents; None if one of them is gone
    rows: tuple[Row, ...] = ()  # and evaluations: only of the parents that it continues in place
    evaluated: tuple[Validation, ...] = ()


def _earlier(folder: RunFolder) -> _Earlier:
    parent, before = folder.run.parent, folder.parent_folder
    if parent is None or before is None:
        return _Earlier()
    if not folder.is_in_place and not before.train_manifest.exists():
        return _Earlier(tokens=None)
    train = read(TrainRecord, before.train_manifest)
    store, further = RunStore(Path(train.store)), _earlier(before)
    events = read_events(store)
    done = step_rows(events, steps_in(train.skipped))
    last = max((row.attempt for row in done), default=0)
    own = [row for row in done if row.step <= parent.iteration]  # train.json may be of a later one
    tokens = None
    if further.tokens is not None and store.path.exists():
        tokens = further.tokens + sum(row.tokens or 0 for row in own if not row.replayed)
    if not folder.is_in_place:
        return _Earlier(tokens)
    # The run's own attempts begin with number 1.
    rows = tuple(replace(row, attempt=row.attempt - last) for row in (*further.rows, *own))
    evaluated = [one for one in validation(events) if one.step <= parent.iteration]
    return _Earlier(tokens, rows, (*further.evaluated, *evaluated))


def so_far(folder: RunFolder, store: RunStore) -> Measured | None:
    """Measure an unfinished run. The gates in its summary mean nothing yet. None before the first attempt."""
    attempts, steps = read_attempts(store), last_step(store)
    if not attempts or steps is None:
        return None
    events, left_out = read_events(store), attempts[-1].skipped
    rows = add_routing(step_rows(events, steps_in(left_out)), store)
    train = TrainRecord(
        run=folder.name,
        identity=read(Identity, store.identity).digest,
        store=str(store.path),
        world_size=attempts[-1].world_size,
        train_iters=steps,
        iteration=0,
        skipped=left_out,
        parent=folder.run.parent,
    )
    numbers, final = [start.attempt for start in attempts], [row for row in rows if not row.replayed]
    gpus = performance.gpus(store, numbers, timed_rows(final))
    summary = summarize(folder.name, train, attempts, events, rows, gpus=gpus)
    return Measured(rows, summary, _time(store, events, rows))


def _time(store: RunStore, events: list[StepEvent], rows: list[Row]) -> Goodput | None:
    entries = read_ledger(store.ledger)
    jobs = sorted({entry.job for entry in entries if isinstance(entry, AttemptStart | Called) and entry.job})
    return goodput(entries, events, rows, cluster().lives(jobs))


def drift(asked: Tree, identity: Identity, train: TrainRecord, final: list[Row]) -> list[str]:
    """Reasons to distrust a run. `asked` is its run.json, `identity` is recorded in its store."""
    reasons = []
    if identity.digest != train.identity:
        reasons.append("the store holds another run than the one that train.json is about")
    if changed := sorted(_differences(without_harmless(asked), without_harmless(identity.run))):
        reasons.append(f"the configuration has drifted since it was trained: {', '.join(changed)}")
    expected = _tokens_per_step(parse(RunSpec, asked, "run.json"))
    other = sorted({row.tokens for row in final if row.tokens is not None} - {expected})
    if expected and other:
        reasons.append(f"steps of {' and '.join(map(str, other))} tokens instead of {expected}")
    return reasons


def _differences(one: Any, other: Any, path: str = "") -> set[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        names = one.keys() | other.keys()
        return set().union(*(_differences(one.get(name), other.get(name), f"{path}{name}.") for name in names))
    return set() if one == other else {path.rstrip(".")}


def _tokens_per_step(run: RunSpec) -> int | None:
    """Tokens per step; None if the recipe or an override determines them."""
    training = run.training
    if run.overrides or not training.get("global_batch_size") or not training.get("seq_length"):
        return None
    return training["global_batch_size"] * training["seq_length"]
