"""The learning rate of a step, as Megatron-Core's optimizer_param_scheduler.py calculates it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Steps count from the first of all; WSD has Bridge's shape, `minus_sqrt`."""

    decay: str
    peak: float
    least: float  # at the end of the decay
    warmup: int
    end: int  # the last step of the decay
    batch: int  # samples of a step
    final: int | None = None  # WSD's decay: its length

    def rate_after(self, steps: int) -> float:
        """The rate of the step that follows so many."""
        if steps <= self.warmup:
            return self.peak * steps / self.warmup if self.warmup else self.peak
        if self.decay == "constant":
            return self.peak
        if steps > self.end:
            return self.least
        if self.decay == "inverse-square-root":
            first = self.warmup or 1 / self.batch  # Megatron counts samples, from the first where there is no warm-up
            return max(self.least, self.peak * math.sqrt(first / steps))
        return self.least + self._part_left(steps) * (self.peak - self.least)

    def _part_left(self, steps: int) -> float:
        passed = (steps - self.warmup) / (self.end - self.warmup)
        if self.decay == "linear":
            return 1 - passed
        if self.decay == "cosine":
            return (math.cos(math.pi * passed) + 1) / 2
        length = self.final or self.end
        return 1 - math.sqrt(max(0, steps - self.end + length) / length)
