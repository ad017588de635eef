"""The steps of a log in one table: attempts told apart, what was done again marked, other ranks' copies left out."""

from __future__ import annotations

from array import array
from collections import Counter

import numpy as np
import pandas as pd

from megaboa.observe.logs.events import LineFormat, Steps


class Curve:
    """Takes steps as they come; costs eight bytes for every number that was printed."""

    def __init__(self) -> None:
        self.attempt = 1
        self.copies = 0  # lines about a step of which another rank, or the same one again, has told already
        self._tables: dict[tuple[LineFormat, int], array[float]] = {}
        self._recent = (-1, -1)  # the last two steps
        self._starts: Counter[str | None] = Counter()
        self._pending = False  # a start was announced after steps: the next one is of a new attempt
        self._mains: dict[bool, str | None] = {}  # the rank that is listened to, for lines with and without a number

    def start(self, rank: str | None) -> None:
        """Training begins. Every rank may say so, and some later than others do their first step."""
        self._starts[rank] += 1
        if self._starts[rank] >= self.attempt and any(attempt == self.attempt for _, attempt in self._tables):
            self._pending = True

    def add(self, steps: Steps) -> None:
        numbered = steps.layout.numbered
        if self._pending:
            self._begin_attempt()
        if self._mains.setdefault(numbered, steps.rank) != steps.rank:
            self.copies += steps.count
            return
        if not numbered:
            self._keep(steps.layout, steps.numbers)
            return
        done = np.frombuffer(steps.numbers)[:: steps.layout.width] + steps.layout.zero_based
        if done[0] > self._recent[1] and (np.diff(done) > 0).all():
            self._keep(steps.layout, steps.numbers)
            self._recent = (done[-2] if len(done) > 1 else self._recent[1], done[-1])
            return
        for number, step in enumerate(done):
            width = steps.layout.width
            self._add_one(steps.layout, steps.numbers[number * width : (number + 1) * width], step)

    def _add_one(self, layout: LineFormat, numbers: array[float], step: float) -> None:
        if step in self._recent:
            self.copies += 1
            return
        if step < self._recent[1]:
            self._begin_attempt()
        self._keep(layout, numbers)
        self._recent = (self._recent[1], step)

    def _begin_attempt(self) -> None:
        self.attempt += 1
        self._pending = False
        self._recent = (-1, -1)
        self._mains.clear()

    def _keep(self, layout: LineFormat, numbers: array[float]) -> None:
        self._tables.setdefault((layout, self.attempt), array("d")).extend(numbers)

    @property
    def dialects(self) -> list[str]:
        return sorted({layout.dialect for layout, _ in self._tables})

    def steps(self) -> pd.DataFrame:
        """One row per printed step and attempt: `step`, `attempt`, `total`, `replayed`, and every field."""
        frame = self._frame(numbered=True)
        if frame.empty:
            return frame
        if not frame["step"].is_monotonic_increasing:
            frame = frame.sort_values(["step", "attempt"], kind="stable", ignore_index=True)
        # A step that a later attempt went behind is undone, whether that printed the same step or others around it.
        undone = pd.Series(False, index=frame.index)
        firsts = frame.groupby("attempt")["step"].min()
        for attempt, first in firsts.iloc[1:].items():
            undone |= (frame["attempt"] < attempt) & (frame["step"] >= first)
        frame["replayed"] = undone
        return frame

    def speeds(self) -> pd.DataFrame:
        """Lines about a step that do not say which, in their order."""
        return self._frame(numbered=False)

    def _frame(self, numbered: bool) -> pd.DataFrame:
        parts = [
            _part(layout, attempt, numbers)
            for (layout, attempt), numbers in self._tables.items()
            if layout.numbered == numbered
        ]
        if len(parts) < 2:
            return parts[0] if parts else pd.DataFrame()
        return pd.concat(parts, ignore_index=True)


def _part(layout: LineFormat, attempt: int, numbers: array[float]) -> pd.DataFrame:
    rows = np.frombuffer(numbers).reshape(-1, layout.width)
    columns = {
        "step": rows[:, 0].astype("int64") + layout.zero_based,
        "attempt": attempt,
        "total": rows[:, 1] + layout.zero_based,
    }
    for place, (name, scale) in enumerate(layout.known()):
        columns[name] = rows[:, place + 2] if scale == 1.0 else rows[:, place + 2] * scale
    if "loss" in columns:
        columns["not_finite"] = ~np.isfinite(columns["loss"])
    return pd.DataFrame(columns, copy=False)
