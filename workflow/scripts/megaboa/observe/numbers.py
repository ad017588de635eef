"""Statistics that the summaries of runs and of logs share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megaboa.records import Loss, Record, Spread, Tree, plain

# The first steps of every attempt are slow (allocation, compilation, connections) and say nothing about the speed.
WARMUP_STEPS = 3
# The final loss is the mean over this last share of the steps.
TAIL_SHARE = 0.1


def spread(values: Sequence[float]) -> Spread | None:
    if not len(values):
        return None
    p5, median, p95 = np.percentile(values, [5, 50, 95])
    return Spread(median=float(median), p5=float(p5), p95=float(p95), n=len(values))


def loss_summary(steps: Sequence[int], losses: Sequence[float | None]) -> Loss | None:
    """A summary of a loss. A loss that wasn't recorded is None; one that was not finite is NaN or infinite."""
    if not len(losses):
        return None
    known = np.array(losses, dtype=float)
    finite = np.where(np.isfinite(known), known, math.inf)
    lowest = int(np.argmin(finite))
    tail = math.ceil(len(losses) * TAIL_SHARE)
    return Loss(
        first=losses[0],
        last=losses[-1],
        min=float(finite[lowest]) if finite[lowest] < math.inf else None,
        min_step=steps[lowest] if finite[lowest] < math.inf else None,
        tail_mean=float(np.mean(known[-tail:])) if all(loss is not None for loss in losses[-tail:]) else None,
        tail_steps=tail,
    )


def without_nan(summary: dict[str, Any]) -> Tree:
    """Values and records as JSON, which has no NaN: null in its place, and the path under `not_finite`."""
    found: dict[str, str] = {}

    def clean(value: Any, path: str) -> Any:
        if isinstance(value, Record):
            value = plain(value)
        if isinstance(value, dict):
            return {name: clean(item, f"{path}.{name}" if path else name) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [clean(item, f"{path}.{index}") for index, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            found[path] = str(value)
            return None
        return value

    return {**clean(summary, ""), "not_finite": found}
