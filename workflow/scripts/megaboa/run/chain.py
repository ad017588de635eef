"""How many jobs of its wall time a run needs, one after the other. Standard library only."""

from __future__ import annotations

import math

from megaboa.run.recovery import lead_seconds

_UNITS = {"m": 60, "h": 3600, "d": 86_400}


def wall_seconds(runtime: str) -> int:
    """`resources.runtime` in seconds: `90` and `90m` are minutes, `4h` hours, `2d` days."""
    number, unit = (runtime[:-1], runtime[-1]) if runtime[-1] in _UNITS else (runtime, "m")
    return int(number) * _UNITS[unit]


def links(seconds: float, wall_time: float, step: float | None = None, save: float | None = None) -> int:
    """Jobs for so many seconds of training. Each loses the time that its last save is given.

    `step` and `save`: seconds that these take, where they were measured.
    """
    return math.ceil(max(seconds, 0) / (wall_time - lead_seconds(save, step, wall_time)))
