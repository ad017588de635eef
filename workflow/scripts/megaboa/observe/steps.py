"""A table of a run's steps over all attempts, which marks steps that a later attempt repeated."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megaboa.files import read_jsonl, write_bytes
from megaboa.metrics import VALIDATION_SET
from megaboa.records import LM_LOSS, AttemptStart, Evaluated, Step, StepEvent, read_ledger, read_steps
from megaboa.store_paths import RunStore

COLUMNS = pa.schema(
    [
        ("step", pa.int64()),
        ("attempt", pa.int64()),
        ("replayed", pa.bool_()),
        ("time", pa.float64()),
        ("seconds", pa.float64()),
        ("loss", pa.float64()),
        ("grad_norm", pa.float64()),
        ("lr", pa.float64()),
        ("tokens", pa.int64()),
        ("skipped", pa.bool_()),
    ]
)
# The column `loss` has the language model's loss; every other loss has a column `losses/<name>`, and those of further
# validation sets `valid/<name>`; null at steps without an evaluation.

Layers = dict[str, dict[str, Any]]  # by layer: tokens of each expert, and the smallest routing margins


@dataclass(frozen=True)
class Row:
    """A step of an attempt: the columns of the table."""

    step: int
    attempt: int
    replayed: bool
    time: float
    seconds: float | None
    loss: float | None
    grad_norm: float | None
    lr: float | None
    tokens: int | None
    skipped: bool
    further: dict[str, float | None]  # columns that only some runs have
    routing: str | None = None


def read_attempts(store: RunStore) -> list[AttemptStart]:
    """The start line of every attempt, oldest first."""
    return [event for event in read_ledger(store.ledger) if isinstance(event, AttemptStart)]


def read_events(store: RunStore) -> list[StepEvent]:
    """Every event of every attempt, in order, each with the number of its attempt."""
    numbers = [start.attempt for start in read_attempts(store)]
    return [event for number in numbers for event in read_steps(store.attempt(number).steps, number)]


def step_rows(events: Sequence[StepEvent], left_out: Collection[int] = ()) -> list[Row]:
    """One row per step and attempt, sorted by both. Of the rows of one step only the last is not replayed.

    If a step's batch was left out after a loss spike, all its rows count as replayed: the step was undone.
    """
    steps = {(event.step, event.attempt): event for event in events if isinstance(event, Step)}
    validated: dict[tuple[int, int], dict[str, float | None]] = {}
    for event in events:
        if isinstance(event, Evaluated):
            losses = {name: _float(v) for name, v in event.losses.items() if name.startswith(VALIDATION_SET)}
            validated.setdefault((event.step, event.attempt), {}).update(losses)
    newest = dict(sorted(steps))
    return [
        _row(steps[step, attempt], attempt != newest[step] or step in left_out, validated.get((step, attempt), {}))
        for step, attempt in sorted(steps)
    ]


def steps_in(ranges: Iterable[Sequence[int]]) -> set[int]:
    """The steps in ranges: 9, 10, 11 for `[[9, 11]]`."""
    return {step for first, last in ranges for step in range(first, last + 1)}


def write_steps(path: str | Path, rows: list[Row]) -> None:
    """Write the rows as Parquet."""
    buffer = io.BytesIO()
    pq.write_table(table_of(rows), buffer)
    write_bytes(path, buffer.getvalue())


def table_of(rows: list[Row]) -> pa.Table:
    """The rows as a table. A loss that wasn't recorded is null; one that was NaN stays NaN."""
    further = sorted({name for row in rows for name in row.further})
    columns = [*COLUMNS, *((name, pa.float64()) for name in further)]
    if any(row.routing for row in rows):
        columns.append(("routing", pa.string()))
    return pa.Table.from_pylist([{**vars(row), **row.further} for row in rows], schema=pa.schema(columns))


def _row(event: Step, replayed: bool, validated: dict[str, float | None]) -> Row:
    losses = {f"losses/{name}": _float(v) for name, v in (event.losses or {}).items() if name != LM_LOSS}
    return Row(
        step=event.step,
        attempt=event.attempt,
        replayed=replayed,
        time=event.time,
        **{name: _float(getattr(event, name)) for name in ("seconds", "loss", "grad_norm", "lr")},
        tokens=event.tokens,
        skipped=bool(event.skipped),
        further=losses | validated,
    )


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def add_routing(rows: list[Row], store: RunStore) -> list[Row]:
    """Add the recorded tokens of each expert, over all ranks, to the rows, as JSON."""
    found = {number: _of_attempt(store, number) for number in {row.attempt for row in rows}}
    return [replace(row, routing=_text(found[row.attempt].get(row.step))) for row in rows]


def _of_attempt(store: RunStore, number: int) -> dict[int, Layers]:
    steps: dict[int, Layers] = {}
    for path in sorted(store.attempt(number).routing.glob("*.jsonl")):
        for line in read_jsonl(path):
            layers = steps.setdefault(line["step"], {})
            for layer, seen in line["layers"].items():
                layers[layer] = _sum(layers[layer], seen) if layer in layers else seen
    return steps


def _sum(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    load = [sum(pair) for pair in zip(one["load"], other["load"], strict=True)]
    return {"load": load, "margins": sorted([*one["margins"], *other["margins"]])}


def _text(layers: Layers | None) -> str | None:
    return None if layers is None else json.dumps(dict(sorted(layers.items(), key=lambda one: int(one[0]))))
