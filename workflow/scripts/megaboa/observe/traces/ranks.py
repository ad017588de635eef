"""Which rank holds which part of the model, and who is slow among those that do the same."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

# Differences below this are noise.
NOTICEABLE = 0.02
# The same rank is the slowest in this share of the steps: it is slow, not unlucky.
PERSISTENT = 0.7


class Layout(Protocol):
    """What is asked about the division of a run among its ranks: `megaboa.layout.Layout` answers."""

    pp: int

    @property
    def world_size(self) -> int | None: ...

    @property
    def ways(self) -> int: ...

    def stage(self, rank: int) -> int: ...

    def part(self, rank: int) -> str: ...

    def ideal_bubble(self, microbatches: int | None) -> float | None: ...


def stragglers(parts: dict[str, list[int]], work: dict[int, dict[int, float]], hosts: dict[int, str]) -> list[dict]:
    """For every part that several captured ranks hold: who is slow, and whether always.

    `work` is each rank's milliseconds by step, without communication: in that a fast rank waits for a slow one.
    """
    return [_part(part, ranks, work, hosts) for part, ranks in parts.items() if len(ranks) > 1]


def _part(part: str, ranks: list[int], work: dict[int, dict[int, float]], hosts: dict[int, str]) -> dict[str, Any]:
    steps = sorted(set.intersection(*(set(work[rank]) for rank in ranks)))
    if not steps:
        return {"part": part, "ranks": ranks, "n": 0, "verdict": "no steps in common"}
    table = np.array([[work[rank][step] for step in steps] for rank in ranks])
    medians = np.median(table, axis=1)
    middle = float(np.median(medians))
    slowest = np.array(ranks)[table.argmax(axis=0)]
    spread = float((medians.max() - medians.min()) / middle) if middle else 0.0
    by_step = float(np.median((table.max(axis=0) - table.min(axis=0)) / np.maximum(np.median(table, axis=0), 1e-9)))
    worst = ranks[int(medians.argmax())]
    share = float((slowest == worst).mean())
    if spread > NOTICEABLE and share >= PERSISTENT:
        verdict = "persistent"
    else:
        verdict = "rotating" if by_step > NOTICEABLE else "even"
    return {
        "part": part,
        "ranks": ranks,
        "n": len(steps),
        "fastest": ranks[int(medians.argmin())],
        "slowest": worst,
        "slowest_host": hosts.get(worst),
        "slowest_in": share,
        "spread": spread,
        "spread_by_step": by_step,
        "verdict": verdict,
        "median_ms": {str(rank): float(value) for rank, value in zip(ranks, medians, strict=True)},
    }


def by_host(found: list[dict[str, Any]]) -> list[str]:
    """Hosts that have a persistently slow rank."""
    return sorted({row["slowest_host"] for row in found if row["verdict"] == "persistent" and row["slowest_host"]})
