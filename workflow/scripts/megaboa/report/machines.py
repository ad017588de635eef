"""What the runs took of their GPUs: a table of the page, and columns of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megaboa.report.expected import measured_gib
from megaboa.report.runs import RunResult


@dataclass(frozen=True)
class Took:
    """Medians; memory is the most of any rank. None where it wasn't measured."""

    run: str
    tflops: float | None
    mfu: float | None
    gib: float | None
    joules: float | None  # of one GPU in a step
    watts: float | None
    slowest_over_fastest: float | None
    slowest: str  # rank

    @property
    def is_known(self) -> bool:
        return any(value is not None for value in (self.gib, self.joules, self.slowest_over_fastest))


def rows(runs: Sequence[RunResult]) -> list[Took]:
    """None on the CPU."""
    return [row for row in map(took, runs) if row.is_known]


def took(run: RunResult) -> Took:
    summary = run.summary or {}
    energy, stragglers = summary.get("energy") or {}, summary.get("stragglers") or {}
    return Took(
        run=run.name,
        tflops=_median(summary.get("tflops_per_rank")),
        mfu=_median(summary.get("mfu")),
        gib=measured_gib(summary),
        joules=_median(energy.get("joules_per_gpu_and_step")),
        watts=_median(energy.get("watts_per_gpu")),
        slowest_over_fastest=_median(stragglers.get("slowest_over_fastest")),
        slowest=_slowest(stragglers.get("slowest") or {}),
    )


def _median(spread: dict[str, Any] | None) -> float | None:
    return spread["median"] if spread else None


def _slowest(times: dict[str, int]) -> str:
    """`3, in 18 of 20 reports`"""
    if not times:
        return ""
    rank, often = max(times.items(), key=lambda item: item[1])
    return f"{rank}, in {often} of {sum(times.values())} reports"
