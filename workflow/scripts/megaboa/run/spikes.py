"""Loss spikes: found in the steps of an attempt, by the settings of `recovery.loss_spike`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any


def find(steps: Sequence[dict[str, Any]], settings: dict[str, Any]) -> tuple[int, int] | None:
    """First and last step of the first spike: at least `patience` losses in a row above the median before them.

    All steps are looked at, not the newest only: several may have been done since somebody last looked.
    """
    patience, window = settings["patience"], settings["window"]
    losses = [(step["step"], step["loss"]) for step in steps if step.get("loss") is not None]
    for start in range(window, len(losses) - patience + 1):
        limit = settings["factor"] * statistics.median(loss for _, loss in losses[start - window : start])
        high = list(itertools.takewhile(lambda entry, limit=limit: entry[1] > limit, losses[start:]))
        if len(high) >= patience:
            return high[0][0], high[-1][0]
    return None
