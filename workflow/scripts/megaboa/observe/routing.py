"""Which experts a run's tokens went to, over all its ranks; of a step that was done again, the last time."""

from __future__ import annotations

import json
from typing import Any

from megaboa.files import read_jsonl
from megaboa.observe.steps import Row
from megaboa.paths import RunStore

Layers = dict[str, dict[str, Any]]  # by layer: tokens of each expert, and the smallest margins of a choice


def add_routing(rows: list[Row], store: RunStore) -> list[Row]:
    """The rows, those of steps whose experts were written down with a column `routing` (JSON)."""
    found: dict[int, dict[int, Layers]] = {}
    for number in {row["attempt"] for row in rows}:
        found[number] = _of_attempt(store, number)
    if not any(found.values()):
        return rows
    return [{**row, "routing": _text(found[row["attempt"]].get(row["step"]))} for row in rows]


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
