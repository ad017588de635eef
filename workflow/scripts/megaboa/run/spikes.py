"""Loss spikes: found in the steps of an attempt, by the settings of `recovery.loss_spike`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def find(steps: Sequence[dict[str, Any]], settings: dict[str, Any]) -> tuple[int, int] | None:
    """First and last step of a spike at the end of these steps: `patience` losses in a row above the median before."""
    patience, window = settings["patience"], settings["window"]
    losses = [(step["step"], step["loss"]) for step in steps if step.get("loss") is not None]
    if len(losses) < patience + window:
        return None
    recent, before = losses[-patience:], losses[-patience - window : -patience]
    limit = settings["factor"] * statistics.median(loss for _, loss in before)
    return (recent[0][0], recent[-1][0]) if all(loss > limit for _, loss in recent) else None
